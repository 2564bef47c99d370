// SPDX-License-Identifier: Apache-2.0
// Tier: call. safetensors and npy files. Reading copies out of the mapped file, so that the arrays
// are writable and aligned; qkv/_files.py gives them their names and shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "bindings_array.h"
#include "bindings_attention.h"
#include "qkv/weights.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace qkv::python {
namespace {

int64_t count(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t extent : shape) n *= extent;
  return n;
}

// A flat array and the shape it stands for: files may have more axes than a view.
nb::tuple flat_copy(const void* data, const TensorInfo& info) {
  const int64_t n = count(info.shape);
  Tensor view;
  Ref array = make_numpy(info.dtype, std::span<const int64_t>(&n, 1), &view);
  if (n > 0) std::memcpy(view.data, data, static_cast<size_t>(n * size_bytes(info.dtype)));
  nb::list shape;
  for (const int64_t extent : info.shape) shape.append(extent);
  return nb::make_tuple(nb::steal(array.release()), nb::tuple(shape),
                        std::string(name(info.dtype)));
}

nb::tuple load_safetensors(const std::string& path) {
  SafetensorsFile file = [&] {
    nb::gil_scoped_release released;
    return SafetensorsFile::open(path);
  }();
  nb::dict tensors;
  for (const TensorInfo& info : file.tensors())
    tensors[nb::str(info.name.c_str(), info.name.size())] = flat_copy(file.data(info), info);
  nb::dict metadata;
  for (const auto& [key, value] : file.metadata())
    metadata[nb::str(key.c_str(), key.size())] = nb::str(value.c_str(), value.size());
  return nb::make_tuple(tensors, metadata);
}

void save(const std::string& path, const nb::dict& tensors,
          const std::map<std::string, std::string>& metadata) {
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<NamedTensor> named;
  for (const auto& [key, value] : tensors) {
    arrays.push_back(std::make_unique<Array>());
    const std::string name = nb::cast<std::string>(key);
    arrays.back()->open(value.ptr(), "save_safetensors", name.c_str());
    named.push_back({name, arrays.back()->view()});
  }
  nb::gil_scoped_release released;
  save_safetensors(path, named, metadata);
}

nb::tuple load_npy(const std::string& path) {
  const NpyFile file = NpyFile::open(path);
  const TensorInfo& info = file.info();
  std::vector<int64_t> shape = info.shape;
  if (info.shape.size() > static_cast<size_t>(Tensor::kMaxRank)) file.tensor();  // refuses
  const ConstTensor view = file.tensor();
  TensorInfo flat = info;
  return nb::make_tuple(flat_copy(view.data, flat), file.fortran_order());
}

}  // namespace

void bind_files(nb::module_& module) {
  module.def("load_safetensors", &load_safetensors, "path"_a);
  module.def("save_safetensors", &save, "path"_a, "tensors"_a, "metadata"_a);
  module.def("load_npy", &load_npy, "path"_a);
}

}  // namespace qkv::python

// SPDX-License-Identifier: Apache-2.0
// Tier: call. NpyFile: a mapped npy file behind a checked header; save_npy(): a strided tensor out,
// atomically.
#include <bit>
#include <utility>

#include "atomic_file.h"
#include "bool_bytes.h"
#include "extents.h"
#include "file_error.h"
#include "mapped_file.h"
#include "npy_header.h"
#include "qkv/weights.h"

namespace qkv {

static_assert(std::endian::native == std::endian::little, "tensor files are little endian");

struct NpyFile::Impl {
  Impl(MappedFile mapped, std::string name, std::string_view caller)
      : path(std::move(name)),
        file(std::move(mapped)),
        header(parse_npy_header(file.text(), path, caller)) {}

  std::string path;
  MappedFile file;
  NpyHeader header;
  AlignedCopies aligned;
};

NpyFile::NpyFile(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

NpyFile NpyFile::open(const std::string& path) {
  constexpr std::string_view kCaller = "NpyFile::open";
  return NpyFile(std::make_shared<Impl>(MappedFile::open(path, kCaller), path, kCaller));
}

NpyFile NpyFile::from_bytes(std::string_view bytes, const std::string& name) {
  return NpyFile(std::make_shared<Impl>(MappedFile::copy_of(bytes), name, "NpyFile::from_bytes"));
}

const TensorInfo& NpyFile::info() const { return impl_->header.info; }

bool NpyFile::fortran_order() const { return impl_->header.fortran_order; }

const std::string& NpyFile::path() const { return impl_->path; }

ConstTensor NpyFile::tensor() const {
  constexpr std::string_view kCaller = "NpyFile::tensor";
  const TensorInfo& t = info();
  const size_t rank = t.shape.size();
  if (rank > ConstTensor::kMaxRank) {
    file_error_at(kCaller, path(), t.begin_bytes,
                  "the array " + shape_text(t.shape) + " has " + std::to_string(rank) +
                      " axes, at most " + std::to_string(ConstTensor::kMaxRank) + " are supported");
  }
  const std::byte* bytes = impl_->file.data() + t.begin_bytes;
  const int64_t n_bytes = t.end_bytes - t.begin_bytes;
  if (t.dtype == DType::boolean) check_bool_bytes(bytes, n_bytes, t.begin_bytes, kCaller, path());
  const void* data = impl_->aligned.get(bytes, n_bytes, size_bytes(t.dtype));
  if (!fortran_order()) return {data, t.dtype, t.shape};
  std::vector<int64_t> strides;  // first axis fastest
  int64_t step = 1;
  for (const int64_t extent : t.shape) {
    strides.push_back(step);
    step *= extent;
  }
  return {data, t.dtype, t.shape, strides};
}

void save_npy(const std::string& path, ConstTensor tensor) {
  constexpr std::string_view kCaller = "save_npy";
  if (!tensor || (tensor.data == nullptr && tensor.num_elements() != 0)) {
    file_error(kCaller, path, "there is no data to write");
  }
  if (qkv::info(tensor.dtype).npy.empty()) {
    file_error(kCaller, path,
               "npy has no dtype " + std::string(name(tensor.dtype)) +
                   "; convert to f32, or write safetensors");
  }
  TensorInfo info;
  info.dtype = tensor.dtype;
  info.shape.assign(tensor.shape, tensor.shape + tensor.rank);
  if (!tensor_bytes(info.shape, info.dtype)) {
    file_error(kCaller, path, "the tensor " + shape_text(tensor) + " is too large for a file");
  }
  AtomicFile file(path, kCaller);
  file.write(format_npy_header(info));
  write_c_order(tensor, &file);
  file.commit();
}

}  // namespace qkv

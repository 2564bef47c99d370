// SPDX-License-Identifier: Apache-2.0
// Tier: call. SafetensorsFile: a mapped file behind a checked header; save_safetensors(): strided
// tensors out, atomically.
#include <bit>
#include <utility>

#include "bool_bytes.h"
#include "file_error.h"
#include "mapped_file.h"
#include "qkv/weights.h"
#include "safetensors_header.h"

namespace qkv {

static_assert(std::endian::native == std::endian::little, "tensor files are little endian");

struct SafetensorsFile::Impl {
  Impl(MappedFile mapped, std::string name, std::string_view caller)
      : path(std::move(name)),
        file(std::move(mapped)),
        header(parse_safetensors_header(file.text(), path, caller)) {
    for (size_t i = 0; i < header.tensors.size(); ++i) index.emplace(header.tensors[i].name, i);
  }

  std::string path;
  MappedFile file;
  SafetensorsHeader header;
  std::map<std::string, size_t, std::less<>> index;
  AlignedCopies aligned;
};

SafetensorsFile::SafetensorsFile(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  constexpr std::string_view kCaller = "SafetensorsFile::open";
  return SafetensorsFile(std::make_shared<Impl>(MappedFile::open(path, kCaller), path, kCaller));
}

SafetensorsFile SafetensorsFile::from_bytes(std::string_view bytes, const std::string& name) {
  return SafetensorsFile(
      std::make_shared<Impl>(MappedFile::copy_of(bytes), name, "SafetensorsFile::from_bytes"));
}

const std::vector<TensorInfo>& SafetensorsFile::tensors() const { return impl_->header.tensors; }

const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return impl_->header.metadata;
}

const std::string& SafetensorsFile::path() const { return impl_->path; }

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto it = impl_->index.find(name);
  return it == impl_->index.end() ? nullptr : &impl_->header.tensors[it->second];
}

const void* SafetensorsFile::data(const TensorInfo& info) const {
  return impl_->file.data() + info.begin_bytes;
}

ConstTensor SafetensorsFile::tensor(std::string_view name) const {
  constexpr std::string_view kCaller = "SafetensorsFile::tensor";
  const TensorInfo* info = find(name);
  if (info == nullptr) file_error(kCaller, path(), "there is no tensor " + in_quotes(name));
  if (info->shape.size() > ConstTensor::kMaxRank) {
    file_error_at(kCaller, path(), info->begin_bytes,
                  "tensor " + in_quotes(name) + " " + shape_text(info->shape) + " has " +
                      std::to_string(info->shape.size()) + " axes, at most " +
                      std::to_string(ConstTensor::kMaxRank) + " are supported");
  }
  const std::byte* bytes = impl_->file.data() + info->begin_bytes;
  const int64_t n_bytes = info->end_bytes - info->begin_bytes;
  if (info->dtype == DType::boolean) {
    check_bool_bytes(bytes, n_bytes, info->begin_bytes, kCaller, path());
  }
  return {impl_->aligned.get(bytes, n_bytes, size_bytes(info->dtype)), info->dtype, info->shape};
}

}  // namespace qkv

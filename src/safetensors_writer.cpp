// SPDX-License-Identifier: Apache-2.0
// Tier: call. save_safetensors(): strided tensors out, byte for byte as the format's reference
// implementation lays them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "atomic_file.h"
#include "extents.h"
#include "file_error.h"
#include "qkv/weights.h"
#include "safetensors_header.h"
#include "utf8.h"

namespace qkv {
namespace {

constexpr std::string_view kSaveCaller = "save_safetensors";

/// The order of the data: types of wide elements first, so that every tensor is aligned; then by
/// name. Same as the format's reference implementation, so that equal tensors give equal files.
constexpr std::array<DType, kDTypes.size()> kDataOrder = {
    DType::u64, DType::i64, DType::f64, DType::f32, DType::u32, DType::i32,    DType::bf16,
    DType::f16, DType::u16, DType::i16, DType::i8,  DType::u8,  DType::boolean};

size_t data_order(DType t) {
  return static_cast<size_t>(std::find(kDataOrder.begin(), kDataOrder.end(), t) -
                             kDataOrder.begin());
}

void check_text(const std::string& path, const char* what, const std::string& text) {
  if (!is_utf8(text)) {
    file_error(kSaveCaller, path, std::string(what) + " " + in_quotes(text) + " is not UTF-8");
  }
}

void check_names(const std::string& path, const std::vector<NamedTensor>& tensors,
                 const std::map<std::string, std::string>& metadata) {
  std::set<std::string_view> names;
  for (const NamedTensor& t : tensors) {
    check_text(path, "the name", t.name);
    if (t.name == kSafetensorsMetadataKey) {
      file_error(kSaveCaller, path, "a tensor cannot be named " + in_quotes(t.name));
    }
    if (!names.insert(t.name).second) {
      file_error(kSaveCaller, path, "the name " + in_quotes(t.name) + " appears twice");
    }
    if (!t.tensor || (t.tensor.data == nullptr && t.tensor.num_elements() != 0)) {
      file_error(kSaveCaller, path, "tensor " + in_quotes(t.name) + " has no data");
    }
  }
  for (const auto& [key, value] : metadata) {
    check_text(path, "the metadata key", key);
    check_text(path, "the metadata value", value);
  }
}

/// The JSON, padded with spaces to a multiple of 8 bytes. Offsets count from the start of
/// the data.
std::string header_text(const std::vector<TensorInfo>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) {
    text += fmt::format("\"{}\":{}", kSafetensorsMetadataKey, nlohmann::json(metadata).dump());
  }
  for (const TensorInfo& t : tensors) {
    text +=
        fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}",
                    text.size() > 1 ? "," : "", nlohmann::json(t.name).dump(),
                    info(t.dtype).safetensors, fmt::join(t.shape, ","), t.begin_bytes, t.end_bytes);
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

std::string length_text(uint64_t length) {
  std::string text;
  for (int i = 0; i < kSafetensorsLengthBytes; ++i) {
    text += static_cast<char>(length >> (8 * i) & 0xff);
  }
  return text;
}

}  // namespace

void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  check_names(path, tensors, metadata);
  std::vector<const NamedTensor*> order;
  for (const NamedTensor& t : tensors) order.push_back(&t);
  std::sort(order.begin(), order.end(), [](const NamedTensor* a, const NamedTensor* b) {
    return std::pair(data_order(a->tensor.dtype), std::string_view(a->name)) <
           std::pair(data_order(b->tensor.dtype), std::string_view(b->name));
  });
  std::vector<TensorInfo> infos;
  int64_t end = 0;
  for (const NamedTensor* t : order) {
    TensorInfo info;
    info.name = t->name;
    info.dtype = t->tensor.dtype;
    info.shape.assign(t->tensor.shape, t->tensor.shape + t->tensor.rank);
    const std::optional<int64_t> bytes = tensor_bytes(info.shape, info.dtype);
    info.begin_bytes = end;
    if (!bytes || __builtin_add_overflow(end, *bytes, &end)) {
      file_error(kSaveCaller, path,
                 "tensor " + in_quotes(info.name) + " " + shape_text(info.shape) +
                     " is too large for a file");
    }
    info.end_bytes = end;
    infos.push_back(std::move(info));
  }
  const std::string header = header_text(infos, metadata);
  if (static_cast<int64_t>(header.size()) > kMaxSafetensorsHeaderBytes) {
    file_error(kSaveCaller, path,
               "names and metadata need a header of " + std::to_string(header.size()) +
                   " bytes, more than the " + std::to_string(kMaxSafetensorsHeaderBytes) +
                   " allowed");
  }
  AtomicFile file(path, kSaveCaller);
  file.write(length_text(header.size()));
  file.write(header);
  for (const NamedTensor* t : order) write_c_order(t->tensor, &file);
  file.commit();
}

}  // namespace qkv

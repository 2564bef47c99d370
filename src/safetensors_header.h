// SPDX-License-Identifier: Apache-2.0
// Tier: call. The header of a safetensors file: 8 bytes of length (little endian), then JSON
//   {"__metadata__": {text: text}, name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin,
//   end]}, ...}
// then the data, which the offsets must cover without overlap, hole or rest. Called by
// src/safetensors.cpp.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "qkv/weights.h"

namespace qkv {

/// Limit of the format's reference implementation.
inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

/// Bytes of the number in front of the header.
inline constexpr int64_t kSafetensorsLengthBytes = 8;
/// The one name that is not a tensor's.
inline constexpr std::string_view kSafetensorsMetadataKey = "__metadata__";

struct SafetensorsHeader {
  std::vector<TensorInfo>
      tensors;  // in the order of their offsets; offsets count from the start of the file
  std::map<std::string, std::string> metadata;
};

/// file is the whole file. Throws Error with path and byte offset unless every entry can be used as
/// it stands.
SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& path,
                                           std::string_view caller);

}  // namespace qkv

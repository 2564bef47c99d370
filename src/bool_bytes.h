// SPDX-License-Identifier: Apache-2.0
// Tier: call. Booleans from a file: a byte that is neither 0 nor 1 is undefined behaviour as a C++
// bool, so it is refused.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "file_error.h"

namespace qkv {

/// offset_bytes: of the first byte, from the start of the file.
inline void check_bool_bytes(const std::byte* bytes, int64_t n_bytes, int64_t offset_bytes,
                             std::string_view caller, const std::string& path) {
  for (int64_t i = 0; i < n_bytes; ++i) {
    if (std::to_integer<unsigned>(bytes[i]) > 1) {
      file_error_at(caller, path, offset_bytes + i,
                    "a boolean is " + std::to_string(std::to_integer<unsigned>(bytes[i])) +
                        ", 0 or 1 is wanted");
    }
  }
}

}  // namespace qkv

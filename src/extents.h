// SPDX-License-Identifier: Apache-2.0
// Tier: call. Sizes that a file claims, checked against overflow before anything is computed from
// them.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "qkv/dtype.h"

namespace qkv {

/// Most axes a tensor in a file may have; NumPy's limit.
inline constexpr size_t kMaxFileAxes = 64;

/// Bytes of a tensor, or nothing if the count overflows. Axes of extent 0 make the tensor empty but
/// do not hide an overflow of the other axes: strides are computed from those.
inline std::optional<int64_t> tensor_bytes(const std::vector<int64_t>& shape, DType dtype) {
  int64_t bytes = size_bytes(dtype);
  bool is_empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      is_empty = true;
    } else if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return std::nullopt;
    }
  }
  return is_empty ? 0 : bytes;
}

}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Integers of the caller: positions [tokens] or [batch or 1, tokens], i32 or i64.
#pragma once
#include <fmt/format.h>

#include <cstdint>
#include <vector>

#include "check.h"

namespace qkv {

inline int64_t integer_element(const ConstTensor& t, int64_t offset) {
  return t.dtype == DType::i32 ? static_cast<const int32_t*>(t.data)[offset]
                               : static_cast<const int64_t*>(t.data)[offset];
}

inline bool is_integer(const ConstTensor& t) {
  return t.dtype == DType::i32 || t.dtype == DType::i64;
}

inline void check_positions(const Check& check, const ConstTensor& t, int64_t batch,
                            int64_t tokens) {
  const bool fits =
      (t.rank == 1 && t.shape[0] == tokens) ||
      (t.rank == 2 && t.shape[1] == tokens && (t.shape[0] == 1 || t.shape[0] == batch));
  if (!fits || !is_integer(t) || (!t.data && t.num_elements() > 0)) {
    check.refuse(
        fmt::format("positions need [tokens] or [batch, tokens] integers (i32 or i64), [{1}] or "
                    "[{0}, {1}], got "
                    "{2} {3}",
                    batch, tokens, name(t.dtype), shape_text(t)));
  }
}

/// The positions of batch entry b.
inline std::vector<int64_t> positions_of(const ConstTensor& t, int64_t b) {
  const int axis = t.rank == 2 ? 1 : 0;
  const int64_t n = t.shape[axis], step = t.stride[axis];
  const int64_t first = t.rank == 2 && t.shape[0] > 1 ? b * t.stride[0] : 0;
  std::vector<int64_t> all(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    all[static_cast<size_t>(i)] = integer_element(t, first + i * step);
  return all;
}

}  // namespace qkv

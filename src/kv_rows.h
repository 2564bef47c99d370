// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Rows on their way into a KvCache: norm, rope, and rounding to the type of the cache.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv_block.h"
#include "qkv/kv_cache.h"
#include "rope_table.h"

namespace qkv {

/// What happens to a row before it is stored.
struct RowSteps {
  const std::vector<float>* norm = nullptr;  // weights, nullptr or empty: none
  double norm_eps = 0;
  const RopeTable* rope = nullptr;  // filled for the tokens of the rows

  bool is_none() const { return !rope && (!norm || norm->empty()); }
  /// x[0, dim) in place; `token` is the row of the table.
  template <class T>
  void apply(int64_t token, int64_t dim, T* x) const;
};

/// Sums over everything that was rounded to i8.
struct QuantSums {
  double max_abs = 0, max_relative = 0, squares = 0;
  int64_t elements = 0;
  void add(const QuantSums& o) {
    max_abs = std::max(max_abs, o.max_abs), max_relative = std::max(max_relative, o.max_relative);
    squares += o.squares, elements += o.elements;
  }
};

/// n rows of one head: tokens [first, first + n) of `from`, whose rows are from_stride elements apart,
/// to rows to_stride apart. scale and sums are used for i8 only; row is room for dim doubles.
/// Allocates nothing.
struct RowsJob {
  const void* from;
  DType from_dtype;
  int64_t from_stride;
  void* to;
  DType to_dtype;
  int64_t to_stride;
  float* scale;
  int64_t first, n, dim;
  void* row;
};
void write_rows(const RowsJob& job, const RowSteps& steps, QuantSums* sums);

}  // namespace qkv

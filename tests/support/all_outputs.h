// SPDX-License-Identifier: Apache-2.0
// Tier: test. Everything that a call can give, and the results of an entry or a packed sequence beside
// those of the same rows alone.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "support/run_attention.h"

namespace qkv::test {

/// Outputs [batch, num_heads, n_q, ...] of every kind in guarded memory that was NaN before; out with
/// its tokens in front, as packed sequences have them.
struct AllOutputs {
  TestTensor out, lse, weights, mean, rows, top, top_keys, sums, entropy;
  std::vector<int64_t> weight_rows;

  AllOutputs() = default;
  /// out and lse alone.
  AllOutputs(DType dtype, const Extents& e)
      : out(dtype, {e.batch, e.num_heads, e.n_q, e.head_dim_v}, Layout::bshd),
        lse(arithmetic_dtype(dtype), {e.batch, e.num_heads, e.n_q}) {}
  /// num_keys: of column_sums.
  AllOutputs(DType dtype, const Extents& e, std::vector<int64_t> rows_of, int64_t top_k,
             int64_t num_keys = -1)
      : AllOutputs(dtype, e) {
    weight_rows = std::move(rows_of);
    const DType arithmetic = arithmetic_dtype(dtype);
    const int64_t n_rows = static_cast<int64_t>(weight_rows.size());
    const auto make = [&](DType type, int64_t heads, std::vector<int64_t> more) {
      std::vector<int64_t> shape = {e.batch, heads};
      shape.insert(shape.end(), more.begin(), more.end());
      return TestTensor(type, shape);
    };
    weights = make(arithmetic, e.num_heads, {e.n_q, e.n_kv});
    mean = make(arithmetic, e.n_q, {e.n_kv});
    rows = make(arithmetic, e.num_heads, {n_rows, e.n_kv});
    top = make(arithmetic, e.num_heads, {e.n_q, top_k});
    top_keys = make(DType::i64, e.num_heads, {e.n_q, top_k});
    sums = make(arithmetic, e.num_heads, {num_keys < 0 ? e.n_kv : num_keys});
    entropy = make(arithmetic, e.num_heads, {e.n_q});
    weight_rows.reserve(1);  // data() is not nullptr
  }

  AttentionOutputs view() const {
    AttentionOutputs o;
    o.out = out.view(), o.lse = lse.view(), o.weights = weights.view();
    o.mean_weights = mean.view(), o.row_weights = rows.view();
    if (rows)
      o.weight_rows = ConstTensor(weight_rows.data(), {static_cast<int64_t>(weight_rows.size())});
    o.top_weights = top.view(), o.top_keys = top_keys.view();
    o.column_sums = sums.view(), o.entropy = entropy.view();
    return o;
  }
  /// The same of batch 1 as the outputs of packed sequences.
  AttentionOutputs packed_view() const {
    AttentionOutputs o = view();
    for (Tensor* t : {&o.lse, &o.weights, &o.mean_weights, &o.row_weights, &o.top_weights,
                      &o.top_keys, &o.column_sums, &o.entropy, &o.out}) {
      --t->rank;
      for (int a = 0; a < t->rank; ++a)
        t->shape[a] = t->shape[a + 1], t->stride[a] = t->stride[a + 1];
    }
    std::swap(o.out.shape[0], o.out.shape[1]), std::swap(o.out.stride[0], o.out.stride[1]);
    return o;
  }
  std::vector<std::byte> bits() const {
    std::vector<std::byte> all;
    for (const TestTensor* t :
         {&out, &lse, &weights, &mean, &rows, &top, &top_keys, &sums, &entropy})
      for (const std::byte x : t->bits()) all.push_back(x);
    return all;
  }
};

/// weight_rows in [first, first + n), counted from first.
inline std::vector<int64_t> rows_within(const std::vector<int64_t>& rows, int64_t first,
                                        int64_t n) {
  std::vector<int64_t> own;
  for (const int64_t i : rows)
    if (i >= first && i < first + n) own.push_back(i - first);
  return own;
}

/// Rows [first, ...) of entry b are those of `alone`, which has weight_rows as rows_within() gives
/// them, bit for bit; keys that it lacks have weight 0. Its columns of column_sums begin at
/// first_column.
inline void expect_part(const AllOutputs& all, int64_t b, int64_t first, int64_t first_column,
                        const AllOutputs& alone, const std::string& text) {
  const Tensor& shape = alone.out.view();
  const int64_t heads = shape.shape[1], n_q = shape.shape[2];
  bool is_same = true;
  // The last axis, n elements: `want` in front, then 0.
  const auto row = [&](const char* what, const TestTensor& got, int64_t got_at,
                       const TestTensor& want, int64_t want_at, int64_t n) {
    const Tensor &g = got.view(), &w = want.view();
    const int64_t want_n = w.shape[w.rank - 1];
    for (int64_t j = 0; j < n && is_same; ++j) {
      const double x = element(g, got_at + j * g.stride[g.rank - 1]);
      const double y = j < want_n ? element(w, want_at + j * w.stride[w.rank - 1]) : 0;
      is_same = x == y || (std::isnan(x) && std::isnan(y));
      if (!is_same)
        ADD_FAILURE() << what << " of entry " << b << ", place " << j << ": " << x << " is not "
                      << y << ", " << text;
    }
  };
  const auto last = [](const TestTensor& t) { return t.view().shape[t.view().rank - 1]; };
  const auto of = [&](const char* what, const TestTensor& got, const TestTensor& want) {
    if (!got) return;
    const bool is_number = got.view().rank == 3;  // a row of queries
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < (is_number ? 1 : n_q); ++i)
        row(what, got, got.offset(b, h, first + i), want, want.offset(0, h, i),
            is_number ? n_q : last(got));
  };
  of("out", all.out, alone.out), of("lse", all.lse, alone.lse);
  of("weights", all.weights, alone.weights), of("entropy", all.entropy, alone.entropy);
  of("top_weights", all.top, alone.top), of("top_keys", all.top_keys, alone.top_keys);
  if (!all.weights) return;
  for (int64_t i = 0; i < n_q; ++i)
    row("mean_weights", all.mean, all.mean.offset(b, first + i), alone.mean,
        alone.mean.offset(0, i), last(all.mean));
  for (int64_t h = 0; h < heads; ++h) {
    row("column_sums", all.sums, all.sums.offset(b, h, first_column), alone.sums,
        alone.sums.offset(0, h), last(alone.sums));
    int64_t own = 0;
    for (size_t slot = 0; slot < all.weight_rows.size(); ++slot)
      if (all.weight_rows[slot] >= first && all.weight_rows[slot] < first + n_q)
        row("row_weights", all.rows, all.rows.offset(b, h, static_cast<int64_t>(slot)), alone.rows,
            alone.rows.offset(0, h, own++), last(all.rows));
  }
}

/// Rows [first, first + n) of entry b are padding.
inline void expect_padding(const AllOutputs& all, int64_t b, int64_t first, int64_t n) {
  const auto every = [&](const TestTensor& t, int64_t i, double want) {
    const Tensor& v = t.view();
    for (int64_t h = 0; t && h < v.shape[1]; ++h)
      for (int64_t d = 0; d < (v.rank == 4 ? v.shape[3] : 1); ++d)
        ASSERT_EQ(element(v, t.offset(b, h, i, d)), want) << "entry " << b << " row " << i;
  };
  for (int64_t i = first; i < first + n; ++i) {
    every(all.out, i, 0), every(all.weights, i, 0), every(all.entropy, i, 0);
    every(all.top, i, 0), every(all.top_keys, i, -1);
    every(all.lse, i, -std::numeric_limits<double>::infinity());
    for (int64_t j = 0; all.mean && j < all.mean.view().shape[2]; ++j)
      ASSERT_EQ(element(all.mean.view(), all.mean.offset(b, i, j)), 0);
    for (size_t slot = 0; slot < all.weight_rows.size(); ++slot)
      if (all.weight_rows[slot] == i) every(all.rows, static_cast<int64_t>(slot), 0);
  }
}

/// Keys that entry b lacks have no column.
inline void expect_no_columns(const AllOutputs& all, int64_t b, int64_t first) {
  const Tensor& sums = all.sums.view();
  for (int64_t h = 0; h < sums.shape[1]; ++h)
    for (int64_t j = first; j < sums.shape[2]; ++j)
      ASSERT_EQ(element(sums, all.sums.offset(b, h, j)), 0) << "entry " << b << " key " << j;
}

}  // namespace qkv::test

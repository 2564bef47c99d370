// SPDX-License-Identifier: Apache-2.0
// Runs attention() on a problem of problems.h and compares it with the reference.
#pragma once
#include <gtest/gtest.h>

#include "qkv/attention.h"
#include "reference.h"
#include "support/bounds.h"
#include "support/naive.h"
#include "support/problems.h"

namespace qkv::test {

/// What one call wrote, in guarded memory that was NaN before.
struct Results {
  TestTensor out, lse, weights;
};

struct Wanted {
  bool out = true, lse = true, weights = true;
};

inline DType arithmetic_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

inline Results run_attention(const Problem& p, const AttentionOptions& options, Wanted wanted = {},
                             Layout layout = Layout::contiguous) {
  const Extents& e = p.extents;
  const DType dtype = p.q.view().dtype, arithmetic = arithmetic_dtype(dtype);
  Results r;
  if (wanted.out) r.out = TestTensor(dtype, {e.batch, e.num_heads, e.n_q, e.head_dim_v}, layout);
  if (wanted.lse) r.lse = TestTensor(arithmetic, {e.batch, e.num_heads, e.n_q});
  if (wanted.weights)
    r.weights = TestTensor(arithmetic, {e.batch, e.num_heads, e.n_q, e.n_kv}, layout);
  attention(p.q, p.k, p.v, {.out = r.out.view(), .lse = r.lse.view(), .weights = r.weights.view()},
            options);
  return r;
}

/// Errors of plain loops in the kernel's precision: the largest of the samples.
struct NaiveErrors {
  double out, lse, weights;
};
template <class T>
NaiveErrors naive_errors_as(const Problem& p, const reference::Forward& want) {
  NaiveErrors worst{};
  for (Loop loop : kLoops) {
    const auto naive = NaiveForward<T>(p.q, p.k, p.v, p.options, loop).run();
    worst.out = std::max(worst.out, max_error(naive.out, want.out));
    worst.lse = std::max(worst.lse, max_error(naive.lse, want.lse));
    worst.weights = std::max(worst.weights, max_error(naive.weights, want.weights));
  }
  return worst;
}
inline NaiveErrors naive_errors(const Problem& p, const reference::Forward& want) {
  return p.q.view().dtype == DType::f64 ? naive_errors_as<double>(p, want)
                                        : naive_errors_as<float>(p, want);
}

/// The largest sum_j weights_ij |v_j|: what the rounding of weights is relative to, where values cancel.
inline double out_magnitude(const Problem& p, const reference::Forward& want) {
  const Extents& e = p.extents;
  const int64_t group_size = e.num_kv_heads == 0 ? 1 : e.num_heads / e.num_kv_heads;
  const double factor = p.options.dropout < 1 ? 1 / (1 - p.options.dropout) : 0;
  double largest = 0;
  size_t row = 0;
  for (int64_t b = 0; b < e.batch; ++b)
    for (int64_t h = 0; h < e.num_heads; ++h)
      for (int64_t i = 0; i < e.n_q; ++i, row += static_cast<size_t>(e.n_kv))
        for (int64_t d = 0; d < e.head_dim_v; ++d) {
          double sum = 0;
          for (int64_t j = 0; j < e.n_kv; ++j)
            sum += want.weights[row + static_cast<size_t>(j)] *
                   std::abs(p.v.get(b, h / group_size, j, d));
          if (std::isfinite(sum)) largest = std::max(largest, factor * sum);
        }
  return largest;
}

/// out, lse and weights within the bound of bounds.h; out with the same bits when it is asked for
/// alone; nothing written beside the outputs.
inline void expect_reference(const Problem& p, Layout layout = Layout::contiguous) {
  const auto want = reference::forward(p.q, p.k, p.v, p.options);
  const NaiveErrors naive = naive_errors(p, want);
  const Results got = run_attention(p, p.options, {}, layout);
  const DType dtype = p.q.view().dtype, arithmetic = arithmetic_dtype(dtype);
  EXPECT_TRUE(
      within_bound("out", dtype, got.out.values(), want.out, naive.out, out_magnitude(p, want)))
      << p.text;
  EXPECT_TRUE(within_bound("lse", arithmetic, got.lse.values(), want.lse, naive.lse, 1)) << p.text;
  EXPECT_TRUE(
      within_bound("weights", arithmetic, got.weights.values(), want.weights, naive.weights))
      << p.text;
  EXPECT_TRUE(got.out.is_padding_untouched() && got.lse.is_padding_untouched() &&
              got.weights.is_padding_untouched())
      << p.text;
  const Results alone = run_attention(p, p.options, {.lse = false, .weights = false});
  EXPECT_EQ(alone.out.bits(), got.out.bits())
      << "out changes when lse and weights are asked for: " << p.text;
}

}  // namespace qkv::test

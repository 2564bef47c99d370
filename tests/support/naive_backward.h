// SPDX-License-Identifier: Apache-2.0
// Gradients of attention as anyone would write them, in the kernel's own precision and from the
// same inputs: out and lse as the forward stored them. Its error against the reference in double is
// what the kernel is measured by (bounds.h).
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "element.h"
#include "mask_terms.h"
#include "philox.h"
#include "qkv/attention.h"
#include "support/bounds.h"

namespace qkv::test {

/// One gradient, row-major as in reference::Backward, and the largest sum of the magnitudes of its
/// terms: where terms cancel, a few ulp of these sums are what any order of summation may leave.
struct NaiveGradient {
  std::vector<double> values;
  double magnitude = 0;
};
struct NaiveBackward {
  NaiveGradient dq, dk, dv, dbias, dsinks, dalibi_slopes, dscale;
};

/// A sum and the sum of the magnitudes of its terms.
template <class T>
struct TermSum {
  T value = 0, magnitude = 0;
  void add(T term, T term_magnitude) { value += term, magnitude += std::abs(term_magnitude); }
};

/// T: float or double. Sums run over keys, rows and features upwards, or downwards if is_reversed.
template <class T>
NaiveBackward naive_backward(const BackwardInputs& in, const AttentionOptions& o,
                             bool is_reversed) {
  const MaskShape n{in.q.shape[0], in.q.shape[1], in.q.shape[2], in.k.shape[2]};
  const int64_t dim_qk = in.q.shape[3], dim_v = in.v.shape[3], num_kv_heads = in.k.shape[1];
  const int64_t group_size = num_kv_heads == 0 ? 1 : n.num_heads / num_kv_heads;
  const T scale = static_cast<T>(
      o.scale.value_or(dim_qk == 0 ? 1 : 1 / std::sqrt(static_cast<double>(dim_qk))));
  const T infinity = std::numeric_limits<T>::infinity();
  const auto at4 = [](const ConstTensor& t, int64_t b, int64_t h, int64_t i, int64_t d) {
    return static_cast<T>(
        element(t, b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + d * t.stride[3]));
  };
  const auto at3 = [](const ConstTensor& t, int64_t b, int64_t h, int64_t i) {
    return static_cast<T>(element(t, b * t.stride[0] + h * t.stride[1] + i * t.stride[2]));
  };
  const auto nth = [&](int64_t x, int64_t count) { return is_reversed ? count - 1 - x : x; };
  const auto zeros = [](const ConstTensor& t) {
    return std::vector<TermSum<T>>(t ? static_cast<size_t>(t.num_elements()) : 0);
  };
  auto dq = zeros(in.q), dk = zeros(in.k), dv = zeros(in.v), dbias = zeros(o.bias);
  auto dsinks = zeros(o.sinks), dslopes = zeros(o.alibi_slopes);
  std::vector<TermSum<T>> dscale(1);
  const ConstTensor bias_shape(nullptr, DType::f64,
                               std::span(o.bias.shape, static_cast<size_t>(o.bias.rank)));
  const auto row_of = [](auto& x, int64_t heads, int64_t rows, int64_t dim, int64_t b, int64_t h,
                         int64_t i) { return x.data() + ((b * heads + h) * rows + i) * dim; };

  for (int64_t b = 0; b < n.batch; ++b)
    for (int64_t h = 0; h < n.num_heads; ++h)
      for (int64_t y = 0; y < n.n_q; ++y) {
        const int64_t i = nth(y, n.n_q), h_kv = h / group_size;
        const T lse = at3(in.lse, b, h, i);
        bool is_empty = true;
        std::vector<bool> is_visible(static_cast<size_t>(n.n_kv));
        for (int64_t j = 0; j < n.n_kv; ++j) {
          const bool hidden =
              o.bias && element(o.bias, score_strides(o.bias).offset(b, h, i, j)) == -HUGE_VAL;
          is_visible[static_cast<size_t>(j)] = !hidden && o.mask.visible(n, b, h, i, j);
          is_empty = is_empty && !is_visible[static_cast<size_t>(j)];
        }
        TermSum<T> delta;
        for (int64_t x = 0; x < dim_v && !is_empty; ++x) {
          const T term = at4(in.out, b, h, i, nth(x, dim_v)) * at4(in.dout, b, h, i, nth(x, dim_v));
          delta.add(term, term);
        }
        const T dlse = in.dlse ? at3(in.dlse, b, h, i) : T{0};
        if (o.sinks) {
          const T sink = static_cast<T>(element(o.sinks, h * o.sinks.stride[0]));
          if (sink > -infinity) {
            const T weight = std::exp(sink - lse);
            dsinks[static_cast<size_t>(h)].add(weight * (dlse - delta.value),
                                               weight * (std::abs(dlse) + delta.magnitude));
          }
        }
        for (int64_t z = 0; z < n.n_kv; ++z) {
          const int64_t j = nth(z, n.n_kv);
          if (!is_visible[static_cast<size_t>(j)]) continue;
          T product = 0, product_size = 0;
          for (int64_t x = 0; x < dim_qk; ++x) {
            const T term =
                at4(in.q, b, h, i, nth(x, dim_qk)) * at4(in.k, b, h_kv, j, nth(x, dim_qk));
            product += term, product_size += std::abs(term);
          }
          T s = scale * product, cap_slope = 1;
          if (o.softcap > 0) {
            const T t = std::tanh(s / static_cast<T>(o.softcap));
            s = static_cast<T>(o.softcap) * t;
            cap_slope = 1 - t * t;
          }
          if (o.bias)
            s += static_cast<T>(element(o.bias, score_strides(o.bias).offset(b, h, i, j)));
          for (const Mask::Term& term : o.mask.terms())
            if (term.kind == Mask::Term::Kind::dense && term.dense.dtype != DType::boolean)
              s +=
                  static_cast<T>(element(term.dense, score_strides(term.dense).offset(b, h, i, j)));
          const T distance = static_cast<T>(std::abs(first_position(o.mask, n, b) + i - j));
          if (o.alibi_slopes)
            s -= static_cast<T>(element(o.alibi_slopes, h * o.alibi_slopes.stride[0])) * distance;
          const T p = std::exp(s - lse);
          T drop = 1;
          if (o.dropout > 0)
            drop = dropout_word(o.seed, h + n.num_heads * b, i, j) < dropout_threshold(o.dropout)
                       ? T{0}
                       : 1 / static_cast<T>(1 - o.dropout);
          // A score that is rounded by half an ulp moves its weight by |s| / 2 ulp, and so does lse.
          const T condition = std::max(T{1}, (std::abs(s) + std::abs(lse)) / static_cast<T>(kUlps));
          TermSum<T> dp;
          auto* to = row_of(dv, num_kv_heads, n.n_kv, dim_v, b, h_kv, j);
          for (int64_t x = 0; x < dim_v; ++x) {
            const T term = p * drop * at4(in.dout, b, h, i, x);
            to[x].add(term, condition * term);
            const T factor =
                at4(in.dout, b, h, i, nth(x, dim_v)) * at4(in.v, b, h_kv, j, nth(x, dim_v));
            dp.add(factor, factor);
          }
          T ds = p * (drop * dp.value - delta.value + dlse);
          T size = condition * p * (drop * dp.magnitude + delta.magnitude + std::abs(dlse));
          if (o.bias)
            dbias[static_cast<size_t>(score_strides(bias_shape).offset(b, h, i, j))].add(ds, size);
          if (o.alibi_slopes) dslopes[static_cast<size_t>(h)].add(-ds * distance, size * distance);
          ds *= cap_slope, size *= cap_slope;
          dscale[0].add(ds * product, size * product_size);
          auto* to_q = row_of(dq, n.num_heads, n.n_q, dim_qk, b, h, i);
          auto* to_k = row_of(dk, num_kv_heads, n.n_kv, dim_qk, b, h_kv, j);
          for (int64_t x = 0; x < dim_qk; ++x) {
            const T k = scale * at4(in.k, b, h_kv, j, x), q = scale * at4(in.q, b, h, i, x);
            to_q[x].add(ds * k, size * k);
            to_k[x].add(ds * q, size * q);
          }
        }
      }
  const auto gradient = [](const std::vector<TermSum<T>>& sums) {
    NaiveGradient g;
    for (const TermSum<T>& sum : sums) {
      g.values.push_back(static_cast<double>(sum.value));
      if (std::isfinite(sum.magnitude))
        g.magnitude = std::max(g.magnitude, static_cast<double>(sum.magnitude));
    }
    return g;
  };
  return {gradient(dq),     gradient(dk),      gradient(dv),    gradient(dbias),
          gradient(dsinks), gradient(dslopes), gradient(dscale)};
}

}  // namespace qkv::test

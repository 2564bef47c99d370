// SPDX-License-Identifier: Apache-2.0
// Attention as anyone would write it, in the kernel's own precision: a two-pass softmax with
// std::exp. Its error against the reference in double is what a kernel is measured by (bounds.h).
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "element.h"
#include "mask_terms.h"
#include "philox.h"
#include "qkv/attention.h"
#include "reference.h"

namespace qkv::test {

/// T: float or double. Sums run over keys and features upwards, or downwards if is_reversed: two
/// samples of what rounding does to the same numbers.
template <class T>
reference::Forward naive_forward(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                                 const AttentionOptions& o, bool is_reversed) {
  const MaskShape shape{q.shape[0], q.shape[1], q.shape[2], k.shape[2]};
  const int64_t head_dim_qk = q.shape[3], head_dim_v = v.shape[3];
  const int64_t group_size = k.shape[1] == 0 ? 1 : q.shape[1] / k.shape[1];
  const T scale = static_cast<T>(
      o.scale.value_or(head_dim_qk == 0 ? 1 : 1 / std::sqrt(static_cast<double>(head_dim_qk))));
  const T infinity = std::numeric_limits<T>::infinity();
  auto read = [](const ConstTensor& t, int64_t b, int64_t h, int64_t i, int64_t d) {
    return static_cast<T>(
        element(t, b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + d * t.stride[3]));
  };
  auto nth = [&](int64_t x, int64_t n) { return is_reversed ? n - 1 - x : x; };

  reference::Forward result;
  std::vector<T> s(static_cast<size_t>(shape.n_kv));
  for (int64_t b = 0; b < shape.batch; ++b)
    for (int64_t h = 0; h < shape.num_heads; ++h)
      for (int64_t i = 0; i < shape.n_q; ++i) {
        const T sink =
            o.sinks ? static_cast<T>(element(o.sinks, h * o.sinks.stride[0])) : -infinity;
        T m = sink;
        bool is_empty = true;
        std::vector<bool> is_visible(s.size());
        for (int64_t j = 0; j < shape.n_kv; ++j) {
          T& x = s[static_cast<size_t>(j)];
          T bias = o.bias
                       ? static_cast<T>(element(o.bias, score_strides(o.bias).offset(b, h, i, j)))
                       : T{0};
          if (!o.mask.visible(shape, b, h, i, j) || bias == -infinity) continue;
          for (const Mask::Term& t : o.mask.terms())
            if (t.kind == Mask::Term::Kind::dense && t.dense.dtype != DType::boolean)
              bias += static_cast<T>(element(t.dense, score_strides(t.dense).offset(b, h, i, j)));
          x = 0;
          for (int64_t n = 0; n < head_dim_qk; ++n)
            x += read(q, b, h, i, nth(n, head_dim_qk)) *
                 read(k, b, h / group_size, j, nth(n, head_dim_qk));
          x *= scale;
          if (o.softcap > 0)
            x = static_cast<T>(o.softcap) * std::tanh(x / static_cast<T>(o.softcap));
          x += bias;
          if (o.alibi_slopes)
            x -= static_cast<T>(element(o.alibi_slopes, h * o.alibi_slopes.stride[0])) *
                 static_cast<T>(std::abs(first_position(o.mask, shape, b) + i - j));
          is_visible[static_cast<size_t>(j)] = true;
          is_empty = false;
          m = std::max(m, x);
        }

        T l = o.sinks && !is_empty ? std::exp(sink - m) : T{0};
        for (int64_t n = 0; n < shape.n_kv; ++n) {
          const size_t j = static_cast<size_t>(nth(n, shape.n_kv));
          if (is_visible[j]) l += s[j] = std::exp(s[j] - m);
        }
        result.lse.push_back(is_empty ? sink : m + std::log(l));
        for (size_t j = 0; j < s.size(); ++j)
          result.weights.push_back(is_visible[j] ? s[j] / l : T{0});

        const T keep = static_cast<T>(1 - o.dropout);
        for (int64_t d = 0; d < head_dim_v; ++d) {
          T sum = 0;
          for (int64_t n = 0; n < shape.n_kv; ++n) {
            const int64_t j = nth(n, shape.n_kv);
            if (!is_visible[static_cast<size_t>(j)]) continue;
            if (o.dropout > 0 &&
                dropout_word(o.seed, h + shape.num_heads * b, i, j) < dropout_threshold(o.dropout))
              continue;
            const T weight = s[static_cast<size_t>(j)] / l;
            sum += (o.dropout > 0 ? weight / keep : weight) * read(v, b, h / group_size, j, d);
          }
          result.out.push_back(sum);
        }
      }
  return result;
}

}  // namespace qkv::test

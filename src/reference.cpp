// SPDX-License-Identifier: Apache-2.0
// Tier: call. Plain loops in double: the definition that every kernel is tested against. Read
// score(), softmax(), forward(), backward() in this order; nothing else in the library says more
// about the meaning.
#include "reference.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "element.h"
#include "mask_terms.h"
#include "philox.h"

namespace qkv::reference {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// The arguments with what follows from them.
struct Problem {
  ConstTensor q, k, v;
  const AttentionOptions& options;
  MaskShape shape;
  int64_t group_size, head_dim_qk, head_dim_v;
  double scale;
};

Problem problem_of(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                   const AttentionOptions& options) {
  const int64_t head_dim_qk = q.shape[3];
  return {q,
          k,
          v,
          options,
          {q.shape[0], q.shape[1], q.shape[2], k.shape[2]},
          k.shape[1] == 0 ? 1 : q.shape[1] / k.shape[1],
          head_dim_qk,
          v.shape[3],
          // Without features every score is 0, whatever the scale.
          options.scale.value_or(
              head_dim_qk == 0 ? 1.0 : 1 / std::sqrt(static_cast<double>(head_dim_qk)))};
}

// Element of a tensor [batch, heads, tokens, dim].
double at(const ConstTensor& t, int64_t b, int64_t h, int64_t i, int64_t d) {
  return element(t, b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + d * t.stride[3]);
}

// Element of a vector per head, or `absent`.
double at(const ConstTensor& t, int64_t h, double absent) {
  return t ? element(t, h * t.stride[0]) : absent;
}

// One score and what its derivative needs.
struct Score {
  bool is_visible = false;
  double product = 0;   // q . k
  double tanh = 0;      // of the soft cap
  double distance = 0;  // |p - j|
  double value = -kInf;
};

Score score(const Problem& x, int64_t b, int64_t h, int64_t i, int64_t j) {
  const AttentionOptions& o = x.options;
  Score s;
  if (!o.mask.visible(x.shape, b, h, i, j)) return s;
  double bias = o.bias ? element(o.bias, score_strides(o.bias).offset(b, h, i, j)) : 0;
  if (bias == -kInf) return s;
  for (const Mask::Term& t : o.mask.terms())  // an additive mask is a bias, too
    if (t.kind == Mask::Term::Kind::dense && t.dense.dtype != DType::boolean)
      bias += element(t.dense, score_strides(t.dense).offset(b, h, i, j));

  s.is_visible = true;
  for (int64_t d = 0; d < x.head_dim_qk; ++d)
    s.product += at(x.q, b, h, i, d) * at(x.k, b, h / x.group_size, j, d);
  s.distance = static_cast<double>(std::abs(first_position(o.mask, x.shape, b) + i - j));

  s.value = x.scale * s.product;
  if (o.softcap > 0) {
    s.tanh = std::tanh(s.value / o.softcap);
    s.value = o.softcap * s.tanh;
  }
  s.value += bias;
  if (o.alibi_slopes) s.value -= at(o.alibi_slopes, h, 0) * s.distance;
  return s;
}

// One row of scores, its weights and its log of the sum of exponentials.
struct Row {
  std::vector<Score> scores;
  std::vector<double> weights;
  double lse;
};

// weights_j = exp(s_j) / l, l = sum over visible j of exp(s_j) + exp(sink). A row that sees no key
// has weights 0; this is asked of the mask, not of the scores.
Row softmax(const Problem& x, int64_t b, int64_t h, int64_t i) {
  const int64_t n_kv = x.shape.n_kv;
  const double sink = at(x.options.sinks, h, -kInf);
  Row row{std::vector<Score>(static_cast<size_t>(n_kv)),
          std::vector<double>(static_cast<size_t>(n_kv)), sink};
  double m = sink;  // the maximum: no exponential overflows
  bool is_empty = true;
  for (int64_t j = 0; j < n_kv; ++j) {
    const Score s = row.scores[static_cast<size_t>(j)] = score(x, b, h, i, j);
    if (!s.is_visible) continue;
    is_empty = false;
    m = std::max(m, s.value);
  }
  if (is_empty) return row;

  double l = x.options.sinks ? std::exp(sink - m) : 0;
  for (const Score& s : row.scores)
    if (s.is_visible) l += std::exp(s.value - m);
  row.lse = m + std::log(l);
  for (size_t j = 0; j < row.scores.size(); ++j)
    if (row.scores[j].is_visible) row.weights[j] = std::exp(row.scores[j].value - m) / l;
  return row;
}

// What dropout does to one weight: 0, or 1 / (1 - dropout).
double dropout_factor(const Problem& x, int64_t b, int64_t h, int64_t i, int64_t j) {
  const double dropout = x.options.dropout;
  if (dropout == 0) return 1;
  const uint32_t word = dropout_word(x.options.seed, h + x.shape.num_heads * b, i, j);
  return word < dropout_threshold(dropout) ? 0 : 1 / (1 - dropout);
}

// Index of row (b, h, i) of an array [batch, heads, n, dim].
size_t row_index(int64_t heads, int64_t n, int64_t dim, int64_t b, int64_t h, int64_t i) {
  return static_cast<size_t>(((b * heads + h) * n + i) * dim);
}

}  // namespace

Forward forward(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                const AttentionOptions& options) {
  const Problem x = problem_of(q, k, v, options);
  const MaskShape& n = x.shape;
  Forward result;
  for (int64_t b = 0; b < n.batch; ++b)
    for (int64_t h = 0; h < n.num_heads; ++h)
      for (int64_t i = 0; i < n.n_q; ++i) {
        const Row row = softmax(x, b, h, i);
        result.lse.push_back(row.lse);
        result.weights.insert(result.weights.end(), row.weights.begin(), row.weights.end());

        // out_i = sum over j of weights_ij v_j. Hidden and dropped keys are skipped, not multiplied
        // by 0: NaN stays out.
        std::vector<double> out(static_cast<size_t>(x.head_dim_v));
        for (int64_t j = 0; j < n.n_kv; ++j) {
          const double factor = dropout_factor(x, b, h, i, j);
          if (!row.scores[static_cast<size_t>(j)].is_visible || factor == 0) continue;
          for (int64_t d = 0; d < x.head_dim_v; ++d)
            out[static_cast<size_t>(d)] +=
                row.weights[static_cast<size_t>(j)] * factor * at(v, b, h / x.group_size, j, d);
        }
        result.out.insert(result.out.end(), out.begin(), out.end());
      }
  return result;
}

WeightForms weight_forms(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                         const AttentionOptions& options, const std::vector<int64_t>& weight_rows,
                         int64_t top_k) {
  const Problem x = problem_of(q, k, v, options);
  const MaskShape& n = x.shape;
  WeightForms forms;
  forms.mean_weights.resize(static_cast<size_t>(n.batch * n.n_q * n.n_kv));
  forms.column_sums.resize(static_cast<size_t>(n.batch * n.num_heads * n.n_kv));
  for (int64_t b = 0; b < n.batch; ++b)
    for (int64_t h = 0; h < n.num_heads; ++h) {
      for (const int64_t i : weight_rows) {
        const Row row = softmax(x, b, h, i);
        forms.row_weights.insert(forms.row_weights.end(), row.weights.begin(), row.weights.end());
      }
      for (int64_t i = 0; i < n.n_q; ++i) {
        const Row row = softmax(x, b, h, i);
        double* mean = forms.mean_weights.data() + row_index(1, n.n_q, n.n_kv, b, 0, i);
        double* sums = forms.column_sums.data() + row_index(n.num_heads, 1, n.n_kv, b, h, 0);
        double entropy = 0;
        std::vector<int64_t> keys;  // visible ones
        for (int64_t j = 0; j < n.n_kv; ++j) {
          const double p = row.weights[static_cast<size_t>(j)];
          mean[j] += p / static_cast<double>(n.num_heads);
          sums[j] += p;
          if (p != 0) entropy -= p * std::log(p);
          if (row.scores[static_cast<size_t>(j)].is_visible) keys.push_back(j);
        }
        forms.entropy.push_back(entropy);

        std::stable_sort(keys.begin(), keys.end(), [&](int64_t a, int64_t c) {
          return row.weights[static_cast<size_t>(a)] > row.weights[static_cast<size_t>(c)];
        });
        keys.resize(static_cast<size_t>(top_k), -1);
        for (const int64_t j : keys) {
          forms.top_keys.push_back(j);
          forms.top_weights.push_back(j < 0 ? 0 : row.weights[static_cast<size_t>(j)]);
        }
      }
    }
  return forms;
}

Backward backward(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                  const ConstTensor& dout, const ConstTensor& dlse,
                  const AttentionOptions& options) {
  const Problem x = problem_of(q, k, v, options);
  const MaskShape& n = x.shape;
  auto zeros = [](const ConstTensor& t) {
    return std::vector<double>(t ? static_cast<size_t>(t.num_elements()) : 0);
  };
  Backward g{zeros(q),
             zeros(k),
             zeros(v),
             zeros(options.bias),
             zeros(options.sinks),
             zeros(options.alibi_slopes)};
  const ConstTensor dbias(nullptr, DType::f64,
                          std::span(options.bias.shape, static_cast<size_t>(options.bias.rank)));

  for (int64_t b = 0; b < n.batch; ++b)
    for (int64_t h = 0; h < n.num_heads; ++h)
      for (int64_t i = 0; i < n.n_q; ++i) {
        const int64_t h_kv = h / x.group_size, num_kv_heads = k.shape[1];
        const Row row = softmax(x, b, h, i);

        // Through out = P' v, P' = P after dropout: dv_j += P'_ij dout_i, dP_ij = factor_ij dout_i
        // . v_j.
        std::vector<double> dp(static_cast<size_t>(n.n_kv));
        double mean_dp = 0;  // sum over j of P_ij dP_ij; a sink has dP = 0
        for (int64_t j = 0; j < n.n_kv; ++j) {
          const double factor = dropout_factor(x, b, h, i, j),
                       p = row.weights[static_cast<size_t>(j)];
          if (!row.scores[static_cast<size_t>(j)].is_visible || factor == 0) continue;
          double* dv = g.dv.data() + row_index(num_kv_heads, n.n_kv, x.head_dim_v, b, h_kv, j);
          double product = 0;
          for (int64_t d = 0; d < x.head_dim_v; ++d) {
            dv[d] += p * factor * at(dout, b, h, i, d);
            product += at(dout, b, h, i, d) * at(v, b, h_kv, j, d);
          }
          dp[static_cast<size_t>(j)] = factor * product;
          mean_dp += p * factor * product;
        }

        // Through the softmax: ds_ij = P_ij (dP_ij - mean_dp + dlse_i), for the sink as well.
        const double dlse_i =
            dlse ? element(dlse, b * dlse.stride[0] + h * dlse.stride[1] + i * dlse.stride[2]) : 0;
        const double sink = at(options.sinks, h, -kInf);
        if (sink > -kInf)
          g.dsinks[static_cast<size_t>(h)] += std::exp(sink - row.lse) * (dlse_i - mean_dp);
        for (int64_t j = 0; j < n.n_kv; ++j) {
          const Score& s = row.scores[static_cast<size_t>(j)];
          if (!s.is_visible) continue;
          double ds =
              row.weights[static_cast<size_t>(j)] * (dp[static_cast<size_t>(j)] - mean_dp + dlse_i);
          if (options.bias)
            g.dbias[static_cast<size_t>(score_strides(dbias).offset(b, h, i, j))] += ds;
          if (options.alibi_slopes) g.dalibi_slopes[static_cast<size_t>(h)] -= ds * s.distance;

          // Through the soft cap and s = scale q . k.
          ds *= options.softcap > 0 ? 1 - s.tanh * s.tanh : 1;
          g.dscale += ds * s.product;
          double* dq = g.dq.data() + row_index(n.num_heads, n.n_q, x.head_dim_qk, b, h, i);
          double* dk = g.dk.data() + row_index(num_kv_heads, n.n_kv, x.head_dim_qk, b, h_kv, j);
          for (int64_t d = 0; d < x.head_dim_qk; ++d) {
            dq[d] += x.scale * ds * at(k, b, h_kv, j, d);
            dk[d] += x.scale * ds * at(q, b, h, i, d);
          }
        }
      }
  return g;
}

DoubleBackward double_backward(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                               const ConstTensor& dout, const ConstTensor& ddq,
                               const ConstTensor& ddk, const ConstTensor& ddv,
                               const AttentionOptions& options) {
  const Problem x = problem_of(q, k, v, options);
  const MaskShape& n = x.shape;
  auto zeros = [](const ConstTensor& t) {
    return std::vector<double>(static_cast<size_t>(t.num_elements()));
  };
  auto or_zero = [](const ConstTensor& t, int64_t b, int64_t h, int64_t i, int64_t d) {
    return t ? at(t, b, h, i, d) : 0;
  };
  DoubleBackward g{zeros(q), zeros(k), zeros(v), zeros(dout)};
  const int64_t num_kv_heads = k.shape[1];

  // What backward() does to one score s = cap(t), t = scale q . k, and what of it meets the new
  // gradients: dt = P (dP - mean_dp) cap' reaches dq and dk through mixed = scale (ddq . k + q .
  // ddk), and P reaches dv through direct = factor dout . ddv.
  struct Element {
    double factor = 0, dp = 0, mixed = 0, direct = 0, cap1 = 1, cap2 = 0;
  };
  for (int64_t b = 0; b < n.batch; ++b)
    for (int64_t h = 0; h < n.num_heads; ++h)
      for (int64_t i = 0; i < n.n_q; ++i) {
        const int64_t h_kv = h / x.group_size;
        const Row row = softmax(x, b, h, i);
        std::vector<Element> elements(static_cast<size_t>(n.n_kv));
        double mean_dp = 0,
               mean_mixed = 0;  // sums over j of P_ij dP_ij and of P_ij cap'_ij mixed_ij
        for (int64_t j = 0; j < n.n_kv; ++j) {
          const Score& s = row.scores[static_cast<size_t>(j)];
          if (!s.is_visible) continue;
          Element& e = elements[static_cast<size_t>(j)];
          e.factor = dropout_factor(x, b, h, i, j);
          for (int64_t d = 0; d < x.head_dim_v && e.factor != 0; ++d) {
            e.dp += e.factor * at(dout, b, h, i, d) * at(v, b, h_kv, j, d);
            e.direct += e.factor * at(dout, b, h, i, d) * or_zero(ddv, b, h_kv, j, d);
          }
          for (int64_t d = 0; d < x.head_dim_qk; ++d)
            e.mixed += x.scale * (or_zero(ddq, b, h, i, d) * at(k, b, h_kv, j, d) +
                                  at(q, b, h, i, d) * or_zero(ddk, b, h_kv, j, d));
          if (options.softcap > 0) {
            e.cap1 = 1 - s.tanh * s.tanh;
            e.cap2 = -2 * s.tanh * e.cap1 / options.softcap;
          }
          mean_dp += row.weights[static_cast<size_t>(j)] * e.dp;
          mean_mixed += row.weights[static_cast<size_t>(j)] * e.cap1 * e.mixed;
        }

        // The gradient with respect to P_ij, and its mean for the softmax behind it.
        auto through_weight = [&](const Element& e) {
          return (e.dp - mean_dp) * e.cap1 * e.mixed - mean_mixed * e.dp + e.direct;
        };
        double mean_weight = 0;
        for (int64_t j = 0; j < n.n_kv; ++j)
          if (row.scores[static_cast<size_t>(j)].is_visible)
            mean_weight += row.weights[static_cast<size_t>(j)] *
                           through_weight(elements[static_cast<size_t>(j)]);

        double* to_q = g.dq.data() + row_index(n.num_heads, n.n_q, x.head_dim_qk, b, h, i);
        double* to_dout = g.ddout.data() + row_index(n.num_heads, n.n_q, x.head_dim_v, b, h, i);
        for (int64_t j = 0; j < n.n_kv; ++j) {
          if (!row.scores[static_cast<size_t>(j)].is_visible) continue;
          const Element& e = elements[static_cast<size_t>(j)];
          const double p = row.weights[static_cast<size_t>(j)];
          const double ds = p * (e.dp - mean_dp), dt = ds * e.cap1;
          const double through_t =
              p * (through_weight(e) - mean_weight) * e.cap1 + ds * e.mixed * e.cap2;
          const double through_dp = p * (e.cap1 * e.mixed - mean_mixed) * e.factor;
          double* to_k = g.dk.data() + row_index(num_kv_heads, n.n_kv, x.head_dim_qk, b, h_kv, j);
          double* to_v = g.dv.data() + row_index(num_kv_heads, n.n_kv, x.head_dim_v, b, h_kv, j);
          for (int64_t d = 0; d < x.head_dim_qk; ++d) {
            to_q[d] +=
                x.scale * (through_t * at(k, b, h_kv, j, d) + dt * or_zero(ddk, b, h_kv, j, d));
            to_k[d] += x.scale * (through_t * at(q, b, h, i, d) + dt * or_zero(ddq, b, h, i, d));
          }
          for (int64_t d = 0; d < x.head_dim_v && e.factor != 0; ++d) {
            to_v[d] += through_dp * at(dout, b, h, i, d);
            to_dout[d] +=
                through_dp * at(v, b, h_kv, j, d) + p * e.factor * or_zero(ddv, b, h_kv, j, d);
          }
        }
      }
  return g;
}

}  // namespace qkv::reference

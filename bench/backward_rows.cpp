// SPDX-License-Identifier: Apache-2.0
// Tier: benchmark. attention_backward() over the table of cases.h, as a fraction of the FMA peak. Useful flop only:
// visible pairs * (6 * head_dim_qk + 4 * head_dim_v).
#include <algorithm>
#include <cmath>
#include <memory>
#include <span>

#include "reference.h"
#include "rows.h"

namespace qkv::bench {
namespace {

// Inputs, results and gradients of a case, one behind the other.
struct Arrays {
  const BackwardCase& c;
  Buffer memory;
  int64_t used = 0;
  std::span<float> q, k, v, dout, bias, out, lse, dq, dk, dv, dbias;
  AttentionOptions options;

  Arrays(const BackwardCase& row, int num_threads)
      : c(row),
        memory(4 * (q_rows() * (2 * c.head_dim_qk + 2 * c.head_dim_v + 1) +
                    kv_rows() * (2 * c.head_dim_qk + 2 * c.head_dim_v) + 2 * num_scores())) {
    q = take(q_rows() * c.head_dim_qk), k = take(kv_rows() * c.head_dim_qk);
    v = take(kv_rows() * c.head_dim_v), dout = take(q_rows() * c.head_dim_v);
    bias = take(num_scores());
    fill_normal(memory.floats(), used);
    out = take(q_rows() * c.head_dim_v), lse = take(q_rows()), dq = take(q_rows() * c.head_dim_qk);
    dk = take(kv_rows() * c.head_dim_qk), dv = take(kv_rows() * c.head_dim_v);
    dbias = take(num_scores());
    options.mask = mask_of(c.mask), options.num_threads = num_threads;
    if (c.with_bias) options.bias = scores(bias);
  }
  std::span<float> take(int64_t n) {
    used += n;
    return {memory.floats() + used - n, static_cast<size_t>(n)};
  }
  int64_t num_scores() const { return c.with_bias ? c.num_heads * c.n * c.n : 0; }
  int64_t q_rows() const { return c.batch * c.num_heads * c.n; }
  int64_t kv_rows() const { return c.batch * c.num_kv_heads * c.n; }
  Tensor queries(std::span<float> x, int64_t dim) const {
    return Tensor(x.data(), {c.batch, c.num_heads, c.n, dim});
  }
  Tensor keys(std::span<float> x, int64_t dim) const {
    return Tensor(x.data(), {c.batch, c.num_kv_heads, c.n, dim});
  }
  Tensor scores(std::span<float> x) const { return Tensor(x.data(), {1, c.num_heads, c.n, c.n}); }

  void forward() {
    AttentionOutputs outputs;
    outputs.out = queries(out, c.head_dim_v);
    outputs.lse = Tensor(lse.data(), {c.batch, c.num_heads, c.n});
    attention(queries(q, c.head_dim_qk), keys(k, c.head_dim_qk), keys(v, c.head_dim_v), outputs,
              options);
  }
  BackwardInputs inputs() {
    BackwardInputs in;
    in.q = queries(q, c.head_dim_qk), in.k = keys(k, c.head_dim_qk), in.v = keys(v, c.head_dim_v);
    in.out = queries(out, c.head_dim_v), in.dout = queries(dout, c.head_dim_v);
    in.lse = Tensor(lse.data(), {c.batch, c.num_heads, c.n});
    return in;
  }
  BackwardOutputs outputs() {
    BackwardOutputs to;
    to.dq = queries(dq, c.head_dim_qk), to.dk = keys(dk, c.head_dim_qk);
    to.dv = keys(dv, c.head_dim_v);
    if (c.with_bias) to.dbias = scores(dbias);
    return to;
  }
};

double inner(std::span<const float> x, std::span<const float> y) {
  double sum = 0;
  for (size_t e = 0; e < x.size(); ++e)
    sum += static_cast<double>(x[e]) * static_cast<double>(y[e]);
  return sum;
}

// dq in some rows against the reference; dk and dv by what they must agree with: out is linear in v,
// and a score in q and in k.
double gradient_error(Arrays& a) {
  const BackwardCase& c = a.c;
  const BackwardInputs in = a.inputs();
  const ConstTensor dq = a.outputs().dq;
  const int64_t b = c.batch - 1, group_size = c.num_heads / c.num_kv_heads;
  const double size = std::sqrt(inner(a.dout, a.dout) * inner(a.out, a.out));
  double worst = std::max(std::fabs(inner(a.dv, a.v) - inner(a.dout, a.out)),
                          std::fabs(inner(a.dq, a.q) - inner(a.dk, a.k))) /
                 size;
  for_some_rows(
      {c.batch, c.num_heads, c.n, c.n}, a.options.mask, [&](int64_t h, int64_t i, RowRange range) {
        const int64_t h_kv = h / group_size, count = range.hi - range.lo;
        AttentionOptions options;
        if (c.with_bias) {
          options.bias =
              ConstTensor(a.bias.data() + (h * c.n + i) * c.n + range.lo, {1, 1, 1, count});
        }
        const std::vector<double> want =
            reference::backward(tokens(in.q, b, h, i, 1), tokens(in.k, b, h_kv, range.lo, count),
                                tokens(in.v, b, h_kv, range.lo, count), tokens(in.dout, b, h, i, 1),
                                {}, options)
                .dq;
        const ConstTensor row = tokens(dq, b, h, i, 1);
        worst = std::max(worst, largest_error(static_cast<const float*>(row.data), want));
      });
  return worst;
}

Run prepare(const BackwardCase& c, int num_threads) {
  const auto a = std::make_shared<Arrays>(c, num_threads);
  Run run;
  run.call = [a, in = a->inputs(), to = a->outputs()] { attention_backward(in, to, a->options); };
  a->forward();
  run.call();
  run.error = gradient_error(*a);
  if (c.with_dropout) {
    a->options.dropout = 0.1;
    a->forward();
  }
  run.work.flop =
      static_cast<double>(6 * c.head_dim_qk + 4 * c.head_dim_v) *
      static_cast<double>(a->options.mask.count_visible({c.batch, c.num_heads, c.n, c.n}));
  run.work.num_threads = num_threads;
  run.work.reach = reach_of(c.reach_avx512, c.reach_avx2);
  return run;
}

}  // namespace

std::vector<Row> backward_rows() {
  std::vector<Row> rows;
  for (const BackwardCase& c : kBackwardCases)
    rows.push_back({std::string("backward/") + c.name, [&c](int n) { return prepare(c, n); }});
  return rows;
}

}  // namespace qkv::bench

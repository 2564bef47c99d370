// SPDX-License-Identifier: Apache-2.0
// Runs attention() and attention_backward() on a problem of problems.h and compares the gradients
// with the reference.
#pragma once
#include <gtest/gtest.h>

#include "qkv/attention.h"
#include "reference.h"
#include "support/bounds.h"
#include "support/naive_backward.h"
#include "support/problems.h"
#include "support/run_attention.h"

namespace qkv::test {

/// The forward's results and the gradient that flows into them.
struct BackwardProblem {
  const Problem* problem;
  TestTensor out, lse, dout, dlse;

  BackwardInputs inputs() const {
    return {.q = problem->q,
            .k = problem->k,
            .v = problem->v,
            .out = out,
            .lse = lse,
            .dout = dout,
            .dlse = dlse};
  }
};

inline BackwardProblem make_backward(const Problem& p, std::mt19937_64& random, bool with_dlse,
                                     Layout layout = Layout::contiguous,
                                     Guard guard = Guard::behind) {
  const Extents& e = p.extents;
  const DType dtype = p.q.view().dtype, arithmetic = arithmetic_dtype(dtype);
  BackwardProblem b{&p, {}, {}, {}, {}};
  b.out = TestTensor(dtype, {e.batch, e.num_heads, e.n_q, e.head_dim_v}, Layout::padded, guard);
  b.lse = TestTensor(arithmetic, {e.batch, e.num_heads, e.n_q}, Layout::contiguous, guard);
  b.dout = TestTensor(dtype, {e.batch, e.num_heads, e.n_q, e.head_dim_v}, layout, guard);
  b.dout.fill_random(random);
  if (with_dlse) {
    b.dlse = TestTensor(arithmetic, {e.batch, e.num_heads, e.n_q}, Layout::contiguous, guard);
    b.dlse.fill_random(random);
  }
  attention(p.q, p.k, p.v, {.out = b.out.view(), .lse = b.lse.view()}, p.options);
  return b;
}

/// What one call wrote, in guarded memory that was NaN before.
struct Gradients {
  TestTensor dq, dk, dv, dbias, dsinks, dalibi_slopes, dscale;

  std::vector<std::vector<std::byte>> bits() const {
    std::vector<std::vector<std::byte>> all;
    for (const TestTensor* t : {&dq, &dk, &dv, &dbias, &dsinks, &dalibi_slopes, &dscale})
      all.push_back(*t ? t->bits() : std::vector<std::byte>{});
    return all;
  }
};

inline Gradients run_backward(const BackwardProblem& b, const AttentionOptions& options,
                              Layout layout = Layout::contiguous) {
  const Extents& e = b.problem->extents;
  const DType dtype = b.problem->q.view().dtype, dtype_kv = b.problem->k.view().dtype;
  const DType arithmetic = arithmetic_dtype(dtype);
  Gradients g;
  g.dq = TestTensor(dtype, {e.batch, e.num_heads, e.n_q, e.head_dim_qk}, layout);
  g.dk = TestTensor(dtype_kv, {e.batch, e.num_kv_heads, e.n_kv, e.head_dim_qk}, layout);
  g.dv = TestTensor(dtype_kv, {e.batch, e.num_kv_heads, e.n_kv, e.head_dim_v}, layout);
  if (options.bias) {
    const auto rank = static_cast<size_t>(options.bias.rank);
    g.dbias = TestTensor(arithmetic, {options.bias.shape, options.bias.shape + rank});
  }
  if (options.sinks) g.dsinks = TestTensor(arithmetic, {e.num_heads});
  if (options.alibi_slopes) g.dalibi_slopes = TestTensor(arithmetic, {e.num_heads});
  g.dscale = TestTensor(arithmetic, {1});
  attention_backward(b.inputs(),
                     {.dq = g.dq.view(),
                      .dk = g.dk.view(),
                      .dv = g.dv.view(),
                      .dbias = g.dbias.view(),
                      .dsinks = g.dsinks.view(),
                      .dalibi_slopes = g.dalibi_slopes.view(),
                      .dscale = g.dscale.view()},
                     options);
  return g;
}

/// All gradients within the bound of bounds.h; nothing written beside them.
inline void expect_reference_gradients(const BackwardProblem& b,
                                       Layout layout = Layout::contiguous) {
  const Problem& p = *b.problem;
  const BackwardInputs in = b.inputs();
  const auto want = reference::backward(in.q, in.k, in.v, in.dout, in.dlse, p.options);
  const Gradients got = run_backward(b, p.options, layout);
  const DType dtype = in.q.dtype, dtype_kv = in.k.dtype, arithmetic = arithmetic_dtype(dtype);
  const bool is_double = arithmetic == DType::f64;
  const NaiveBackward naive[2] = {is_double ? naive_backward<double>(in, p.options, false)
                                            : naive_backward<float>(in, p.options, false),
                                  is_double ? naive_backward<double>(in, p.options, true)
                                            : naive_backward<float>(in, p.options, true)};
  const auto check = [&](const char* name, DType type, const TestTensor& t,
                         const std::vector<double>& expected,
                         NaiveGradient NaiveBackward::*member) {
    if (!t) return;
    const double error = std::max(max_error((naive[0].*member).values, expected),
                                  max_error((naive[1].*member).values, expected));
    EXPECT_TRUE(within_bound(name, type, t.values(), expected, error, (naive[0].*member).magnitude))
        << p.text;
    EXPECT_TRUE(t.is_padding_untouched()) << name << " " << p.text;
  };
  check("dq", dtype, got.dq, want.dq, &NaiveBackward::dq);
  check("dk", dtype_kv, got.dk, want.dk, &NaiveBackward::dk);
  check("dv", dtype_kv, got.dv, want.dv, &NaiveBackward::dv);
  check("dbias", arithmetic, got.dbias, want.dbias, &NaiveBackward::dbias);
  check("dsinks", arithmetic, got.dsinks, want.dsinks, &NaiveBackward::dsinks);
  check("dalibi_slopes", arithmetic, got.dalibi_slopes, want.dalibi_slopes,
        &NaiveBackward::dalibi_slopes);
  check("dscale", arithmetic, got.dscale, {want.dscale}, &NaiveBackward::dscale);
}

}  // namespace qkv::test

// SPDX-License-Identifier: Apache-2.0
// What must not change a bit of attention_backward(): threads, the order of tasks, whether parts are
// tasks, the batch it is part of, which gradients are wanted.
#include <gtest/gtest.h>

#include "backward.h"
#include "support/run_backward.h"
#include "support/shuffled_executor.h"

namespace qkv {
namespace {

using namespace test;  // NOLINT: every helper of this file is from there
using test::Problem;
using test::ShuffledExecutor;

// Several parts per pair, several pairs, GQA and MQA.
const Extents kLarge[] = {{1, 1, 1, 2100, 130, 16, 24},
                          {1, 3, 1, 700, 140, 20, 16},
                          {2, 6, 2, 400, 200, 24, 17},
                          {2, 8, 1, 333, 90, 33, 16},
                          {7, 2, 2, 140, 257, 40, 33}};

TEST(BackwardSchedule, AnyNumberOfThreadsAndAnyOrder_SameBits) {
  for (const Extents& e : kLarge)
    for (DType dtype : {DType::f32, DType::f64, DType::bf16}) {
      std::mt19937_64 random(1);
      Problem p = make_problem(e, dtype, random);
      add_random_options(p, random);
      const BackwardProblem b = make_backward(p, random, true);
      AttentionOptions o = p.options;
      o.num_threads = 1;
      const auto one = run_backward(b, o).bits();
      for (int num_threads : {2, 3, 7}) {
        o.num_threads = num_threads;
        EXPECT_EQ(run_backward(b, o).bits(), one) << num_threads << " threads, " << p.text;
      }
      for (uint64_t seed : {1, 2, 3}) {
        ShuffledExecutor executor(seed);
        o.executor = &executor;
        o.num_threads = 4;
        EXPECT_EQ(run_backward(b, o).bits(), one) << "shuffled tasks, " << p.text;
        EXPECT_GT(executor.num_tasks(), 1) << "the tasks were never shuffled: " << p.text;
      }
    }
}

// Each way that a bias can be shared takes another path through the schedule.
TEST(BackwardSchedule, EveryBroadcastOfTheBias_EqualsTheReferenceWithAnyThreads) {
  std::mt19937_64 random(2);
  for (int axes = 0; axes < 16; ++axes) {
    Problem p = make_problem({2, 4, 2, 150, 70, 8, 8}, DType::f64, random);
    p.bias = TestTensor(
        DType::f64, {axes & 1 ? 2 : 1, axes & 2 ? 4 : 1, axes & 4 ? 150 : 1, axes & 8 ? 70 : 1});
    p.options.bias = p.bias.fill_random(random);
    p.options.mask = Mask::causal_bottom_right();
    p.options.num_threads = 1;
    p.text += " bias " + shape_text(p.options.bias);
    const BackwardProblem b = make_backward(p, random, false);
    expect_reference_gradients(b);
    const auto one = run_backward(b, p.options).bits();
    ShuffledExecutor executor(static_cast<uint64_t>(axes));
    p.options.executor = &executor;
    p.options.num_threads = 4;
    EXPECT_EQ(run_backward(b, p.options).bits(), one) << p.text;
  }
}

ConstTensor entry_of(ConstTensor t, int64_t b) {
  if (!t) return t;
  t.data = static_cast<const char*>(t.data) + b * t.stride[0] * size_bytes(t.dtype);
  t.shape[0] = 1;
  return t;
}

std::vector<std::byte> bits_of(const ConstTensor& t) {
  std::vector<std::byte> all;
  for_each_offset(t, [&](int64_t at) {
    const std::byte* from = static_cast<const std::byte*>(t.data) + at * size_bytes(t.dtype);
    all.insert(all.end(), from, from + size_bytes(t.dtype));
  });
  return all;
}

TEST(BackwardSchedule, AloneOrInsideABatch_SameBits) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    std::mt19937_64 random(seed);
    const Extents e{3, 4, 2, std::array<int64_t, 3>{5, 130, 600}[seed % 3], 135, 20, 24};
    Problem p = make_problem(e, seed % 2 ? DType::f32 : DType::bf16, random);
    const std::vector<int64_t> lengths = {17, e.n_kv, 0};
    const bool with_lengths = seed % 4 == 1;
    if (with_lengths) p.options.mask = Mask::lengths(lengths);
    if (seed % 4 == 2) p.options.mask = Mask::causal_bottom_right();
    const BackwardProblem b = make_backward(p, random, true);
    const Gradients all = run_backward(b, p.options);
    const BackwardInputs in = b.inputs();
    for (int64_t i = 0; i < e.batch; ++i) {
      AttentionOptions alone = p.options;
      if (with_lengths)
        alone.mask = Mask::lengths(std::span(lengths).subspan(static_cast<size_t>(i), 1));
      TestTensor dq(p.q.view().dtype, {1, e.num_heads, e.n_q, e.head_dim_qk});
      TestTensor dk(p.k.view().dtype, {1, e.num_kv_heads, e.n_kv, e.head_dim_qk});
      TestTensor dv(p.k.view().dtype, {1, e.num_kv_heads, e.n_kv, e.head_dim_v});
      attention_backward({.q = entry_of(in.q, i),
                          .k = entry_of(in.k, i),
                          .v = entry_of(in.v, i),
                          .out = entry_of(in.out, i),
                          .lse = entry_of(in.lse, i),
                          .dout = entry_of(in.dout, i),
                          .dlse = entry_of(in.dlse, i)},
                         {.dq = dq.view(), .dk = dk.view(), .dv = dv.view()}, alone);
      EXPECT_EQ(bits_of(entry_of(all.dq, i)), dq.bits()) << p.text << " seed " << seed;
      EXPECT_EQ(bits_of(entry_of(all.dk, i)), dk.bits()) << p.text << " seed " << seed;
      EXPECT_EQ(bits_of(entry_of(all.dv, i)), dv.bits()) << p.text << " seed " << seed;
    }
  }
}

TEST(BackwardSchedule, WhatIsWanted_ChangesNoBit) {
  std::mt19937_64 random(3);
  Problem p = make_problem({2, 4, 2, 70, 140, 24, 16}, DType::f32, random);
  p.bias = TestTensor(DType::f32, {1, 1, 70, 140});
  p.sinks = TestTensor(DType::f32, {4});
  p.alibi_slopes = TestTensor(DType::f32, {4});
  p.options.bias = p.bias.fill_random(random);
  p.options.sinks = p.sinks.fill_random(random);
  p.options.alibi_slopes = p.alibi_slopes.fill_random(random, 0.1);
  const BackwardProblem b = make_backward(p, random, true);
  const Gradients all = run_backward(b, p.options);
  for (int wanted = 1; wanted < 128; ++wanted) {
    Gradients g;
    BackwardOutputs out;
    const auto want = [&](int bit, const TestTensor& like, TestTensor* to, Tensor* view) {
      if (!(wanted >> bit & 1)) return;
      const ConstTensor t = like;
      *to = TestTensor(t.dtype, {t.shape, t.shape + t.rank});
      *view = to->view();
    };
    want(0, all.dq, &g.dq, &out.dq);
    want(1, all.dk, &g.dk, &out.dk);
    want(2, all.dv, &g.dv, &out.dv);
    want(3, all.dbias, &g.dbias, &out.dbias);
    want(4, all.dsinks, &g.dsinks, &out.dsinks);
    want(5, all.dalibi_slopes, &g.dalibi_slopes, &out.dalibi_slopes);
    want(6, all.dscale, &g.dscale, &out.dscale);
    attention_backward(b.inputs(), out, p.options);
    const auto got = g.bits(), expected = all.bits();
    for (size_t n = 0; n < got.size(); ++n)
      if (wanted >> n & 1) {
        EXPECT_EQ(got[n], expected[n]) << "gradient " << n << " of " << wanted;
      }
  }
}

}  // namespace
}  // namespace qkv

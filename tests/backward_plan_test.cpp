// SPDX-License-Identifier: Apache-2.0
// The cut of a backward covers every token once and depends on the shape alone; plan() says what
// path runs; and the memory it announces is what a call takes.
#include <gtest/gtest.h>

#include "backward.h"
#include "qkv/plan.h"
#include "support/peak_memory.h"

namespace qkv {
namespace {

TEST(BackwardPlan, Cut_CoversEveryTokenInWholeKernelCalls) {
  const kernels::KernelTable& table = kernels::active();
  for (int arithmetic : {0, 1})
    for (int64_t kv_heads : {1, 2, 8, 33})
      for (int64_t group : {1, 2, 3, 7, 8, 32})
        for (int64_t n_q : {0, 1, 100, 128, 1000, 16384}) {
          const BackwardCut cut = backward_cut(table, arithmetic, kv_heads, group, n_q);
          EXPECT_GE(cut.parts, 1);
          EXPECT_GE(cut.parts * cut.part_tokens, n_q);
          EXPECT_LT((cut.parts - 1) * cut.part_tokens, std::max<int64_t>(n_q, 1));
          EXPECT_LE(cut.parts, std::max<int64_t>(4, 2 * group));
          if (cut.parts > 1) {
            EXPECT_EQ(cut.part_tokens * group % cut.task_rows, 0);
          }
        }
}

TEST(BackwardPlan, PathsAreNamed) {
  Problem p;
  p.num_heads = 8, p.num_kv_heads = 2, p.n_q = 1024, p.n_kv = 1024, p.head_dim_v = 32;
  p.pass = Pass::backward;
  const Plan backward = plan(p, {.num_threads = 2});
  EXPECT_EQ(backward.path, "backward");
  EXPECT_EQ(backward.flop, 2 * backward.visible_pairs * (3 * 64 + 2 * 32));
  EXPECT_GT(backward.bytes, plan({}).bytes);
  p.pass = Pass::double_backward;
  const Plan second = plan(p);
  EXPECT_EQ(second.path, "reference");
  EXPECT_NE(second.reason.find("plain loops in double"), std::string::npos);
  EXPECT_EQ(second.num_threads, 1);
  p.n_q = 0;
  EXPECT_EQ(plan(p).path, "empty");
}

// n 16,384, head_dim 64, one head: an n x n buffer would be 1 GB. A window keeps the time short and
// does not change the memory.
TEST(BackwardPlan, LongSequence_PeaksBelow64MBAndAsAnnounced) {
  const int64_t n = 16384;
  std::vector<float> memory(static_cast<size_t>(8 * n * 64 + n), 0.01f);
  float* next = memory.data();
  const auto take = [&] {
    const Tensor t(next, {1, 1, n, 64});
    next += n * 64;
    return t;
  };
  const Tensor q = take(), k = take(), v = take(), out = take(), dout = take(), dq = take(),
               dk = take(), dv = take();
  const Tensor lse(next, {1, 1, n});
  AttentionOptions options;
  options.mask = Mask::window(200, 0);
  for (int num_threads : {1, 2, 16}) {
    options.num_threads = num_threads;
    attention(q, k, v, {.out = out, .lse = lse}, options);
    Problem p;
    p.n_q = p.n_kv = n;
    p.pass = Pass::backward;
    const int64_t announced = plan(p, options).scratch_bytes;
    EXPECT_LT(announced, int64_t{64} << 20) << num_threads << " threads";
    int64_t peak = 0;
    {
      // A fresh thread: no scratch is left from earlier calls.
      const test::PeakMemory watch;
      std::thread([&] {
        attention_backward({.q = q, .k = k, .v = v, .out = out, .lse = lse, .dout = dout},
                           {.dq = dq, .dk = dk, .dv = dv}, options);
      }).join();
      peak = watch.peak_bytes();
    }
    EXPECT_LT(peak, int64_t{64} << 20) << num_threads << " threads";
    // Beside the scratch: visible ranges, the order of tasks, the thread itself.
    EXPECT_LT(peak, announced + (int64_t{1} << 20)) << num_threads << " threads";
  }
}

}  // namespace
}  // namespace qkv

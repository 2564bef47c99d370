// SPDX-License-Identifier: Apache-2.0
#include "schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "call.h"
#include "kernels/kernels.h"
#include "qkv/attention.h"

namespace qkv {
namespace {

TEST(Schedule, ScratchBuffer_GrowsAndStaysAligned) {
  ScratchBuffer buffer;
  void* small = buffer.reserve(10);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small) % kernels::kAlignment, 0u);
  EXPECT_EQ(buffer.reserve(5), small);
  void* large = buffer.reserve(1 << 20);
  std::memset(large, 1, 1 << 20);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(large) % kernels::kAlignment, 0u);
}

// Runs tasks in a strange order on the calling thread.
class Backwards : public Executor {
 public:
  void run(int64_t num_tasks, int, void (*task)(void*, int64_t), void* context) override {
    for (int64_t i = num_tasks - 1; i >= 0; --i) task(context, i);
    tasks += num_tasks;
  }
  int64_t tasks = 0;
};

struct Sample {
  int64_t batch = 2, heads = 3, n_q, n_kv, dim = 20;
  std::vector<float> q, k, v;
  Sample(int64_t n_q, int64_t n_kv) : n_q(n_q), n_kv(n_kv) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (auto* x : {&q, &k, &v}) {
      x->resize(static_cast<size_t>(batch * heads * (x == &q ? n_q : n_kv) * dim));
      for (float& e : *x) e = normal(random);
    }
  }
  std::vector<float> attend(const AttentionOptions& options) const {
    std::vector<float> out(q.size());
    attention(ConstTensor(q.data(), {batch, heads, n_q, dim}),
              ConstTensor(k.data(), {batch, heads, n_kv, dim}),
              ConstTensor(v.data(), {batch, heads, n_kv, dim}),
              {.out = Tensor(out.data(), {batch, heads, n_q, dim})}, options);
    return out;
  }
};

TEST(Schedule, OrderOfTasks_DoesNotChangeABit) {
  for (const auto& [n_q, n_kv] : {std::pair<int64_t, int64_t>{300, 300}, {1, 5000}, {40, 3000}}) {
    const Sample s(n_q, n_kv);
    AttentionOptions options;
    options.mask = Mask::causal_bottom_right();
    options.num_threads = 1;
    const std::vector<float> plain = s.attend(options);
    Backwards executor;
    options.executor = &executor;
    options.num_threads = 4;
    const std::vector<float> strange = s.attend(options);
    EXPECT_GT(executor.tasks, 0);
    EXPECT_EQ(std::memcmp(plain.data(), strange.data(), plain.size() * sizeof(float)), 0);
  }
}

// Few rows on many keys are cut along the keys; the parts must add up.
// Between tasks, makes another call on the same thread, as an executor that steals work may.
class Nesting : public Executor {
 public:
  void run(int64_t num_tasks, int, void (*task)(void*, int64_t), void* context) override {
    for (int64_t i = 0; i < num_tasks; ++i) {
      task(context, i);
      const float sinks[3] = {9, 9, 9};
      AttentionOptions options;
      options.sinks = ConstTensor(sinks, {3});
      options.alibi_slopes = options.sinks;
      other.attend(options);
    }
  }
  Sample other{3, 5000};
};

TEST(Schedule, CallInsideACall_KeepsBothResults) {
  const Sample sample(2, 3000);  // split keys: parts wait for each other
  const float sinks[3] = {1, 2, 3}, slopes[3] = {0.1F, 0.2F, 0.3F};
  AttentionOptions options;
  options.sinks = ConstTensor(sinks, {3});
  options.alibi_slopes = ConstTensor(slopes, {3});
  const std::vector<float> alone = sample.attend(options);
  Nesting executor;
  options.executor = &executor;
  EXPECT_EQ(sample.attend(options), alone);
}

TEST(Schedule, SplitKeys_GiveTheWholeSum) {
  const Sample s(1, 6000);
  ASSERT_GT(cut(kernels::active(), 0, s.heads, s.n_q, s.n_kv).kv_splits, 1);
  const std::vector<float> out = s.attend({});
  const double scale = 1 / std::sqrt(static_cast<double>(s.dim));
  for (int64_t bh = 0; bh < s.batch * s.heads; ++bh) {
    std::vector<double> sum(static_cast<size_t>(s.dim), 0);
    double total = 0;
    for (int64_t j = 0; j < s.n_kv; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < s.dim; ++d)
        dot += static_cast<double>(s.q[static_cast<size_t>(bh * s.dim + d)]) *
               s.k[static_cast<size_t>((bh * s.n_kv + j) * s.dim + d)];
      const double p = std::exp(dot * scale);
      total += p;
      for (int64_t d = 0; d < s.dim; ++d)
        sum[static_cast<size_t>(d)] += p * s.v[static_cast<size_t>((bh * s.n_kv + j) * s.dim + d)];
    }
    for (int64_t d = 0; d < s.dim; ++d)
      EXPECT_NEAR(out[static_cast<size_t>(bh * s.dim + d)], sum[static_cast<size_t>(d)] / total,
                  1.2e-7 * 4);
  }
}

}  // namespace
}  // namespace qkv

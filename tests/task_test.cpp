// SPDX-License-Identifier: Apache-2.0
// What a task says of its rows: pointers, visible ranges, dense terms, documents, positions.
#include "task.h"

#include <gtest/gtest.h>

#include <vector>

#include "check.h"

namespace qkv {
namespace {

TEST(Task, PointsAtItsBatchEntryAndHeads) {
  std::vector<float> q(2 * 6 * 5 * 8), k(2 * 3 * 7 * 8), v(2 * 3 * 7 * 4), bias(6 * 5 * 7);
  AttentionOptions options;
  options.mask = Mask::causal_bottom_right();
  options.bias = ConstTensor(bias.data(), {1, 6, 5, 7});
  options.dropout = 0.5;
  const Call call =
      Check("test").call(ConstTensor(q.data(), {2, 6, 5, 8}), ConstTensor(k.data(), {2, 3, 7, 8}),
                         ConstTensor(v.data(), {2, 3, 7, 4}), options);
  const TaskMaker maker(call, 256);
  TaskMemory memory;
  // Rows 3 .. 6 of KV head 2: tokens 1 (head 1 of the group) to 3 (head 0).
  const kernels::AttentionTask t = maker.make({1, 2, 3, 4}, &memory);
  EXPECT_EQ(t.q, q.data() + (1 * 6 + 4) * 5 * 8);
  EXPECT_EQ(t.q_token_stride, 8);
  EXPECT_EQ(t.q_head_stride, 5 * 8);
  EXPECT_EQ(t.segments[0].k, k.data() + (1 * 3 + 2) * 7 * 8);
  EXPECT_EQ(t.segments[0].v, v.data() + (1 * 3 + 2) * 7 * 4);
  EXPECT_EQ(t.segments[0].count, 7);
  ASSERT_NE(t.ranges, nullptr);
  EXPECT_EQ(t.ranges[0].hi, 4);  // token 1: p = 3
  EXPECT_EQ(t.ranges[2].hi, 6);
  ASSERT_EQ(t.n_dense, 1);
  EXPECT_EQ(t.dense[0].data, bias.data() + 4 * 5 * 7);  // no axis of batch
  EXPECT_EQ(t.dense[0].head_stride, 5 * 7);
  EXPECT_EQ(t.dropout_stream, 4 + 6 * 1);
  EXPECT_NE(t.scratch, nullptr);
  EXPECT_EQ(t.sinks, nullptr);
}

TEST(Task, FullMask_HasNoRanges) {
  std::vector<float> x(1000);
  AttentionOptions options;
  const Call call =
      Check("test").call(ConstTensor(x.data(), {1, 2, 5, 8}), ConstTensor(x.data(), {1, 2, 7, 8}),
                         ConstTensor(x.data(), {1, 2, 7, 8}), options);
  TaskMemory memory;
  const TaskMaker maker(call, 256);
  EXPECT_FALSE(maker.has_ranges());
  EXPECT_EQ(maker.make({0, 0, 0, 5}, &memory).ranges, nullptr);
}

}  // namespace
}  // namespace qkv

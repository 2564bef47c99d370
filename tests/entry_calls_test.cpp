// SPDX-License-Identifier: Apache-2.0
// Tier: test. A batch of entries with keys in segments: alike entries and single ones give the same bits,
// padding and keys that an entry lacks are cleared.
#include "entry_calls.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "support/run_attention.h"

namespace qkv::test {
namespace {

TEST(EntryCalls, EntriesInSegments_TheBitsOfOneTensor) {
  std::mt19937_64 random(1);
  Problem p = make_problem({2, 4, 2, 3, 150, 16, 8}, DType::f32, random);
  p.options.mask = Mask::causal_bottom_right();
  const Results want = run_attention(p, p.options);
  const int64_t k_head = 150 * 16 * 4, v_head = 150 * 8 * 4;
  std::vector<kernels::KvSegment> segments;
  for (int64_t b = 0; b < 2; ++b)
    for (int64_t at = 0; at < 150; at += 50)
      segments.push_back({static_cast<const char*>(p.k.view().data) + 2 * b * k_head + at * 16 * 4,
                          static_cast<const char*>(p.v.view().data) + 2 * b * v_head + at * 8 * 4,
                          at, 50});
  std::vector<EntryWork> work(2);
  for (size_t b = 0; b < 2; ++b)
    work[b] = {{segments.data() + 3 * b, 3, k_head, v_head, 0}, 150, 0, 3, {}};
  for (const bool same : {true, false}) {
    Results r;
    r.out = TestTensor(DType::f32, {2, 4, 3, 8}), r.lse = TestTensor(DType::f32, {2, 4, 3});
    r.weights = TestTensor(DType::f32, {2, 4, 3, 150});
    const EntryCalls calls{Check("test"), {2, 16, 8, DType::f32, 16, 8}, work,
                           same,          Mask::causal_bottom_right(),   150};
    calls.run(p.q, DType::f32,
              {.out = r.out.view(), .lse = r.lse.view(), .weights = r.weights.view()}, {});
    EXPECT_EQ(r.out.bits(), want.out.bits());
    EXPECT_EQ(r.lse.bits(), want.lse.bits());
    EXPECT_EQ(r.weights.bits(), want.weights.bits());
  }
}

TEST(EntryCalls, PaddingIsCleared) {
  std::mt19937_64 random(2);
  const Problem p = make_problem({1, 2, 1, 3, 4, 8, 8}, DType::f32, random);
  const kernels::KvSegment segment{p.k.view().data, p.v.view().data, 0, 4};
  std::vector<EntryWork> work = {{{&segment, 1, 0, 0, 0}, 4, 1, 1, {}}};
  TestTensor out(DType::f32, {1, 2, 3, 8}), lse(DType::f32, {1, 2, 3});
  TestTensor weights(DType::f32, {1, 2, 3, 6});
  const std::vector<double> logits = {0.5, -1};
  const TestTensor sinks(DType::f32, {2}, logits);
  AttentionOptions o;
  o.sinks = sinks.view();
  const EntryCalls calls{Check("test"), {1, 8, 8, DType::f32, 8, 8}, work, true, {}, 6};
  calls.run(p.q, DType::f32, {.out = out.view(), .lse = lse.view(), .weights = weights.view()}, o);
  for (int64_t h = 0; h < 2; ++h)
    for (const int64_t i : {0, 2}) {
      EXPECT_EQ(out.get(0, h, i, 5), 0);
      EXPECT_EQ(element(lse.view(), h * 3 + i), logits[static_cast<size_t>(h)]);
      for (int64_t j = 0; j < 6; ++j) EXPECT_EQ(weights.get(0, h, i, j), 0);
    }
  EXPECT_GT(weights.get(0, 0, 1, 3), 0);
  EXPECT_EQ(weights.get(0, 0, 1, 4), 0);
  EXPECT_EQ(weights.get(0, 0, 1, 5), 0);
}

}  // namespace
}  // namespace qkv::test

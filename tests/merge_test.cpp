// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "qkv/attention.h"

namespace qkv {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Merge, TwoHalvesOfTheKeys_EqualTheWhole) {
  const int64_t h = 3, n_q = 5, n_kv = 40, d = 8;
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  std::vector<double> q(h * n_q * d), k(h * n_kv * d), v(h * n_kv * d);
  for (auto* x : {&q, &k, &v})
    for (double& e : *x) e = normal(random);
  struct State {
    std::vector<double> out, lse;
  };
  const auto attend = [&](int64_t begin, int64_t end) {
    State s{std::vector<double>(h * n_q * d), std::vector<double>(h * n_q)};
    attention(
        ConstTensor(q.data(), {1, h, n_q, d}),
        ConstTensor(k.data() + begin * d, {1, h, end - begin, d}, {0, n_kv * d, d, 1}),
        ConstTensor(v.data() + begin * d, {1, h, end - begin, d}, {0, n_kv * d, d, 1}),
        {.out = Tensor(s.out.data(), {1, h, n_q, d}), .lse = Tensor(s.lse.data(), {1, h, n_q})});
    return s;
  };
  const State whole = attend(0, n_kv), a = attend(0, 13);
  State b = attend(13, n_kv);
  // In place: the result goes where b was.
  merge_states(ConstTensor(a.out.data(), {1, h, n_q, d}), ConstTensor(a.lse.data(), {1, h, n_q}),
               ConstTensor(b.out.data(), {1, h, n_q, d}), ConstTensor(b.lse.data(), {1, h, n_q}),
               Tensor(b.out.data(), {1, h, n_q, d}), Tensor(b.lse.data(), {1, h, n_q}));
  for (size_t i = 0; i < whole.out.size(); ++i) EXPECT_NEAR(b.out[i], whole.out[i], 8e-16 * 8);
  for (size_t i = 0; i < whole.lse.size(); ++i) EXPECT_NEAR(b.lse[i], whole.lse[i], 8e-16 * 8);
}

TEST(Merge, SideWithoutKeys_CountsForNothingWhateverItHolds) {
  const float nan = std::nanf("");
  const float out_a[] = {1, 2}, lse_a[] = {0.5f}, out_b[] = {nan, kInf}, lse_b[] = {-kInf};
  float out[2], lse[1];
  merge_states(ConstTensor(out_a, {1, 2}), ConstTensor(lse_a, {1}), ConstTensor(out_b, {1, 2}),
               ConstTensor(lse_b, {1}), Tensor(out, {1, 2}), Tensor(lse, {1}));
  EXPECT_EQ(out[0], 1);
  EXPECT_EQ(out[1], 2);
  EXPECT_EQ(lse[0], 0.5f);
  merge_states(ConstTensor(out_b, {1, 2}), ConstTensor(lse_b, {1}), ConstTensor(out_b, {1, 2}),
               ConstTensor(lse_b, {1}), Tensor(out, {1, 2}), Tensor(lse, {1}));
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(lse[0], -kInf);
}

TEST(Merge, FarApart_DoesNotOverflow) {
  const float out_a[] = {1}, lse_a[] = {-1000}, out_b[] = {3}, lse_b[] = {1000};
  float out[1], lse[1];
  merge_states(ConstTensor(out_a, {1, 1}), ConstTensor(lse_a, {1}), ConstTensor(out_b, {1, 1}),
               ConstTensor(lse_b, {1}), Tensor(out, {1, 1}), Tensor(lse, {1}));
  EXPECT_EQ(out[0], 3);
  EXPECT_EQ(lse[0], 1000);
}

TEST(Merge, ShapesThatDiffer_AreRefused) {
  const float x[8] = {};
  float y[8] = {};
  const ConstTensor out(x, {2, 2}), lse(x, {2});
  EXPECT_THROW(merge_states(out, lse, ConstTensor(x, {2, 3}), lse, Tensor(y, {2, 2})), Error);
  EXPECT_THROW(merge_states(out, ConstTensor(x, {3}), out, lse, Tensor(y, {2, 2})), Error);
  EXPECT_THROW(merge_states(out, lse, out, lse, Tensor(y, {4})), Error);
  EXPECT_THROW(merge_states(out, lse, out, lse, Tensor(y, {2, 2}), Tensor(y, {1})), Error);
  EXPECT_THROW(merge_states({}, {}, out, lse, Tensor(y, {2, 2})), Error);
}

}  // namespace
}  // namespace qkv

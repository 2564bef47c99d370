// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "qkv/attention.h"

namespace qkv {
namespace {

struct Packed {
  std::vector<int32_t> cu_q, cu_kv;
  int64_t num_heads = 4, num_kv_heads = 2, dim_qk = 24, dim_v = 17;
  std::vector<float> q, k, v, out, lse;

  Packed(std::vector<int64_t> n_q, std::vector<int64_t> n_kv) : cu_q{0}, cu_kv{0} {
    for (const int64_t n : n_q) cu_q.push_back(cu_q.back() + static_cast<int32_t>(n));
    for (const int64_t n : n_kv) cu_kv.push_back(cu_kv.back() + static_cast<int32_t>(n));
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](int64_t n) {
      std::vector<float> x(static_cast<size_t>(n));
      for (float& e : x) e = normal(random);
      return x;
    };
    q = fill(total_q() * num_heads * dim_qk), k = fill(total_kv() * num_kv_heads * dim_qk);
    v = fill(total_kv() * num_kv_heads * dim_v);
    out.assign(static_cast<size_t>(total_q() * num_heads * dim_v), -3),
        lse.assign(static_cast<size_t>(total_q() * num_heads), -3);
  }
  int64_t total_q() const { return cu_q.back(); }
  int64_t total_kv() const { return cu_kv.back(); }
  int64_t sequences() const { return static_cast<int64_t>(cu_q.size()) - 1; }
  ConstTensor qt() const { return {q.data(), {total_q(), num_heads, dim_qk}}; }
  ConstTensor kt() const { return {k.data(), {total_kv(), num_kv_heads, dim_qk}}; }
  ConstTensor vt() const { return {v.data(), {total_kv(), num_kv_heads, dim_v}}; }
  ConstTensor cu_qt() const { return {cu_q.data(), {sequences() + 1}}; }
  ConstTensor cu_kvt() const { return {cu_kv.data(), {sequences() + 1}}; }
  void run(const AttentionOptions& options) {
    AttentionOutputs outputs;
    outputs.out = Tensor(out.data(), {total_q(), num_heads, dim_v});
    outputs.lse = Tensor(lse.data(), {num_heads, total_q()});
    attention_varlen(qt(), kt(), vt(), cu_qt(), cu_kvt(), outputs, options);
  }
  // The same sequence by sequence.
  void run_each(const std::vector<AttentionOptions>& options) {
    for (int64_t s = 0; s < sequences(); ++s) {
      const int64_t q0 = cu_q[static_cast<size_t>(s)], n_q = cu_q[static_cast<size_t>(s) + 1] - q0;
      const int64_t k0 = cu_kv[static_cast<size_t>(s)],
                    n_kv = cu_kv[static_cast<size_t>(s) + 1] - k0;
      const int64_t hq = num_heads * dim_qk, hk = num_kv_heads * dim_qk, hv = num_kv_heads * dim_v,
                    ho = num_heads * dim_v;
      AttentionOutputs outputs;
      outputs.out = Tensor(out.data() + q0 * ho, {1, num_heads, n_q, dim_v}, {0, dim_v, ho, 1});
      outputs.lse = Tensor(lse.data() + q0, {1, num_heads, n_q}, {0, total_q(), 1});
      attention(
          ConstTensor(q.data() + q0 * hq, {1, num_heads, n_q, dim_qk}, {0, dim_qk, hq, 1}),
          ConstTensor(k.data() + k0 * hk, {1, num_kv_heads, n_kv, dim_qk}, {0, dim_qk, hk, 1}),
          ConstTensor(v.data() + k0 * hv, {1, num_kv_heads, n_kv, dim_v}, {0, dim_v, hv, 1}),
          outputs, options[static_cast<size_t>(s)]);
    }
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

const std::vector<int64_t> kQ = {3, 0, 1, 130, 5, 64}, kKv = {7, 4, 600, 130, 0, 3};

TEST(Varlen, EveryMask_SameBitsAsOneCallPerSequence) {
  for (const Mask& mask :
       {Mask::full(), Mask::causal_bottom_right(), Mask::causal_top_left(), Mask::window(9, 2),
        Mask::prefix(3), Mask::chunk(16) & Mask::causal_bottom_right()}) {
    AttentionOptions options;
    options.mask = mask, options.num_threads = 1;
    Packed each(kQ, kKv), packed(kQ, kKv);
    each.run_each(std::vector<AttentionOptions>(kQ.size(), options));
    for (const int threads : {1, 2, 3, 7}) {
      options.num_threads = threads;
      packed.run(options);
      EXPECT_TRUE(same_bits(packed.out, each.out)) << mask.name() << ", threads " << threads;
      EXPECT_TRUE(same_bits(packed.lse, each.lse)) << mask.name() << ", threads " << threads;
    }
  }
}

TEST(Varlen, LengthsMask_HasOneEntryPerSequence) {
  const std::vector<int64_t> lengths = {5, 0, 599, 100, 0, 1};
  AttentionOptions options;
  options.mask = Mask::lengths(lengths) & Mask::causal_bottom_right();
  Packed each(kQ, kKv), packed(kQ, kKv);
  std::vector<AttentionOptions> one(kQ.size());
  for (size_t s = 0; s < kQ.size(); ++s)
    one[s].mask =
        Mask::lengths(std::span<const int64_t>(&lengths[s], 1)) & Mask::causal_bottom_right();
  packed.run(options);
  each.run_each(one);
  EXPECT_TRUE(same_bits(packed.out, each.out));
  EXPECT_TRUE(same_bits(packed.lse, each.lse));
}

TEST(Varlen, NoSequences_WritesNothing) {
  Packed p({}, {});
  p.run({});
  EXPECT_TRUE(p.out.empty());
}

TEST(Varlen, BadOffsets_AreRefusedBeforeWriting) {
  const auto refused = [](void (*spoil)(Packed&)) {
    Packed p(kQ, kKv);
    spoil(p);
    EXPECT_THROW(p.run({}), Error);
    for (const float x : p.out) ASSERT_EQ(x, -3);
  };
  refused([](Packed& p) { p.cu_q[0] = 1; });
  refused([](Packed& p) { p.cu_q[2] = 2; });
  refused([](Packed& p) { p.cu_kv[3] = 2000; });
  refused([](Packed& p) {
    p.cu_kv.insert(p.cu_kv.begin(), 0);
    p.cu_q.insert(p.cu_q.begin() + 1, 1000000);
  });
}

}  // namespace
}  // namespace qkv

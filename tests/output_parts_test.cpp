// SPDX-License-Identifier: Apache-2.0
// Tier: test. Outputs that several calls share: every form of the weights of packed sequences, of caches
// and of pages is, bit for bit, that of each sequence or entry alone.
#include "output_parts.h"

#include <gtest/gtest.h>

#include <deque>
#include <numeric>
#include <random>

#include "support/all_outputs.h"
#include "support/caches.h"
#include "support/files.h"

namespace qkv::test {
namespace {

int64_t one_of(std::mt19937_64& random, std::initializer_list<int64_t> choices) {
  return choices.begin()[random() % choices.size()];
}

std::vector<int64_t> some_rows(std::mt19937_64& random, int64_t n) {
  std::vector<int64_t> rows;
  for (int r = 0; n > 0 && r < 6; ++r)
    rows.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(n)));
  for (int64_t i = std::max<int64_t>(n - 5, 0); i < n; ++i) rows.push_back(i);  // follow each other
  return rows;
}

// Packed sequences with a mask that has one entry for each.
struct Packed {
  Extents e;  // of all sequences: n_q and n_kv are totals
  std::vector<int64_t> cu_q{0}, cu_kv{0}, lengths;
  int64_t longest = 0;
  DType dtype;
  TestTensor q, k, v;
  Mask mask;
  std::vector<int64_t> weight_rows;
  int64_t top_k;

  explicit Packed(std::mt19937_64& random) {
    const DType types[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
    dtype = types[random() % 4];
    e.num_kv_heads = one_of(random, {1, 2, 3});
    e.num_heads = e.num_kv_heads * one_of(random, {1, 2, 5});
    e.head_dim_qk = one_of(random, {1, 8, 24}), e.head_dim_v = one_of(random, {1, 8, 17});
    for (int64_t s = one_of(random, {0, 1, 3, 7}); s > 0; --s) {
      cu_q.push_back(cu_q.back() + one_of(random, {0, 1, 3, 33, 70}));
      const int64_t n_kv = one_of(random, {0, 1, 7, 129, 300});
      cu_kv.push_back(cu_kv.back() + n_kv);
      lengths.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(n_kv + 1)));
      longest = std::max(longest, n_kv);
    }
    e.n_q = cu_q.back(), e.n_kv = cu_kv.back();
    q = TestTensor(dtype, {1, e.num_heads, e.n_q, e.head_dim_qk}, Layout::bshd);
    k = TestTensor(dtype, {1, e.num_kv_heads, e.n_kv, e.head_dim_qk}, Layout::bshd);
    v = TestTensor(dtype, {1, e.num_kv_heads, e.n_kv, e.head_dim_v}, Layout::bshd);
    for (TestTensor* t : {&q, &k, &v}) t->fill_random(random);
    weight_rows = some_rows(random, e.n_q);
    top_k = one_of(random, {0, 1, 5, 70});
  }
  size_t sequences() const { return cu_q.size() - 1; }
  int64_t n_q(size_t s) const { return cu_q[s + 1] - cu_q[s]; }
  int64_t n_kv(size_t s) const { return cu_kv[s + 1] - cu_kv[s]; }

  // of: a sequence, or -1 for all.
  Mask mask_of(int kind, int of) const {
    const auto all = std::span<const int64_t>(lengths);
    const auto own = of < 0 ? all : all.subspan(static_cast<size_t>(of), 1);
    switch (kind) {
      case 0:
        return Mask::full();
      case 1:
        return Mask::causal_bottom_right();
      case 2:
        return Mask::window(5, 1);
      case 3:
        return Mask::lengths(own);
      case 4:
        return Mask::lengths(own) & Mask::causal_bottom_right();
      default:
        return Mask::chunk(16) & Mask::causal_top_left();
    }
  }
  AllOutputs run(int kind, int num_threads) const {
    Extents shape = e;
    shape.n_kv = longest;
    AllOutputs all(dtype, shape, weight_rows, top_k, e.n_kv);
    const auto packed = [](ConstTensor t) {
      const int64_t dims[] = {t.shape[2], t.shape[1], t.shape[3]};
      const int64_t strides[] = {t.stride[2], t.stride[1], t.stride[3]};
      return ConstTensor(t.data, t.dtype, dims, strides);
    };
    const int64_t n = static_cast<int64_t>(cu_q.size());
    AttentionOptions options;
    options.mask = mask_of(kind, -1), options.num_threads = num_threads;
    attention_varlen(packed(q), packed(k), packed(v), ConstTensor(cu_q.data(), {n}),
                     ConstTensor(cu_kv.data(), {n}), all.packed_view(), options);
    return all;
  }
  AllOutputs run_alone(int kind, size_t s) const {
    const auto rows = [&](ConstTensor t, int64_t first, int64_t n) {
      t.data = static_cast<const char*>(t.data) + first * t.stride[2] * size_bytes(t.dtype);
      t.shape[2] = n;
      return t;
    };
    Extents own = e;
    own.n_q = n_q(s), own.n_kv = n_kv(s);
    AllOutputs alone(dtype, own, rows_within(weight_rows, cu_q[s], own.n_q), top_k);
    AttentionOptions options;
    options.mask = mask_of(kind, static_cast<int>(s));
    attention(rows(q, cu_q[s], own.n_q), rows(k, cu_kv[s], own.n_kv), rows(v, cu_kv[s], own.n_kv),
              alone.view(), options);
    return alone;
  }
  // Keys that no query of their sequence sees become NaN, K and V.
  void spoil_hidden_keys(int kind) {
    for (size_t s = 0; s < sequences(); ++s) {
      const Mask own = mask_of(kind, static_cast<int>(s));
      for (int64_t j = 0; j < n_kv(s); ++j) {
        bool seen = false;
        for (int64_t i = 0; i < n_q(s) && !seen; ++i)
          seen = own.visible({1, e.num_heads, n_q(s), n_kv(s)}, 0, 0, i, j);
        for (TestTensor* t : {&k, &v})
          for (int64_t h = 0; !seen && h < e.num_kv_heads; ++h)
            for (int64_t d = 0; d < t->view().shape[3]; ++d)
              t->set(0, h, cu_kv[s] + j, d, std::numeric_limits<double>::quiet_NaN());
      }
    }
  }
};

TEST(OutputParts, PackedSequences_EveryFormIsThatOfTheSequenceAlone) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed);
    Packed p(random);
    const int kind = static_cast<int>(seed % 6);
    const AllOutputs all = p.run(kind, 1);
    for (size_t s = 0; s < p.sequences(); ++s)
      expect_part(all, 0, p.cu_q[s], p.cu_kv[s], p.run_alone(kind, s),
                  "seed " + std::to_string(seed) + ", sequence " + std::to_string(s));
    for (const int num_threads : {2, 3, 7})
      EXPECT_EQ(p.run(kind, num_threads).bits(), all.bits()) << seed << ", threads " << num_threads;
    p.spoil_hidden_keys(kind);
    EXPECT_EQ(p.run(kind, 2).bits(), all.bits()) << "NaN in hidden keys, seed " << seed;
    if (testing::Test::HasFailure()) FAIL() << "further problems are left out";
  }
}

TEST(OutputParts, PackedShapes_AreRefusedByName) {
  std::vector<float> x(1000);
  const std::vector<int64_t> cu_q = {0, 2, 5}, cu_kv = {0, 4, 6}, rows = {5};
  const auto refused = [&](const AttentionOutputs& outputs, const std::string& words) {
    const ConstTensor q(x.data(), {5, 2, 3}), k(x.data(), {6, 1, 3});
    const std::string text = error_text([&] {
      attention_varlen(q, k, k, ConstTensor(cu_q.data(), {3}), ConstTensor(cu_kv.data(), {3}),
                       outputs);
    });
    EXPECT_NE(text.find("attention_varlen: " + words), std::string::npos) << text;
  };
  const Tensor wrong(x.data(), {2, 2, 2});
  refused({.lse = wrong}, "outputs.lse needs shape [2, 5], got [2, 2, 2]");
  refused({.weights = wrong}, "outputs.weights needs shape [2, 5, 4], got [2, 2, 2]");
  refused({.mean_weights = wrong}, "outputs.mean_weights needs shape [5, 4], got [2, 2, 2]");
  refused({.row_weights = wrong}, "outputs.weight_rows and outputs.row_weights go together");
  refused({.weight_rows = ConstTensor(rows.data(), {1}), .row_weights = wrong},
          "outputs.weight_rows must lie in [0, n_q 5), got 5");
  refused({.top_weights = wrong, .top_keys = wrong},
          "outputs.top_weights needs shape [2, 5, 2], got [2, 2, 2]");
  refused({.column_sums = wrong}, "outputs.column_sums needs shape [2, 6], got [2, 2, 2]");
  refused({.entropy = wrong}, "outputs.entropy needs shape [2, 5], got [2, 2, 2]");
}

// Few query rows (decode) and many, one entry shorter than the queries; every kind and type.
TEST(OutputParts, Caches_EveryFormIsThatOfTheEntryAlone) {
  for (KvCacheConfig config : all_configs()) {
    if (config.num_sink_tokens > 0) continue;
    config.capacity = 0, config.page_size = 48;
    if (config.window > 0) config.window = 50;
    CacheModel model(config, 21);
    model.append({200, 1});
    model.append({101, 40});
    for (const int64_t n_q : {1, 4, 101}) model.expect_attends(n_q);
    if (testing::Test::HasFailure()) FAIL() << text_of(config);
  }
}

TEST(OutputParts, WeightRows_InTheirOrder) {
  const std::vector<int64_t> rows = {4, 0, 1, 2, 4, 7};
  TestTensor row_weights(DType::f32, {1, 2, 6, 9}), mean(DType::f32, {1, 8, 9});
  AttentionOutputs outputs;
  outputs.weight_rows = ConstTensor(rows.data(), {6}), outputs.row_weights = row_weights.view();
  outputs.mean_weights = mean.view();
  OutputParts parts(outputs);
  Call first{}, second{}, none{};
  parts.use({0, 1, 0, 4, 0, 9}, &first);
  parts.use({0, 1, 4, 3, 0, 5}, &second);
  parts.use({0, 1, 5, 2, 0, 9}, &none);
  const auto text = [](const Call& call) {
    std::string all;
    for (const WeightRow& row : call.weight_rows)
      all += std::to_string(row.slot) + ":" + std::to_string(row.token) + " ";
    return all;
  };
  EXPECT_EQ(text(first), "1:0 2:1 3:2 ");
  EXPECT_EQ(text(second), "0:0 4:0 ");
  EXPECT_EQ(text(none), "");
  EXPECT_FALSE(none.forms->row_weights);
  EXPECT_EQ(second.forms->row_weights.shape[3], 5);
  EXPECT_EQ(second.forms->mean_weights.rank, 3);
  EXPECT_EQ(second.forms->mean_weights.data, static_cast<float*>(mean.view().data) + 4 * 9);
  row_weights.fill(1), mean.fill(1);
  parts.clear_keys({0, 1, 4, 3, 0, 5});
  EXPECT_EQ(row_weights.get(0, 1, 4, 4), 1);
  EXPECT_EQ(row_weights.get(0, 1, 4, 5), 0);
  EXPECT_EQ(row_weights.get(0, 1, 5, 8), 1);
  EXPECT_EQ(element(mean.view(), 4 * 9 + 8), 0);
  EXPECT_EQ(element(mean.view(), 3 * 9 + 8), 1);
}

}  // namespace
}  // namespace qkv::test

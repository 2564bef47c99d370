// SPDX-License-Identifier: Apache-2.0
// attention() against the reference for random extents, element types, layouts and options: any mask & mask, scale, softcap,
// bias, sinks, ALiBi and dropout together. Fixed seeds.
#include <gtest/gtest.h>

#include <algorithm>

#include "qkv/attention.h"
#include "support/run_attention.h"

namespace qkv {
namespace {

using test::Extents;
using test::Layout;
using test::make_problem;
using test::Problem;

class Draw {
 public:
  explicit Draw(uint64_t seed) : random_(seed) {}
  std::mt19937_64& random() { return random_; }
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }

  // Small extents are likely, and those around lanes, panels and key blocks; 0 happens.
  Extents extents() {
    const int64_t num_kv_heads = one_of<int64_t>({1, 1, 2, 3});
    Extents e{one_of<int64_t>({0, 1, 1, 2, 2, 3}),
              num_kv_heads * one_of<int64_t>({1, 1, 2, 3, 8}),
              num_kv_heads,
              one_of<int64_t>({0, 1, 1, 2, 4, below(20), below(140)}),
              one_of<int64_t>({0, 1, below(20), below(140), below(700)}),
              one_of<int64_t>({0, 1, 8, 16, below(20), below(90)}),
              one_of<int64_t>({0, 1, 8, 16, below(20), below(90)})};
    constexpr int64_t kMostWork = 1'500'000;  // products that the plain loops are given per problem
    while (e.batch * e.num_heads * e.n_q * e.n_kv * (e.head_dim_qk + e.head_dim_v + 4) > kMostWork)
      (e.n_q > e.n_kv ? e.n_q : e.n_kv) /= 2;
    return e;
  }

 private:
  std::mt19937_64 random_;
};

TEST(AttentionProperty, RandomProblems_EqualTheReference) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    Draw draw(seed);
    const Extents e = draw.extents();
    const DType dtype = draw.one_of({DType::f32, DType::f32, DType::f64, DType::bf16, DType::f16});
    const DType dtype_kv =
        dtype == DType::f64 ? dtype : draw.one_of({dtype, DType::f32, DType::bf16, DType::f16});
    Problem p = make_problem(e, dtype, draw.random(), dtype_kv,
                             draw.one_of({Layout::contiguous, Layout::bshd, Layout::padded}),
                             draw.one_of({test::Guard::behind, test::Guard::before}));
    add_random_options(p, draw.random());
    p.add_text("seed", std::to_string(seed));
    expect_reference(p, draw.one_of({Layout::contiguous, Layout::bshd, Layout::fused}));
    if (testing::Test::HasFailure()) FAIL() << "further problems are left out";
  }
}

// Permuting the keys permutes the weights and moves out by rounding only: no key has a better place than another.
TEST(AttentionProperty, OrderOfTheKeys_DoesNotMatter) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Draw draw(seed);
    const Extents e{1, 2, 1, 1 + draw.below(40), 2 + draw.below(300), 16, 16};
    Problem p = make_problem(e, DType::f32, draw.random());
    Problem permuted = make_problem(e, DType::f32, draw.random());
    permuted.q = test::TestTensor(DType::f32, {1, 2, e.n_q, 16}, p.q.values());
    std::vector<int64_t> order(static_cast<size_t>(e.n_kv));
    for (size_t j = 0; j < order.size(); ++j) order[j] = static_cast<int64_t>(j);
    std::shuffle(order.begin(), order.end(), draw.random());
    for (int64_t j = 0; j < e.n_kv; ++j)
      for (int64_t d = 0; d < 16; ++d) {
        permuted.k.set(0, 0, j, d, p.k.get(0, 0, order[static_cast<size_t>(j)], d));
        permuted.v.set(0, 0, j, d, p.v.get(0, 0, order[static_cast<size_t>(j)], d));
      }
    const auto want = reference::forward(p.q, p.k, p.v);
    const auto got = run_attention(permuted, permuted.options);
    EXPECT_TRUE(test::within_bound("out", DType::f32, got.out.values(), want.out,
                                   naive_errors(p, want).out))
        << p.text;
  }
}

// The weights returned are those before dropout, and everything is dropped with probability 1.
TEST(AttentionProperty, Dropout_ChangesOutAlone) {
  for (int64_t n_kv : {1, 4, 300})
    for (int64_t n_q : {1, 33}) {
      std::mt19937_64 random(3);
      Problem p = make_problem({1, 2, 2, n_q, n_kv, 8, 8}, DType::f32, random);
      const auto without = run_attention(p, p.options);
      for (double dropout : {0.2, 1.0}) {
        p.options.dropout = dropout;
        const auto with = run_attention(p, p.options);
        EXPECT_EQ(with.weights.bits(), without.weights.bits()) << p.text;
        EXPECT_EQ(with.lse.bits(), without.lse.bits()) << p.text;
        if (dropout == 1) {
          EXPECT_EQ(with.out.values(), std::vector<double>(static_cast<size_t>(2 * n_q * 8), 0.0))
              << p.text;
        }
      }
      if (n_kv == 1) {
        EXPECT_EQ(without.weights.values(), std::vector<double>(static_cast<size_t>(2 * n_q), 1.0))
            << p.text;
      }
    }
}

}  // namespace
}  // namespace qkv

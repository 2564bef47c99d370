// SPDX-License-Identifier: Apache-2.0
// attention() against the reference: every extent around the borders of lanes, tiles and key
// blocks, every mask kind and pair of kinds, every group size, element type and layout. More:
// attention_bits_test (same bits, hidden NaN), attention_large_test (64-bit), attention_error_test,
// attention_property_test (random options), golden_test.
#include "qkv/attention.h"

#include <gtest/gtest.h>

#include "support/run_attention.h"

namespace qkv {
namespace {

using test::Extents;
using test::Layout;
using test::make_problem;
using test::MaskKind;
using test::Problem;

// Around vectors of 4, 8 and 16 lanes, the panel of 32 or 64 queries, the block of 128 keys, and a
// prime beyond.
const int64_t kRows[] = {0, 1, 15, 16, 17, 31, 33, 63, 65, 131};
const int64_t kKeys[] = {0, 1, 7, 8, 9, 127, 128, 129, 257};
const int64_t kDims[] = {0, 1, 3, 15, 16, 17, 31, 33, 64, 65, 127};

void expect_stop() {
  if (testing::Test::HasFailure()) FAIL() << "further cases are left out";
}

TEST(Attention, RowsAndKeysAroundTileBorders_EqualTheReference) {
  std::mt19937_64 random(1);
  for (int64_t n_q : kRows)
    for (int64_t n_kv : kKeys)
      for (DType dtype : {DType::f32, DType::f64})
        for (const Mask& mask :
             {Mask::full(), Mask::causal_bottom_right(), Mask::causal_top_left()}) {
          Problem p = make_problem({1, 2, 2, n_q, n_kv, 5, 6}, dtype, random);
          p.options.mask = mask;
          p.add_text(mask.name());
          expect_reference(p);
          ASSERT_NO_FATAL_FAILURE(expect_stop());
        }
}

TEST(Attention, HeadDimsAroundLaneBorders_EqualTheReference) {
  std::mt19937_64 random(2);
  for (int64_t head_dim_qk : kDims)
    for (int64_t head_dim_v : kDims)
      for (DType dtype : {DType::f32, DType::f64})
        for (int64_t n_q : {2, 19}) {
          Problem p = make_problem({1, 2, 1, n_q, 11, head_dim_qk, head_dim_v}, dtype, random);
          expect_reference(p);
          ASSERT_NO_FATAL_FAILURE(expect_stop());
        }
}

TEST(Attention, EveryPairOfMaskKinds_EqualsTheReference) {
  std::mt19937_64 random(3);
  for (int a = 0; a < test::kNumMaskKinds; ++a)
    for (int b = a; b < test::kNumMaskKinds; ++b)
      for (const Extents& e : {Extents{2, 4, 2, 37, 150, 8, 8}, Extents{2, 2, 2, 70, 30, 4, 9},
                               Extents{2, 4, 2, 1, 140, 8, 8}}) {
        Problem p = make_problem(e, DType::f32, random);
        p.options.mask =
            p.masks->make(static_cast<MaskKind>(a)) & p.masks->make(static_cast<MaskKind>(b));
        p.add_text(p.options.mask.name());
        expect_reference(p);
        ASSERT_NO_FATAL_FAILURE(expect_stop());
      }
}

TEST(Attention, EveryGroupSize_EqualsTheReference) {
  std::mt19937_64 random(4);
  for (int64_t group_size : {1, 2, 3, 8, 24})
    for (int64_t n_q : {1, 5, 33})
      for (int kind = 0; kind < test::kNumMaskKinds; ++kind) {
        Problem p = make_problem({2, 24, 24 / group_size, n_q, 40, 16, 12}, DType::f32, random);
        p.options.mask = p.masks->make(static_cast<MaskKind>(kind));
        p.add_text(p.options.mask.name());
        expect_reference(p);
        ASSERT_NO_FATAL_FAILURE(expect_stop());
      }
}

// Around the four keys and 64 rows of a KV head that the path of few keys takes, and around the rows of decode.
TEST(Attention, FewKeysOfManyRows_EqualTheReference) {
  std::mt19937_64 random(14);
  for (int64_t group_size : {1, 3, 8})
    for (int64_t n_q : {1, 2, 5, 8, 9, 13, 14, 21, 64, 65})
      for (int64_t n_kv : {1, 2, 3, 4, 5})
        for (int kind : {0, static_cast<int>(random() % test::kNumMaskKinds)})
          for (DType dtype : {DType::f32, DType::f64, DType::bf16}) {
            const int64_t num_kv_heads = 1 + static_cast<int64_t>(random() % 2);
            Problem p = make_problem({2, group_size * num_kv_heads, num_kv_heads, n_q, n_kv, 19, 8},
                                     dtype, random);
            p.options.mask = p.masks->make(static_cast<MaskKind>(kind));
            p.add_text(p.options.mask.name());
            expect_reference(p);
            ASSERT_NO_FATAL_FAILURE(expect_stop());
          }
}

TEST(Attention, EveryPairOfElementTypes_EqualsTheReference) {
  std::mt19937_64 random(5);
  for (DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (DType dtype_kv : {DType::f32, DType::bf16, DType::f16})
      for (int64_t n_q : {1, 4, 40})
        for (int64_t dim : {1, 7, 16, 33, 64}) {
          Problem p = make_problem({2, 4, 2, n_q, 139, dim, dim + 1}, dtype, random, dtype_kv);
          p.options.mask = Mask::causal_bottom_right();
          expect_reference(p);
          ASSERT_NO_FATAL_FAILURE(expect_stop());
        }
}

TEST(Attention, EveryLayoutAndGuardPage_EqualsTheReference) {
  std::mt19937_64 random(6);
  for (DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16})
    for (Layout layout : test::kLayouts)
      for (test::Guard guard : {test::Guard::behind, test::Guard::before})
        for (const Extents& e : {Extents{2, 4, 2, 35, 131, 19, 21},
                                 Extents{2, 4, 2, 1, 131, 19, 21}, Extents{3, 2, 2, 3, 5, 1, 1}}) {
          const bool is_broadcast =
              layout == Layout::broadcast_heads || layout == Layout::broadcast_batch;
          Problem p = make_problem(e, dtype, random, dtype, layout, guard);
          p.add_text("layout", std::to_string(static_cast<int>(layout)));
          expect_reference(p, is_broadcast ? Layout::contiguous : layout);
          ASSERT_NO_FATAL_FAILURE(expect_stop());
        }
}

TEST(Attention, SplitKeysOfFewRows_EqualTheReference) {
  std::mt19937_64 random(7);
  for (DType dtype : {DType::f32, DType::f64, DType::bf16})
    for (int64_t n_kv : {1023, 1025, 3001})
      for (int64_t n_q : {1, 3, 20}) {
        Problem p = make_problem({1, 4, 2, n_q, n_kv, 16, 16}, dtype, random);
        p.sinks = test::TestTensor(test::arithmetic_dtype(dtype), {4});
        p.options.sinks = p.sinks.fill_random(random);
        expect_reference(p);
        p.options.mask = Mask::window(700, 0) & p.masks->make(MaskKind::dense_bool);
        expect_reference(p);
        ASSERT_NO_FATAL_FAILURE(expect_stop());
      }
}

TEST(Attention, HugeScores_DoNotOverflow) {
  std::mt19937_64 random(8);
  for (DType dtype : {DType::f32, DType::f64})
    for (double amplitude : {30.0, 1e4, 1e15})
      for (int64_t n_kv : {9, 300}) {
        Problem p = make_problem({1, 2, 1, 20, n_kv, 8, 8}, dtype, random);
        p.options.scale = 1;
        for (int64_t d = 0; d < 8; ++d)
          p.k.set(0, 0, n_kv / 2, d, amplitude * p.q.get(0, 0, 3, d));  // one very large score
        p.add_text("amplitude", std::to_string(amplitude));
        expect_reference(p);
        p.k.fill_random(random, amplitude);  // all of them
        expect_reference(p);
      }
}

TEST(Attention, EqualScores_GiveTheMean) {
  for (DType dtype : {DType::f32, DType::f64})
    for (double score : {0.0, -1e5, 88.0, 1e30}) {
      std::mt19937_64 random(9);
      Problem p = make_problem({1, 2, 2, 34, 260, 4, 4}, dtype, random);
      p.options.scale = 1;
      p.q.fill(1);
      p.k.fill(score / 4);
      p.add_text("score", std::to_string(score));
      expect_reference(p);
    }
}

// Scores that rise or fall by 30 per key: the running maximum moves in every block, or never.
TEST(Attention, RisingAndFallingScores_EqualTheReference) {
  for (DType dtype : {DType::f32, DType::f64})
    for (double step : {30.0, -30.0, 0.01})
      for (int64_t n_q : {1, 40}) {
        std::mt19937_64 random(10);
        Problem p = make_problem({1, 1, 1, n_q, 600, 1, 3}, dtype, random);
        p.options.scale = 1;
        p.q.fill(1);
        for (int64_t j = 0; j < 600; ++j) p.k.set(0, 0, j, 0, step * static_cast<double>(j));
        p.add_text("step", std::to_string(step));
        expect_reference(p);
      }
}

TEST(Attention, RowsThatSeeNoKey_AreZeroAndMinusInfinity) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (DType dtype : {DType::f32, DType::f64, DType::bf16})
    for (int64_t n_q : {3, 70}) {
      std::mt19937_64 random(11);
      Problem p = make_problem({2, 2, 1, n_q, 2, 4, 4}, dtype,
                               random);  // n_q > n_kv: rows 0 ... n_q - 3 are empty
      p.options.mask = Mask::causal_bottom_right();
      test::Results r = run_attention(p, p.options);
      for (int64_t i = 0; i < n_q - 2; ++i) {
        EXPECT_EQ(r.out.get(1, 1, i, 3), 0);
        EXPECT_EQ(r.weights.get(1, 1, i, 1), 0);
        EXPECT_EQ(element(r.lse.view(), r.lse.offset(1, 1, i)), -infinity);
      }
      p.sinks = test::TestTensor(test::arithmetic_dtype(dtype), {2});
      p.options.sinks = p.sinks.fill(0.75);
      r = run_attention(p, p.options);
      EXPECT_EQ(r.out.get(1, 1, 0, 3), 0);
      expect_reference(p);
    }
}

TEST(Attention, NoOutputs_IsANoOp) {
  std::mt19937_64 random(12);
  const Problem p = make_problem({1, 1, 1, 2, 2, 2, 2}, DType::f32, random);
  attention(p.q, p.k, p.v, {});
}

}  // namespace
}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// What must not change a bit of attention(): threads, the order of tasks, the batch it is part of,
// NaN in hidden keys and values. And what must: NaN in visible ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "qkv/attention.h"
#include "support/run_attention.h"
#include "support/shuffled_executor.h"

namespace qkv {
namespace {

using test::Extents;
using test::make_problem;
using test::MaskKind;
using test::Problem;
using test::Results;
using test::ShuffledExecutor;

void expect_same_bits(const Results& a, const Results& b, const std::string& what) {
  EXPECT_EQ(a.out.bits(), b.out.bits()) << "out, " << what;
  EXPECT_EQ(a.lse.bits(), b.lse.bits()) << "lse, " << what;
  EXPECT_EQ(a.weights.bits(), b.weights.bits()) << "weights, " << what;
}

// Large enough that several threads are worth waking.
const Extents kLarge[] = {{1, 8, 2, 150, 700, 64, 64},
                          {1, 2, 1, 3, 9000, 64, 64},
                          {2, 4, 4, 1, 5000, 64, 80},
                          {3, 2, 2, 257, 130, 40, 33}};

TEST(AttentionBits, AnyNumberOfThreadsAndAnyOrder_SameBits) {
  for (const Extents& e : kLarge)
    for (DType dtype : {DType::f32, DType::f64, DType::bf16}) {
      std::mt19937_64 random(1);
      Problem p = make_problem(e, dtype, random);
      add_random_options(p, random);
      AttentionOptions o = p.options;
      o.num_threads = 1;
      const Results one = run_attention(p, o);
      for (int num_threads : {2, 3, 7}) {
        o.num_threads = num_threads;
        expect_same_bits(run_attention(p, o), one,
                         std::to_string(num_threads) + " threads, " + p.text);
      }
      for (uint64_t seed : {1, 2, 3}) {
        ShuffledExecutor executor(seed);
        o.executor = &executor;
        o.num_threads = 4;
        expect_same_bits(run_attention(p, o), one, "shuffled tasks, " + p.text);
        EXPECT_GT(executor.num_tasks(), 1) << "the tasks were never shuffled: " << p.text;
      }
    }
}

// A part of a problem: one batch entry, or one KV head with its group, alone.
ConstTensor part_of(ConstTensor t, int axis, int64_t begin, int64_t count) {
  if (t.shape[axis] == 1) return t;  // broadcast
  t.data = static_cast<const char*>(t.data) + begin * t.stride[axis] * size_bytes(t.dtype);
  t.shape[axis] = count;
  return t;
}

std::vector<std::byte> bits_of(const ConstTensor& t) {
  std::vector<std::byte> all;
  test::for_each_offset(t, [&](int64_t at) {
    const std::byte* from = static_cast<const std::byte*>(t.data) + at * size_bytes(t.dtype);
    all.insert(all.end(), from, from + size_bytes(t.dtype));
  });
  return all;
}

TEST(AttentionBits, AloneOrInsideABatch_SameBits) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 random(seed);
    const Extents e{3,
                    4,
                    2,
                    std::array<int64_t, 4>{1, 5, 37, 130}[seed % 4],
                    std::array<int64_t, 3>{60, 135, 1100}[seed % 3],
                    20,
                    24};
    Problem p = make_problem(e, seed % 2 ? DType::f32 : DType::bf16, random);
    std::vector<int64_t> lengths = {17, e.n_kv, 0};
    AttentionOptions& o = p.options;
    p.bias = test::TestTensor(DType::f32, {3, 1, e.n_q, e.n_kv});
    p.bias.fill_random(random);
    p.sinks = test::TestTensor(DType::f32, {4});
    p.sinks.fill_random(random);
    const bool with_bias = seed % 5 == 0, with_lengths = seed % 5 == 1, is_causal = seed % 5 == 2;
    if (with_bias) o.bias = p.bias, o.sinks = p.sinks;
    if (with_lengths) o.mask = Mask::lengths(lengths);
    if (is_causal) o.mask = Mask::causal_bottom_right();
    const Results all = run_attention(p, o);
    for (int64_t b = 0; b < e.batch; ++b) {
      AttentionOptions alone = o;
      if (with_bias) alone.bias = part_of(p.bias, 0, b, 1);
      if (with_lengths)
        alone.mask = Mask::lengths(std::span(lengths).subspan(static_cast<size_t>(b), 1));
      Results r;
      r.out = test::TestTensor(p.q.view().dtype, {1, e.num_heads, e.n_q, e.head_dim_v});
      r.lse = test::TestTensor(DType::f32, {1, e.num_heads, e.n_q});
      r.weights = test::TestTensor(DType::f32, {1, e.num_heads, e.n_q, e.n_kv});
      attention(part_of(p.q, 0, b, 1), part_of(p.k, 0, b, 1), part_of(p.v, 0, b, 1),
                {.out = r.out.view(), .lse = r.lse.view(), .weights = r.weights.view()}, alone);
      EXPECT_EQ(bits_of(part_of(all.out, 0, b, 1)), r.out.bits())
          << "entry " << b << " of " << p.text << " seed " << seed;
      EXPECT_EQ(bits_of(part_of(all.lse, 0, b, 1)), r.lse.bits())
          << "entry " << b << " of " << p.text << " seed " << seed;
      EXPECT_EQ(bits_of(part_of(all.weights, 0, b, 1)), r.weights.bits())
          << "entry " << b << " of " << p.text;
    }
  }
}

TEST(AttentionBits, LayoutOfTheInputs_SameBits) {
  for (int64_t n_q : {1, 40}) {
    std::mt19937_64 random(5);
    const Extents e{2, 4, 2, n_q, 300, 24, 17};
    const Problem plain = make_problem(e, DType::f32, random);
    const Results want = run_attention(plain, plain.options);
    for (test::Layout layout :
         {test::Layout::bshd, test::Layout::fused, test::Layout::padded, test::Layout::reversed}) {
      Problem p = make_problem(e, DType::f32, random);
      p.q = test::TestTensor(DType::f32, {2, 4, n_q, 24}, plain.q.values(), layout);
      p.k = test::TestTensor(DType::f32, {2, 2, 300, 24}, plain.k.values(), layout);
      p.v = test::TestTensor(DType::f32, {2, 2, 300, 17}, plain.v.values(), layout);
      expect_same_bits(run_attention(p, p.options, {}, layout), want, "layout");
    }
  }
}

TEST(AttentionBits, MaskThatHidesNothing_SameBitsAsNoMask) {
  for (int64_t n_q : {1, 4, 70})
    for (DType dtype : {DType::f32, DType::f64}) {
      std::mt19937_64 random(6);
      Problem p = make_problem({2, 2, 1, n_q, 150, 16, 16}, dtype, random);
      const Results want = run_attention(p, p.options);
      const std::vector<int64_t> lengths(2, 150), ids(150, 7);
      test::TestTensor all(DType::boolean, {n_q, 150});
      all.fill(1);
      test::TestTensor zeros(DType::f32, {1, 150});
      zeros.fill(0);
      for (const Mask& mask :
           {Mask::lengths(lengths), Mask::window(150, 150), Mask::prefix(150), Mask::chunk(150),
            Mask::documents(ConstTensor(ids.data(), {n_q}), ConstTensor(ids.data(), {150})),
            Mask::dense(all), Mask::dense(zeros)}) {
        AttentionOptions o;
        o.mask = mask;
        expect_same_bits(run_attention(p, o), want, mask.name());
      }
    }
}

// Some keys and values become NaN or Inf. Rows that see none of them keep every bit; rows that see
// one become NaN.
int64_t expect_hidden_stays_hidden(Problem& p, std::mt19937_64& random) {
  const Extents& e = p.extents;
  const Results before = run_attention(p, p.options);
  std::vector<bool> is_poisoned(static_cast<size_t>(e.batch * e.num_kv_heads * e.n_kv));
  auto index = [&](int64_t b, int64_t h_kv, int64_t j) {
    return static_cast<size_t>((b * e.num_kv_heads + h_kv) * e.n_kv + j);
  };
  const double poisons[] = {std::numeric_limits<double>::quiet_NaN(),
                            std::numeric_limits<double>::infinity(),
                            -std::numeric_limits<double>::infinity()};
  for (int64_t b = 0; b < e.batch; ++b)
    for (int64_t h_kv = 0; h_kv < e.num_kv_heads; ++h_kv)
      for (int64_t j = 0; j < e.n_kv; ++j) {
        if (random() % 6 != 0) continue;
        is_poisoned[index(b, h_kv, j)] = true;
        for (int64_t d = 0; d < e.head_dim_qk; ++d) p.k.set(b, h_kv, j, d, poisons[random() % 3]);
        for (int64_t d = 0; d < e.head_dim_v; ++d) p.v.set(b, h_kv, j, d, poisons[random() % 3]);
        p.k.set(b, h_kv, j, 0, poisons[0]);  // every score of a poisoned key is NaN
      }
  const Results after = run_attention(p, p.options);
  const MaskShape shape = e.mask_shape();
  int64_t num_hidden = 0;
  for (int64_t b = 0; b < e.batch; ++b)
    for (int64_t h = 0; h < e.num_heads; ++h)
      for (int64_t i = 0; i < e.n_q; ++i) {
        bool sees_poison = false;
        for (int64_t j = 0; j < e.n_kv; ++j)
          sees_poison |= is_poisoned[index(b, h / (e.num_heads / e.num_kv_heads), j)] &&
                         p.options.mask.visible(shape, b, h, i, j);
        num_hidden += !sees_poison;
        const auto is_right = [&](double x, double x_before) {
          return sees_poison ? std::isnan(x) : x == x_before;
        };
        const std::string where = " of row " + std::to_string(i) +
                                  (sees_poison ? ", which sees" : ", which does not see") +
                                  " a NaN: " + p.text;
        const int64_t lse_at = after.lse.offset(b, h, i);
        EXPECT_TRUE(is_right(element(after.lse.view(), lse_at), element(before.lse.view(), lse_at)))
            << "lse" << where;
        for (int64_t d = 0; d < e.head_dim_v; ++d)
          EXPECT_TRUE(is_right(after.out.get(b, h, i, d), before.out.get(b, h, i, d)))
              << "out" << where;
        for (int64_t j = 0; j < e.n_kv; ++j) {
          const double weight = after.weights.get(b, h, i, j);
          const bool is_visible = p.options.mask.visible(shape, b, h, i, j);
          EXPECT_TRUE(is_visible ? is_right(weight, before.weights.get(b, h, i, j)) : weight == 0)
              << "weight" << where;
        }
        if (testing::Test::HasFailure()) return num_hidden;
      }
  return num_hidden;
}

TEST(AttentionBits, NanInHiddenKeysAndValues_ChangesNoBit) {
  int64_t num_hidden = 0;
  for (uint64_t seed = 0; seed < 12; ++seed)
    for (int kind = 1; kind < test::kNumMaskKinds; ++kind)
      for (int64_t n_q : {1, 3, 45}) {
        std::mt19937_64 random(seed);
        const Extents e{2, 4, seed % 3 == 0 ? 4 : 2, n_q, seed % 2 ? 23 : 150, 9, 7};
        Problem p =
            make_problem(e, std::array{DType::f32, DType::f64, DType::bf16}[seed % 3], random);
        p.options.mask = p.masks->make(static_cast<MaskKind>(kind));
        if (seed % 2) p.options.mask = p.options.mask & Mask::window(3, 0);
        p.add_text(p.options.mask.name());
        num_hidden += expect_hidden_stays_hidden(p, random);
        if (testing::Test::HasFailure()) return;
      }
  EXPECT_GT(num_hidden, 1000);
}

// The path of few keys leaves a call with a hidden NaN to decode, row block by row block.
TEST(AttentionBits, NanInFewKeysOfManyRows_ChangesNoBit) {
  int64_t num_hidden = 0;
  for (uint64_t seed = 0; seed < 20; ++seed)
    for (int kind = 1; kind < test::kNumMaskKinds; ++kind)
      for (int64_t n_q : {2, 5, 14, 21}) {
        std::mt19937_64 random(seed);
        const int64_t num_kv_heads = 1 + static_cast<int64_t>(seed % 3);
        Problem p =
            make_problem({2, 3 * num_kv_heads, num_kv_heads, n_q, 4, 17, 8}, DType::f32, random);
        p.options.mask = p.masks->make(static_cast<MaskKind>(kind));
        p.add_text(p.options.mask.name());
        num_hidden += expect_hidden_stays_hidden(p, random);
        if (testing::Test::HasFailure()) return;
      }
  EXPECT_GT(num_hidden, 1000);
}

// Whole blocks of keys behind a length, outside a window, in another document: the way caches look.
TEST(AttentionBits, NanBehindALengthOrOutsideAWindow_ChangesNoBit) {
  const std::vector<int64_t> lengths = {100, 3};
  std::vector<int32_t> ids(600);
  for (size_t j = 0; j < ids.size(); ++j) ids[j] = static_cast<int32_t>(j / 90);
  const int32_t asked[40] = {};
  for (int64_t n_q : {1, 2, 40})
    for (DType dtype : {DType::f32, DType::f64, DType::f16})
      for (const Mask& mask :
           {Mask::lengths(lengths), Mask::window(50, 0), Mask::chunk(128), Mask::causal_top_left(),
            Mask::documents(ConstTensor(asked, {n_q}), ConstTensor(ids.data(), {600})),
            Mask::lengths(lengths) & Mask::causal_bottom_right()}) {
        std::mt19937_64 random(8);
        Problem p = make_problem({2, 4, 2, n_q, 600, 16, 16}, dtype, random);
        p.options.mask = mask;
        const Results before = run_attention(p, p.options);
        for (int64_t b = 0; b < 2; ++b)
          for (int64_t j = 0; j < 600; ++j) {
            bool is_visible = false;
            for (int64_t i = 0; i < n_q; ++i)
              is_visible |= mask.visible(p.extents.mask_shape(), b, 0, i, j);
            if (is_visible) continue;
            for (int64_t h_kv = 0; h_kv < 2; ++h_kv)
              for (int64_t d = 0; d < 16; ++d) {
                p.k.set(b, h_kv, j, d, std::numeric_limits<double>::quiet_NaN());
                p.v.set(b, h_kv, j, d, std::numeric_limits<double>::infinity());
              }
          }
        expect_same_bits(run_attention(p, p.options), before, mask.name() + " " + p.text);
      }
}

// A NaN or Inf in a single visible value reaches its own feature and no other.
TEST(AttentionBits, NanInAVisibleValue_ReachesItsFeatureAlone) {
  for (int64_t n_q : {1, 40}) {
    std::mt19937_64 random(9);
    Problem p = make_problem({1, 2, 1, n_q, 140, 8, 19}, DType::f32, random);
    const Results before = run_attention(p, p.options);
    p.v.set(0, 0, 133, 17, std::numeric_limits<double>::quiet_NaN());
    const Results after = run_attention(p, p.options);
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t i = 0; i < n_q; ++i)
        for (int64_t d = 0; d < 19; ++d) {
          if (d == 17) {
            EXPECT_TRUE(std::isnan(after.out.get(0, h, i, d)));
          } else {
            EXPECT_EQ(after.out.get(0, h, i, d), before.out.get(0, h, i, d));
          }
        }
    EXPECT_EQ(after.lse.bits(), before.lse.bits());
  }
}

// A dropped weight has the same place whatever is asked for and however the rows are cut.
TEST(AttentionBits, DropoutOfARow_DoesNotDependOnTheOtherRows) {
  std::mt19937_64 random(10);
  Problem p = make_problem({1, 2, 2, 70, 200, 8, 8}, DType::f32, random);
  p.options.dropout = 0.4;
  p.options.seed = 123;
  const Results all = run_attention(p, p.options);
  AttentionOptions causal = p.options;
  causal.mask = Mask::lengths(std::vector<int64_t>{200});
  expect_same_bits(run_attention(p, causal), all, "a mask that hides nothing");
}

}  // namespace
}  // namespace qkv

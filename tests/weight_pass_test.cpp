// SPDX-License-Identifier: Apache-2.0
// The forms of the weights (mean over heads, chosen rows, largest, column sums, entropy) against the
// reference and against the full weights, and what must not change a bit of them or of out.
#include "weight_pass.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "element.h"
#include "mask_terms.h"
#include "qkv/plan.h"
#include "support/peak_memory.h"
#include "support/run_attention.h"

namespace qkv {
using Shape = Problem;  // of a plan; below, Problem is that of the tests
namespace {

using test::Extents;
using test::Layout;
using test::make_problem;
using test::MaskKind;
using test::Problem;
using test::TestTensor;
using test::within_bound;

std::vector<std::byte> bits_of(const TestTensor& t) {
  return t ? t.bits() : std::vector<std::byte>{};
}

// What one call wrote.
struct Forms {
  TestTensor out, weights, mean, rows, top, top_keys, sums, entropy;
  std::vector<std::byte> bits() const {
    std::vector<std::byte> all;
    for (const TestTensor* t : {&mean, &rows, &top, &top_keys, &sums, &entropy}) {
      const std::vector<std::byte> b = bits_of(*t);
      all.insert(all.end(), b.begin(), b.end());
    }
    return all;
  }
  bool is_padding_untouched() const {
    for (const TestTensor* t : {&mean, &rows, &top, &top_keys, &sums, &entropy})
      if (*t && !t->is_padding_untouched()) return false;
    return true;
  }
};

struct Asked {
  std::vector<int64_t> rows;
  int64_t k = 3;
  bool weights = false, mean = true, top = true, sums = true, entropy = true, out = true;
};

Forms run_forms(const Problem& p, const AttentionOptions& options, const Asked& asked,
                Layout layout = Layout::contiguous) {
  const Extents& e = p.extents;
  const DType dtype = p.q.view().dtype, arithmetic = test::arithmetic_dtype(dtype);
  const int64_t n_rows = static_cast<int64_t>(asked.rows.size());
  Forms f;
  if (asked.out) f.out = TestTensor(dtype, {e.batch, e.num_heads, e.n_q, e.head_dim_v});
  const std::vector<int64_t> full = {e.batch, e.num_heads, e.n_q, e.n_kv};
  AttentionOutputs o;
  o.out = f.out.view();
  if (asked.weights) o.weights = (f.weights = TestTensor(arithmetic, full, layout)).view();
  if (asked.mean)
    o.mean_weights = (f.mean = TestTensor(arithmetic, {e.batch, e.n_q, e.n_kv})).view();
  if (n_rows > 0) {
    f.rows = TestTensor(arithmetic, {e.batch, e.num_heads, n_rows, e.n_kv}, layout);
    o.row_weights = f.rows.view();
    o.weight_rows = ConstTensor(asked.rows.data(), {n_rows});
  }
  if (asked.top) {
    const std::vector<int64_t> shape = {e.batch, e.num_heads, e.n_q, asked.k};
    f.top = TestTensor(arithmetic, shape, layout), f.top_keys = TestTensor(DType::i64, shape);
    o.top_weights = f.top.view(), o.top_keys = f.top_keys.view();
  }
  if (asked.sums)
    o.column_sums = (f.sums = TestTensor(arithmetic, {e.batch, e.num_heads, e.n_kv})).view();
  if (asked.entropy)
    o.entropy = (f.entropy = TestTensor(arithmetic, {e.batch, e.num_heads, e.n_q})).view();
  attention(p.q, p.k, p.v, o, options);
  return f;
}

// Sums of the plain loops, in their own precision.
template <class T>
void naive_forms(const Problem& p, test::Loop loop, const reference::WeightForms& want,
                 double errors[3]) {
  const Extents& e = p.extents;
  const auto naive = test::NaiveForward<T>(p.q, p.k, p.v, p.options, loop).run();
  std::vector<double> mean, sums, entropy;
  const auto at = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    return static_cast<T>(
        naive.weights[static_cast<size_t>(((b * e.num_heads + h) * e.n_q + i) * e.n_kv + j)]);
  };
  for (int64_t b = 0; b < e.batch; ++b) {
    for (int64_t i = 0; i < e.n_q; ++i)
      for (int64_t j = 0; j < e.n_kv; ++j) {
        T sum = 0;
        for (int64_t h = 0; h < e.num_heads; ++h) sum += at(b, h, i, j);
        mean.push_back(sum / static_cast<T>(e.num_heads));
      }
    for (int64_t h = 0; h < e.num_heads; ++h) {
      for (int64_t j = 0; j < e.n_kv; ++j) {
        T sum = 0;
        for (int64_t i = 0; i < e.n_q; ++i) sum += at(b, h, i, j);
        sums.push_back(sum);
      }
      for (int64_t i = 0; i < e.n_q; ++i) {
        T sum = 0;
        for (int64_t j = 0; j < e.n_kv; ++j)
          if (const T w = at(b, h, i, j); w != 0) sum -= w * std::log(w);
        entropy.push_back(sum);
      }
    }
  }
  errors[0] = std::max(errors[0], test::max_error(mean, want.mean_weights));
  errors[1] = std::max(errors[1], test::max_error(sums, want.column_sums));
  errors[2] = std::max(errors[2], test::max_error(entropy, want.entropy));
}

// The largest of a row of full weights, by a stable sort of what is visible.
void expect_top(const Problem& p, const Forms& f, const Asked& asked) {
  const Extents& e = p.extents;
  for (int64_t b = 0; b < e.batch; ++b)
    for (int64_t h = 0; h < e.num_heads; ++h)
      for (int64_t i = 0; i < e.n_q; ++i) {
        std::vector<int64_t> keys;
        for (int64_t j = 0; j < e.n_kv; ++j) {
          const ConstTensor& bias = p.options.bias;
          if (p.options.mask.visible(e.mask_shape(), b, h, i, j) &&
              !(bias && element(bias, score_strides(bias).offset(b, h, i, j)) ==
                            -std::numeric_limits<double>::infinity()))
            keys.push_back(j);
        }
        std::stable_sort(keys.begin(), keys.end(), [&](int64_t x, int64_t y) {
          return f.weights.get(b, h, i, x) > f.weights.get(b, h, i, y);
        });
        keys.resize(static_cast<size_t>(asked.k), -1);
        for (int64_t n = 0; n < asked.k; ++n) {
          const int64_t j = keys[static_cast<size_t>(n)];
          ASSERT_EQ(f.top_keys.get(b, h, i, n), static_cast<double>(j))
              << "row " << b << " " << h << " " << i << " place " << n << " " << p.text;
          ASSERT_EQ(f.top.get(b, h, i, n), j < 0 ? 0 : f.weights.get(b, h, i, j)) << p.text;
        }
      }
}

// All forms against the reference; rows and the largest against the full weights, bit for bit; out
// as without any of them; each form alone as among the others.
void expect_forms(const Problem& p, const Asked& asked, Layout layout = Layout::contiguous) {
  const Extents& e = p.extents;
  const DType dtype = p.q.view().dtype, arithmetic = test::arithmetic_dtype(dtype);
  const auto want = reference::weight_forms(p.q, p.k, p.v, p.options, asked.rows, asked.k);
  const auto forward = reference::forward(p.q, p.k, p.v, p.options);
  double errors[3] = {};
  for (const test::Loop loop : test::kLoops) {
    if (dtype == DType::f64) {
      naive_forms<double>(p, loop, want, errors);
    } else {
      naive_forms<float>(p, loop, want, errors);
    }
  }
  const double naive_weights = naive_errors(p, forward).weights;
  Asked all = asked;
  all.weights = true;
  const Forms got = run_forms(p, p.options, all, layout);
  EXPECT_TRUE(
      within_bound("mean_weights", arithmetic, got.mean.values(), want.mean_weights, errors[0]))
      << p.text;
  EXPECT_TRUE(
      within_bound("column_sums", arithmetic, got.sums.values(), want.column_sums, errors[1]))
      << p.text;
  // Entropy is a sum of logarithms: as with lse, a relative error of a weight is an absolute one here.
  EXPECT_TRUE(within_bound("entropy", arithmetic, got.entropy.values(), want.entropy, errors[2], 1))
      << p.text;
  EXPECT_TRUE(
      within_bound("top_weights", arithmetic, got.top.values(), want.top_weights, naive_weights))
      << p.text;
  EXPECT_TRUE(got.is_padding_untouched()) << p.text;
  expect_top(p, got, asked);
  for (int64_t b = 0; b < e.batch; ++b)
    for (int64_t h = 0; h < e.num_heads; ++h)
      for (size_t r = 0; r < asked.rows.size(); ++r)
        for (int64_t j = 0; j < e.n_kv; ++j)
          ASSERT_EQ(got.rows.get(b, h, static_cast<int64_t>(r), j),
                    got.weights.get(b, h, asked.rows[r], j))
              << p.text;

  const auto plain = run_attention(p, p.options);
  EXPECT_EQ(got.out.bits(), plain.out.bits()) << "forms change out: " << p.text;
  EXPECT_EQ(got.weights.bits(), plain.weights.bits()) << "forms change weights: " << p.text;
  const Forms without = run_forms(p, p.options, asked, layout);
  EXPECT_EQ(without.bits(), got.bits()) << "weights change the forms: " << p.text;
  Asked no_out = asked;
  no_out.out = false;
  EXPECT_EQ(run_forms(p, p.options, no_out, layout).bits(), got.bits())
      << "out changes the forms: " << p.text;
  for (int one = 0; one < 5; ++one) {
    Asked alone{one == 0 ? asked.rows : std::vector<int64_t>{},
                asked.k,
                false,
                one == 1,
                one == 2,
                one == 3,
                one == 4};
    const Forms f = run_forms(p, p.options, alone, layout);
    EXPECT_EQ(f.out.bits(), plain.out.bits()) << p.text;
    const TestTensor* pairs[5][2] = {{&f.rows, &got.rows},
                                     {&f.mean, &got.mean},
                                     {&f.top_keys, &got.top_keys},
                                     {&f.sums, &got.sums},
                                     {&f.entropy, &got.entropy}};
    EXPECT_EQ(bits_of(*pairs[one][0]), bits_of(*pairs[one][1])) << "form " << one << " " << p.text;
  }
}

std::vector<int64_t> some_rows(int64_t n_q, std::mt19937_64& random) {
  std::vector<int64_t> rows;
  for (int64_t r = 0; n_q > 0 && r < 5; ++r)
    rows.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(n_q)));
  for (int64_t i = std::max<int64_t>(n_q - 4, 0); i < n_q; ++i) rows.push_back(i);  // a run
  return rows;
}

TEST(WeightPass, EveryMaskKind_EqualsTheReference) {
  for (int kind = 0; kind < test::kNumMaskKinds; ++kind)
    for (const Extents& e : {Extents{2, 4, 2, 37, 150, 8, 5}, Extents{1, 6, 2, 3, 141, 9, 4},
                             Extents{2, 3, 3, 140, 33, 16, 16}, Extents{1, 5, 1, 30, 40, 3, 2}}) {
      std::mt19937_64 random(static_cast<uint64_t>(kind) + 1);
      Problem p = make_problem(e, kind % 2 ? DType::f32 : DType::f64, random);
      p.options.mask = p.masks->make(static_cast<MaskKind>(kind));
      p.add_text("mask", p.options.mask.name());
      expect_forms(p, {some_rows(e.n_q, random), 1 + kind % 7});
      if (testing::Test::HasFailure()) FAIL() << "further problems are left out";
    }
}

TEST(WeightPass, RandomProblems_EqualTheReference) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed);
    const auto one_of = [&](std::initializer_list<int64_t> choices) {
      return choices.begin()[random() % choices.size()];
    };
    const int64_t num_kv_heads = one_of({1, 1, 2, 3});
    const Extents e{one_of({0, 1, 1, 2}),
                    num_kv_heads * one_of({1, 1, 2, 3, 8, 17}),
                    num_kv_heads,
                    one_of({0, 1, 2, 5, 16, 33, 70}),
                    one_of({0, 1, 4, 17, 127, 129, 300}),
                    one_of({0, 1, 8, 19}),
                    one_of({0, 1, 8, 19})};
    const DType types[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
    Problem p = make_problem(e, types[seed % 4], random);
    add_random_options(p, random);
    p.add_text("seed", std::to_string(seed));
    expect_forms(p, {some_rows(e.n_q, random), one_of({0, 1, 2, 7, 16, 17, 64, 65, 400})},
                 seed % 3 ? Layout::contiguous : Layout::padded);
    if (testing::Test::HasFailure()) FAIL() << "further problems are left out";
  }
}

// Large enough that several threads, key chunks and row blocks take part.
const Extents kLarge[] = {{1, 8, 2, 150, 1100, 64, 64},
                          {1, 3, 3, 700, 1030, 16, 16},
                          {1, 2, 1, 3, 9000, 64, 64},
                          {2, 12, 1, 30, 600, 32, 32}};

TEST(WeightPass, AnyNumberOfThreads_SameBits) {
  for (const Extents& e : kLarge)
    for (const DType dtype : {DType::f32, DType::f64, DType::bf16}) {
      std::mt19937_64 random(5);
      Problem p = make_problem(e, dtype, random);
      add_random_options(p, random);
      const Asked asked{some_rows(e.n_q, random), 8, true};
      AttentionOptions o = p.options;
      o.num_threads = 1;
      const Forms one = run_forms(p, o, asked);
      Asked no_out = asked;
      no_out.out = false;
      EXPECT_EQ(run_forms(p, o, no_out).bits(), one.bits()) << "without out, " << p.text;
      for (const int num_threads : {2, 3, 7}) {
        o.num_threads = num_threads;
        const Forms many = run_forms(p, o, asked);
        EXPECT_EQ(many.bits(), one.bits()) << num_threads << " threads, " << p.text;
        EXPECT_EQ(many.out.bits(), one.out.bits()) << num_threads << " threads, " << p.text;
      }
    }
}

TEST(WeightPass, AloneOrInsideABatch_SameBits) {
  for (const int64_t n_q : {1, 9, 200}) {
    std::mt19937_64 random(7);
    const Extents e{3, 4, 2, n_q, 530, 20, 24};
    Problem p = make_problem(e, DType::f32, random);
    p.options.mask = Mask::causal_bottom_right();
    const Asked asked{some_rows(n_q, random), 5};
    const Forms all = run_forms(p, p.options, asked);
    for (int64_t b = 0; b < e.batch; ++b) {
      const auto entry = [&](const TestTensor& t) {
        const std::vector<double> values = t.values();
        const size_t n = values.size() / static_cast<size_t>(e.batch);
        return std::vector<double>(values.begin() + static_cast<int64_t>(n) * b,
                                   values.begin() + static_cast<int64_t>(n) * (b + 1));
      };
      Problem alone = make_problem({1, 4, 2, n_q, 530, 20, 24}, DType::f32, random);
      alone.q = TestTensor(DType::f32, {1, 4, n_q, 20}, entry(p.q));
      alone.k = TestTensor(DType::f32, {1, 2, 530, 20}, entry(p.k));
      alone.v = TestTensor(DType::f32, {1, 2, 530, 24}, entry(p.v));
      const Forms one = run_forms(alone, p.options, asked);
      EXPECT_EQ(one.mean.values(), entry(all.mean)) << n_q;
      EXPECT_EQ(one.rows.values(), entry(all.rows)) << n_q;
      EXPECT_EQ(one.top.values(), entry(all.top)) << n_q;
      EXPECT_EQ(one.top_keys.values(), entry(all.top_keys)) << n_q;
      EXPECT_EQ(one.sums.values(), entry(all.sums)) << n_q;
      EXPECT_EQ(one.entropy.values(), entry(all.entropy)) << n_q;
    }
  }
}

TEST(WeightPass, NanAndInfInHiddenKeys_ChangeNoBit) {
  for (const int64_t n_q : {2, 45})
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
      std::mt19937_64 random(11);
      Problem p = make_problem({2, 4, 2, n_q, 150, 8, 8}, DType::f32, random);
      const std::vector<int64_t> lengths = {100, 37};
      p.options.mask = Mask::lengths(lengths);
      const Asked asked{some_rows(n_q, random), 120, true};
      const Forms clean = run_forms(p, p.options, asked);
      for (int64_t b = 0; b < 2; ++b)
        for (int64_t h = 0; h < 2; ++h)
          for (int64_t j = lengths[static_cast<size_t>(b)]; j < 150; ++j)
            for (int64_t d = 0; d < 8; ++d) p.k.set(b, h, j, d, bad), p.v.set(b, h, j, d, bad);
      const Forms dirty = run_forms(p, p.options, asked);
      EXPECT_EQ(dirty.bits(), clean.bits());
      EXPECT_EQ(dirty.out.bits(), clean.out.bits());
    }
}

TEST(WeightPass, NanInAVisibleKey_ReachesItsRows) {
  for (const int64_t n_q : {3, 40}) {
    std::mt19937_64 random(12);
    Problem p = make_problem({1, 1, 1, n_q, n_q, 4, 4}, DType::f32, random);
    p.options.mask = Mask::causal_top_left();
    p.k.set(0, 0, 1, 2, std::numeric_limits<double>::quiet_NaN());
    const Forms f = run_forms(p, p.options, {{0, 1}, 2});
    EXPECT_EQ(f.entropy.values()[0], 0);
    EXPECT_TRUE(std::isnan(f.entropy.values()[1]));
    EXPECT_EQ(f.top.get(0, 0, 0, 0), 1);
    EXPECT_EQ(f.top_keys.get(0, 0, 0, 1), -1);
    EXPECT_TRUE(std::isnan(f.top.get(0, 0, 2, 0)) && std::isnan(f.top.get(0, 0, 2, 1)));
    EXPECT_EQ(f.top_keys.get(0, 0, 2, 0), 0);
    EXPECT_EQ(f.top_keys.get(0, 0, 2, 1), 1);
    EXPECT_TRUE(std::isnan(f.sums.values()[0]));
  }
}

// Equal scores: every weight is the same, so keys come in rising order.
TEST(WeightPass, EqualWeights_ComeByRisingKey) {
  for (const int64_t n_q : {1, 50}) {
    std::mt19937_64 random(13);
    Problem p = make_problem({1, 2, 1, n_q, 300, 8, 8}, DType::f32, random);
    p.q.fill(0);
    const Forms f = run_forms(p, p.options, {{}, 10});
    for (int64_t i = 0; i < n_q; ++i)
      for (int64_t n = 0; n < 10; ++n) EXPECT_EQ(f.top_keys.get(0, 1, i, n), n);
    expect_forms(p, {{0}, 10});
  }
}

// Where the mean is not wanted nothing has n_q x n_kv elements, and the scratch is what plan() says.
TEST(WeightPass, Memory_IsWhatPlanSays) {
  constexpr int64_t kN = 3000, kHeads = 2, kDim = 16, kRows = 2, kTop = 4;
  const std::vector<float> x(kHeads * kN * kDim, 0.5f);
  const std::vector<int64_t> rows = {7, kN - 1};
  std::vector<float> out(kHeads * kN * kDim), row_weights(kHeads * kRows * kN),
      top(kHeads * kN * kTop), sums(kHeads * kN), entropy(kHeads * kN);
  std::vector<int64_t> keys(kHeads * kN * kTop);
  const ConstTensor t(x.data(), {1, kHeads, kN, kDim});
  const AttentionOutputs outputs = {
      .out = Tensor(out.data(), {1, kHeads, kN, kDim}),
      .weight_rows = ConstTensor(rows.data(), {kRows}),
      .row_weights = Tensor(row_weights.data(), {1, kHeads, kRows, kN}),
      .top_weights = Tensor(top.data(), {1, kHeads, kN, kTop}),
      .top_keys = Tensor(keys.data(), {1, kHeads, kN, kTop}),
      .column_sums = Tensor(sums.data(), {1, kHeads, kN}),
      .entropy = Tensor(entropy.data(), {1, kHeads, kN})};
  AttentionOptions options;
  options.num_threads = 1;
  Shape p;
  p.num_heads = p.num_kv_heads = kHeads, p.n_q = p.n_kv = kN;
  p.head_dim_qk = p.head_dim_v = kDim;
  p.want_row_weights = p.want_column_sums = true;
  const int64_t announced = plan(p, options).scratch_bytes;
  int64_t peak = 0;
  {
    const test::PeakMemory watch;
    std::thread([&] {
      attention(t, t, t, outputs, options);
    }).join();  // no scratch kept from before
    peak = watch.peak_bytes();
  }
  EXPECT_LT(announced, kN * kN);  // bytes: a quarter of one head's weights
  EXPECT_LT(peak, announced + (int64_t{64} << 10));
  EXPECT_GT(peak, announced - (int64_t{16} << 10));
  EXPECT_EQ(sums[0], sums[kN]);
  EXPECT_EQ(keys[5], 1);
}

}  // namespace
}  // namespace qkv

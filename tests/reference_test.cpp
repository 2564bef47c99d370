// SPDX-License-Identifier: Apache-2.0
// The reference itself: values that can be worked out by hand, and gradients against differences of
// the forward. golden_test compares it with an independent implementation.
#include "reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "philox.h"
#include "support/bounds.h"
#include "support/problems.h"

namespace qkv {
namespace {

using test::Extents;
using test::TestTensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();

void expect_values(const std::vector<double>& got, const std::vector<double>& want) {
  EXPECT_TRUE(test::within("values", got, want,
                           [&](size_t e) { return 8 * kEpsilon * std::abs(want[e]); }));
}

// One query, keys with these scores (head_dim_qk 1, scale 1), values 1, 2, 4, ...
struct OneRow {
  TestTensor q, k, v;
  explicit OneRow(std::vector<double> scores)
      : q(DType::f64, {1, 1, 1, 1}),
        k(DType::f64, {1, 1, static_cast<int64_t>(scores.size()), 1}, scores),
        v(DType::f64, {1, 1, static_cast<int64_t>(scores.size()), 1}) {
    q.fill(1);
    for (size_t j = 0; j < scores.size(); ++j)
      v.set(0, 0, static_cast<int64_t>(j), 0, std::ldexp(1, static_cast<int>(j)));
  }
  reference::Forward run(AttentionOptions options = {}) const {
    if (!options.scale) options.scale = 1;
    return reference::forward(q, k, v, options);
  }
};

// Two scores that make the weights 1/3 and 2/3.
const double kLog2 = std::log(2);

TEST(Reference, TwoKeys_ByHand) {
  const auto r = OneRow({0, kLog2}).run();
  expect_values(r.weights, {1.0 / 3, 2.0 / 3});
  expect_values(r.out, {5.0 / 3});
  expect_values(r.lse, {std::log(3)});
}

TEST(Reference, DefaultScale_IsOneOverRootOfTheHeadDim) {
  TestTensor q(DType::f64, {1, 1, 1, 4}), k(DType::f64, {1, 1, 2, 4}), v(DType::f64, {1, 1, 2, 1});
  q.fill(1), k.fill(0), v.fill(0);
  for (int64_t d = 0; d < 4; ++d) k.set(0, 0, 1, d, kLog2 / 2);  // q.k = 2 log 2, scaled by 1/2
  expect_values(reference::forward(q, k, v).weights, {1.0 / 3, 2.0 / 3});
}

TEST(Reference, OrderOfAScore_ScaleSoftcapBiasAlibi) {
  const double softcap = 1.5, slope = 0.25, bias[2] = {0.5, -0.75}, scale = -2;
  AttentionOptions o{.bias = ConstTensor(bias, {1, 2}), .scale = scale, .softcap = softcap};
  o.alibi_slopes = ConstTensor(&slope, {1});
  const double raw[2] = {0.3, -0.8};
  const auto r = OneRow({raw[0], raw[1]}).run(o);
  double s[2];
  for (int j = 0; j < 2; ++j)  // the query stands at position 1
    s[j] = softcap * std::tanh(scale * raw[j] / softcap) + bias[j] - slope * (1 - j);
  const double l = std::exp(s[0]) + std::exp(s[1]);
  expect_values(r.weights, {std::exp(s[0]) / l, std::exp(s[1]) / l});
  expect_values(r.lse, {std::log(l)});
}

TEST(Reference, Sink_JoinsTheDenominatorOnly) {
  const double sink = std::log(3);
  const auto r = OneRow({0, kLog2}).run({.sinks = ConstTensor(&sink, {1})});
  expect_values(r.weights, {1.0 / 6, 2.0 / 6});
  expect_values(r.out, {5.0 / 6});
  expect_values(r.lse, {std::log(6)});
}

TEST(Reference, AdditiveMask_IsABiasAndHides) {
  const double additive[3] = {kLog2, -kInf, 0};
  const auto r = OneRow({0, kNan, 0}).run({.mask = Mask::dense(ConstTensor(additive, {1, 3}))});
  expect_values(r.weights, {2.0 / 3, 0, 1.0 / 3});
  const auto as_bias = OneRow({0, kNan, 0}).run({.bias = ConstTensor(additive, {1, 3})});
  EXPECT_EQ(r.weights, as_bias.weights);
  EXPECT_EQ(r.out, as_bias.out);
}

TEST(Reference, RowWithoutKeys_IsZeroAndFoundFromTheMask) {
  const bool hidden[2] = {};
  const double sink = 1.25;
  const Mask mask = Mask::dense(ConstTensor(hidden, {1, 2}));
  auto r = OneRow({kNan, kInf}).run({.mask = mask});
  EXPECT_EQ(r.weights, (std::vector<double>{0, 0}));
  EXPECT_EQ(r.out, (std::vector<double>{0}));
  EXPECT_EQ(r.lse, (std::vector<double>{-kInf}));
  r = OneRow({kNan, kInf}).run({.mask = mask, .sinks = ConstTensor(&sink, {1})});
  EXPECT_EQ(r.out, (std::vector<double>{0}));
  EXPECT_EQ(r.lse, (std::vector<double>{sink}));
  r = OneRow({kNan, 0}).run();  // visible: it is no empty row, it is NaN
  EXPECT_TRUE(std::isnan(r.out[0]));
}

TEST(Reference, Dropout_KeepsTheWeightsAndScalesTheSurvivors) {
  const int64_t n = 64;
  OneRow row(std::vector<double>(n, 0.0));
  row.v.fill(1);
  const AttentionOptions o{.dropout = 0.25, .seed = 11};
  const auto r = row.run(o);
  expect_values(r.weights, std::vector<double>(n, 1.0 / n));
  int64_t kept = 0;
  for (int64_t j = 0; j < n; ++j) kept += dropout_word(11, 0, 0, j) >= dropout_threshold(0.25);
  EXPECT_GT(kept, 0);
  EXPECT_LT(kept, n);
  expect_values(r.out, {static_cast<double>(kept) / n / 0.75});
  EXPECT_EQ(row.run({.dropout = 1}).out, (std::vector<double>{0}));
  EXPECT_EQ(row.run({.dropout = 0, .seed = 5}).out, row.run().out);
}

TEST(Reference, GroupedHeads_ReadTheirKvHead) {
  std::mt19937_64 random(3);
  const Extents grouped{2, 6, 2, 3, 5, 4, 3};
  Extents expanded = grouped;
  expanded.num_kv_heads = 6;
  test::Problem a = make_problem(grouped, DType::f64, random),
                b = make_problem(expanded, DType::f64, random);
  for (int64_t e = 0; e < 2; ++e)
    for (int64_t h = 0; h < 6; ++h)
      for (int64_t j = 0; j < 5; ++j) {
        for (int64_t d = 0; d < 4; ++d) b.k.set(e, h, j, d, a.k.get(e, h / 3, j, d));
        for (int64_t d = 0; d < 3; ++d) b.v.set(e, h, j, d, a.v.get(e, h / 3, j, d));
      }
  EXPECT_EQ(reference::forward(a.q, a.k, a.v).out, reference::forward(a.q, b.k, b.v).out);
}

TEST(Reference, LayoutAndElementType_DoNotChangeTheValues) {
  const Extents e{1, 2, 2, 3, 4, 5, 2};
  for (DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    std::mt19937_64 random(4);
    const test::Problem plain = make_problem(e, dtype, random);
    const auto want = reference::forward(plain.q, plain.k, plain.v);
    for (test::Layout layout :
         {test::Layout::bshd, test::Layout::fused, test::Layout::padded, test::Layout::reversed}) {
      const TestTensor q(dtype, {1, 2, 3, 5}, plain.q.values(), layout);
      const TestTensor k(dtype, {1, 2, 4, 5}, plain.k.values(), layout);
      const TestTensor v(dtype, {1, 2, 4, 2}, plain.v.values(), layout);
      EXPECT_EQ(reference::forward(q, k, v).out, want.out);
    }
    const TestTensor q(DType::f64, {1, 2, 3, 5}, plain.q.values());
    EXPECT_EQ(reference::forward(q, plain.k, plain.v).out, want.out);
  }
}

// The loss whose gradient backward() gives.
double loss(const test::Problem& p, const AttentionOptions& o, const TestTensor& dout,
            const TestTensor& dlse) {
  const auto r = reference::forward(p.q, p.k, p.v, o);
  const auto d = dout.values(), dl = dlse.values();
  double sum = 0;
  for (size_t e = 0; e < d.size(); ++e) sum += d[e] * r.out[e];
  for (size_t e = 0; e < dl.size(); ++e)
    if (std::isfinite(r.lse[e])) sum += dl[e] * r.lse[e];
  return sum;
}

// Central differences with steps h and h / 2, extrapolated; their distance bounds the error of the
// better one.
template <class Evaluate>
void expect_derivative(double got, const std::string& what, Evaluate loss_at) {
  const double h = 1.0 / 512;
  double magnitude = 1;
  auto difference = [&](double step) {
    const double up = loss_at(step), down = loss_at(-step);
    magnitude = std::max({magnitude, std::abs(up), std::abs(down)});
    return (up - down) / (2 * step);
  };
  const double coarse = difference(h), fine = difference(h / 2);
  const double want = (4 * fine - coarse) / 3;
  const double allowed = std::abs(fine - coarse) / 4 + 64 * kEpsilon * magnitude / h;
  EXPECT_NEAR(got, want, allowed) << what;
}

void expect_gradients(test::Problem& p, std::mt19937_64& random) {
  const Extents& e = p.extents;
  TestTensor dout(DType::f64, {e.batch, e.num_heads, e.n_q, e.head_dim_v}),
      dlse(DType::f64, {e.batch, e.num_heads, e.n_q});
  dout.fill_random(random);
  dlse.fill_random(random);
  const auto g = reference::backward(p.q, p.k, p.v, dout, dlse, p.options);
  auto expect_all = [&](const char* name, const TestTensor& x,
                        const std::vector<double>& gradient) {
    size_t index = 0;
    test::for_each_offset(x.view(), [&](int64_t at) {
      const double value = element(x.view(), at);
      if (std::isfinite(value))
        expect_derivative(gradient[index], p.text + ": " + name + " " + std::to_string(index),
                          [&](double step) {
                            test::set_element(x.view(), at, value + step);
                            const double result = loss(p, p.options, dout, dlse);
                            test::set_element(x.view(), at, value);
                            return result;
                          });
      ++index;
    });
  };
  expect_all("dq", p.q, g.dq);
  expect_all("dk", p.k, g.dk);
  expect_all("dv", p.v, g.dv);
  if (p.bias && p.bias.view().dtype == DType::f64) expect_all("dbias", p.bias, g.dbias);
  if (p.sinks) expect_all("dsinks", p.sinks, g.dsinks);
  if (p.alibi_slopes) expect_all("dalibi_slopes", p.alibi_slopes, g.dalibi_slopes);
  const double scale = p.options.scale.value_or(1 / std::sqrt(static_cast<double>(e.head_dim_qk)));
  expect_derivative(g.dscale, p.text + ": dscale", [&](double step) {
    AttentionOptions o = p.options;
    o.scale = scale + step;
    return loss(p, o, dout, dlse);
  });
}

TEST(Reference, Gradients_EqualDifferencesOfTheForward) {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed);
    auto pick = [&](int64_t n) {
      return 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(n));
    };
    const int64_t num_kv_heads = pick(2);
    const Extents e{pick(2), num_kv_heads * pick(2), num_kv_heads, pick(4), pick(4), pick(3),
                    pick(3)};
    test::Problem p = make_problem(e, DType::f64, random);
    add_random_options(p, random);
    expect_gradients(p, random);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Reference, Gradients_OfHiddenNanAreZero) {
  const Extents e{1, 2, 1, 3, 4, 2, 2};
  std::mt19937_64 random(7);
  test::Problem p = make_problem(e, DType::f64, random);
  const int64_t lengths[] = {2};
  p.options.mask = Mask::lengths(lengths) & Mask::causal_top_left();
  for (int64_t j : {2, 3})
    for (int64_t d : {0, 1}) p.k.set(0, 0, j, d, kNan), p.v.set(0, 0, j, d, kInf);
  TestTensor dout(DType::f64, {1, 2, 3, 2});
  dout.fill_random(random);
  const auto g = reference::backward(p.q, p.k, p.v, dout, {}, p.options);
  for (const auto* gradient : {&g.dq, &g.dk, &g.dv})
    for (double x : *gradient) EXPECT_TRUE(std::isfinite(x));
  for (size_t hidden = 4; hidden < 8; ++hidden) {
    EXPECT_EQ(g.dk[hidden], 0);
    EXPECT_EQ(g.dv[hidden], 0);
  }
}

}  // namespace
}  // namespace qkv

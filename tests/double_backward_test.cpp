// SPDX-License-Identifier: Apache-2.0
// attention_double_backward() against finite differences of the backward, in double, for every
// option.
#include <gtest/gtest.h>

#include <functional>

#include "qkv/attention.h"
#include "support/run_backward.h"

namespace qkv {
namespace {

using namespace test;  // NOLINT: every helper of this file is from there
using test::Problem;

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t x = 0; x < a.size(); ++x) sum += a[x] * b[x];
  return sum;
}

TEST(DoubleBackward, EveryOption_EqualsFiniteDifferencesOfTheBackward) {
  std::mt19937_64 random(1);
  const std::pair<const char*, std::function<void(Problem&)>> cases[] = {
      {"plain", [](Problem&) {}},
      {"causal", [](Problem& p) { p.options.mask = Mask::causal_bottom_right(); }},
      {"empty rows",
       [](Problem& p) {
         p.options.mask = Mask::lengths(std::array<int64_t, 2>{0, 5});
       }},
      {"softcap", [](Problem& p) { p.options.softcap = 1.5, p.options.scale = -0.6; }},
      {"dropout", [](Problem& p) { p.options.dropout = 0.4, p.options.seed = 5; }},
      {"everything",
       [&](Problem& p) {
         p.options.mask = p.masks->make(MaskKind::dense_additive);
         p.options.softcap = 2, p.options.dropout = 0.3;
         p.bias = TestTensor(DType::f64, {1, 4, 4, 6});
         p.sinks = TestTensor(DType::f64, {4});
         p.alibi_slopes = TestTensor(DType::f64, {4});
         p.options.bias = p.bias.fill_random(random);
         p.options.sinks = p.sinks.fill_random(random);
         p.options.alibi_slopes = p.alibi_slopes.fill_random(random, 0.2);
       }},
  };
  for (const auto& item : cases) {
    const Extents e{2, 4, 2, 4, 6, 5, 3};
    Problem p = make_problem(e, DType::f64, random);
    item.second(p);
    TestTensor dout(DType::f64, {2, 4, 4, 3}), ddq(DType::f64, {2, 4, 4, 5}),
        ddk(DType::f64, {2, 2, 6, 5}), ddv(DType::f64, {2, 2, 6, 3});
    for (TestTensor* t : {&dout, &ddq, &ddk, &ddv}) t->fill_random(random);
    TestTensor dq(DType::f64, {2, 4, 4, 5}, Layout::bshd), dk(DType::f64, {2, 2, 6, 5}),
        dv(DType::f64, {2, 2, 6, 3}), ddout(DType::f64, {2, 4, 4, 3});
    attention_double_backward(
        {.q = p.q, .k = p.k, .v = p.v, .dout = dout, .ddq = ddq, .ddk = ddk, .ddv = ddv},
        {.dq = dq.view(), .dk = dk.view(), .dv = dv.view(), .ddout = ddout.view()}, p.options);

    // The loss whose gradient that is, through the kernels.
    const auto loss = [&] {
      BackwardProblem b{&p, {}, {}, {}, {}};
      b.out = TestTensor(DType::f64, {2, 4, 4, 3});
      b.lse = TestTensor(DType::f64, {2, 4, 4});
      b.dout = TestTensor(DType::f64, {2, 4, 4, 3}, dout.values());
      attention(p.q, p.k, p.v, {.out = b.out.view(), .lse = b.lse.view()}, p.options);
      const Gradients g = run_backward(b, p.options);
      return dot(ddq.values(), g.dq.values()) + dot(ddk.values(), g.dk.values()) +
             dot(ddv.values(), g.dv.values());
    };
    const auto check = [&](const char* what, const TestTensor& input, const TestTensor& gradient) {
      const std::vector<double> got = gradient.values();
      size_t next = 0;
      for_each_offset(input.view(), [&](int64_t at) {
        const double x = element(input.view(), at), h = 1e-3;
        const auto f = [&](double step) {
          set_element(input.view(), at, x + step);
          return loss();
        };
        const double want = (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h);
        set_element(input.view(), at, x);
        EXPECT_NEAR(got[next], want, 1e-8 * std::max(1.0, std::abs(want)))
            << what << " element " << next << ", " << item.first;
        ++next;
      });
    };
    check("dq", p.q, dq);
    check("dk", p.k, dk);
    check("dv", p.v, dv);
    check("ddout", dout, ddout);
    ASSERT_FALSE(HasFailure());
  }
}

TEST(DoubleBackward, AbsentGradients_AreZero) {
  std::mt19937_64 random(2);
  Problem p = make_problem({1, 2, 1, 3, 4, 5, 6}, DType::f32, random);
  TestTensor dout(DType::f32, {1, 2, 3, 6}), ddq(DType::f32, {1, 2, 3, 5}),
      zero_k(DType::f32, {1, 1, 4, 5}), zero_v(DType::f32, {1, 1, 4, 6});
  dout.fill_random(random), ddq.fill_random(random), zero_k.fill(0), zero_v.fill(0);
  TestTensor a(DType::f32, {1, 2, 3, 6}), b(DType::f32, {1, 2, 3, 6});
  attention_double_backward({.q = p.q, .k = p.k, .v = p.v, .dout = dout, .ddq = ddq},
                            {.ddout = a.view()}, p.options);
  attention_double_backward(
      {.q = p.q, .k = p.k, .v = p.v, .dout = dout, .ddq = ddq, .ddk = zero_k, .ddv = zero_v},
      {.ddout = b.view()}, p.options);
  EXPECT_EQ(a.bits(), b.bits());
}

TEST(DoubleBackward, BadArguments_AreNamed) {
  std::mt19937_64 random(3);
  Problem p = make_problem({1, 2, 1, 3, 4, 5, 6}, DType::f32, random);
  TestTensor dout(DType::f32, {1, 2, 3, 6}), wrong(DType::f32, {1, 2, 4, 5});
  try {
    attention_double_backward({.q = p.q, .k = p.k, .v = p.v, .dout = dout, .ddk = wrong}, {},
                              p.options);
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_STREQ(
        e.what(),
        "attention_double_backward: inputs.ddk needs shape [1, 1, 4, 5], got [1, 2, 4, 5]");
  }
}

}  // namespace
}  // namespace qkv

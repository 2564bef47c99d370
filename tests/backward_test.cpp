// SPDX-License-Identifier: Apache-2.0
// attention_backward() against the reference and against finite differences of it: borders of
// lanes, tiles and key blocks, every mask kind, option, element type and layout. What must not
// change a bit: backward_schedule_test.
#include "backward.h"

#include <gtest/gtest.h>

#include <functional>

#include "support/run_backward.h"

namespace qkv {
namespace {

using namespace test;  // NOLINT: every helper of this file is from there
using test::Problem;

const Layout kOutputLayouts[] = {Layout::contiguous, Layout::bshd, Layout::fused, Layout::padded,
                                 Layout::reversed};

void expect_stop() {
  if (testing::Test::HasFailure()) FAIL() << "further cases are left out";
}

TEST(Backward, RowsAndKeysAroundTileBorders_EqualTheReference) {
  std::mt19937_64 random(1);
  for (int64_t n_q : {0, 1, 15, 16, 17, 33, 65, 131})
    for (int64_t n_kv : {0, 1, 7, 8, 9, 127, 128, 129, 257})
      for (DType dtype : {DType::f32, DType::f64}) {
        const Mask masks[] = {Mask::full(), Mask::causal_bottom_right(), Mask::causal_top_left()};
        Problem p = make_problem({1, 2, 2, n_q, n_kv, 5, 6}, dtype, random);
        p.options.mask = masks[random() % 3];
        p.text += " " + p.options.mask.name();
        expect_reference_gradients(make_backward(p, random, true));
        ASSERT_NO_FATAL_FAILURE(expect_stop());
      }
}

TEST(Backward, HeadDimsAroundLaneBorders_EqualTheReference) {
  std::mt19937_64 random(2);
  for (int64_t head_dim_qk : {0, 1, 3, 15, 16, 17, 33, 64, 65})
    for (int64_t head_dim_v : {0, 1, 3, 15, 16, 17, 33, 64, 65})
      for (DType dtype : {DType::f32, DType::f64}) {
        Problem p = make_problem({1, 2, 1, 19, 11, head_dim_qk, head_dim_v}, dtype, random);
        expect_reference_gradients(make_backward(p, random, false));
        ASSERT_NO_FATAL_FAILURE(expect_stop());
      }
}

TEST(Backward, EveryMaskKindAndGroupSize_EqualsTheReference) {
  std::mt19937_64 random(3);
  for (int kind = 0; kind < kNumMaskKinds; ++kind)
    for (int64_t group_size : {1, 2, 5, 8}) {
      Problem p = make_problem({2, 2 * group_size, 2, 37, 150, 17, 20}, DType::f32, random);
      p.options.mask = p.masks->make(static_cast<MaskKind>(kind));
      p.text += " " + p.options.mask.name();
      expect_reference_gradients(make_backward(p, random, true));
      ASSERT_NO_FATAL_FAILURE(expect_stop());
    }
}

TEST(Backward, RandomProblems_EqualTheReference) {
  std::mt19937_64 random(4);
  const auto pick = [&](std::initializer_list<int64_t> from) {
    return *(from.begin() + static_cast<int64_t>(random() % from.size()));
  };
  for (int n = 0; n < 300; ++n) {
    const int64_t num_kv_heads = pick({1, 1, 2, 3});
    const Extents e{pick({1, 2, 3}),
                    num_kv_heads * pick({1, 1, 2, 3, 8}),
                    num_kv_heads,
                    pick({1, 2, 7, 16, 31, 33, 65}),
                    pick({1, 3, 15, 16, 17, 63, 127, 129, 150}),
                    pick({1, 3, 8, 15, 16, 17, 33, 64}),
                    pick({1, 4, 7, 16, 31, 40})};
    const DType types[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
    const DType dtype = types[random() % 4];
    const DType dtype_kv = dtype == DType::f64 || random() % 2 ? dtype : DType::bf16;
    const auto layout = [&] { return kLayouts[random() % kLayouts.size()]; };
    const Guard guard = random() % 2 ? Guard::before : Guard::behind;
    Problem p = make_problem(e, dtype, random, dtype_kv, layout(), guard);
    add_random_options(p, random);
    p.text += " case " + std::to_string(n);
    expect_reference_gradients(make_backward(p, random, random() % 2 == 0, layout(), guard),
                               kOutputLayouts[random() % 5]);
    ASSERT_NO_FATAL_FAILURE(expect_stop());
  }
}

// The loss whose gradient attention_backward() is, in double.
double loss(const Problem& p, const AttentionOptions& options, const std::vector<double>& dout,
            const std::vector<double>& dlse) {
  const Extents& e = p.extents;
  TestTensor out(DType::f64, {e.batch, e.num_heads, e.n_q, e.head_dim_v});
  TestTensor lse(DType::f64, {e.batch, e.num_heads, e.n_q});
  attention(p.q, p.k, p.v, {.out = out.view(), .lse = lse.view()}, options);
  double sum = 0;
  const std::vector<double> o = out.values(), l = lse.values();
  for (size_t x = 0; x < o.size(); ++x) sum += o[x] * dout[x];
  for (size_t x = 0; x < l.size(); ++x)
    if (std::isfinite(l[x])) sum += l[x] * dlse[x];
  return sum;
}

// Central differences of fourth order, error about 1e-10 for values of this size.
double slope(const std::function<double(double)>& f, double x) {
  const double h = 1e-3;
  return (8 * (f(x + h) - f(x - h)) - (f(x + 2 * h) - f(x - 2 * h))) / (12 * h);
}

TEST(Backward, EveryOption_EqualsFiniteDifferences) {
  std::mt19937_64 random(5);
  const std::pair<const char*, std::function<void(Problem&)>> cases[] = {
      {"plain", [](Problem&) {}},
      {"causal", [](Problem& p) { p.options.mask = Mask::causal_bottom_right(); }},
      {"window and scattered documents",
       [](Problem& p) {
         p.options.mask = Mask::window(4, 2) & p.masks->make(MaskKind::scattered_documents);
       }},
      {"dense", [](Problem& p) { p.options.mask = p.masks->make(MaskKind::dense_additive); }},
      {"scale", [](Problem& p) { p.options.scale = -0.7; }},
      {"scale 0", [](Problem& p) { p.options.scale = 0.0; }},
      {"softcap", [](Problem& p) { p.options.softcap = 1.5; }},
      {"dropout", [](Problem& p) { p.options.dropout = 0.4, p.options.seed = 77; }},
      {"everything",
       [](Problem& p) {
         p.options.mask = Mask::causal_bottom_right() & p.masks->make(MaskKind::dense_bool);
         p.options.scale = 0.6, p.options.softcap = 2.5;
         p.options.dropout = 0.25, p.options.seed = 3;
       }},
  };
  for (const auto& item : cases)
    for (int bias_kind = 0; bias_kind < 5; ++bias_kind) {
      Problem p = make_problem({2, 4, 2, 5, 9, 6, 7}, DType::f64, random);
      item.second(p);
      const std::vector<int64_t> bias_shapes[] = {
          {2, 4, 5, 9}, {1, 4, 1, 9}, {5, 9}, {2, 1, 5, 1}, {2, 5, 9}};
      p.bias = TestTensor(DType::f64, bias_shapes[bias_kind]);
      p.sinks = TestTensor(DType::f64, {4});
      p.alibi_slopes = TestTensor(DType::f64, {4});
      p.options.bias = p.bias.fill_random(random);
      p.options.sinks = p.sinks.fill_random(random);
      p.options.alibi_slopes = p.alibi_slopes.fill_random(random, 0.2);
      const BackwardProblem b = make_backward(p, random, true);
      const Gradients g = run_backward(b, p.options);
      const std::vector<double> dout = b.dout.values(), dlse = b.dlse.values();
      const auto check = [&](const char* what, const TestTensor& input,
                             const TestTensor& gradient) {
        const std::vector<double> got = gradient.values();
        size_t next = 0;
        for_each_offset(input.view(), [&](int64_t at) {
          const double x = element(input.view(), at);
          const double want = slope(
              [&](double value) {
                set_element(input.view(), at, value);
                return loss(p, p.options, dout, dlse);
              },
              x);
          set_element(input.view(), at, x);
          EXPECT_NEAR(got[next], want, 1e-9 * std::max(1.0, std::abs(want)))
              << what << " element " << next << ", " << item.first << ", bias " << bias_kind;
          ++next;
        });
      };
      check("dq", p.q, g.dq);
      check("dk", p.k, g.dk);
      check("dv", p.v, g.dv);
      check("dbias", p.bias, g.dbias);
      check("dsinks", p.sinks, g.dsinks);
      check("dalibi_slopes", p.alibi_slopes, g.dalibi_slopes);
      const double scale = p.options.scale.value_or(1 / std::sqrt(6.0));
      const double dscale = slope(
          [&](double x) {
            AttentionOptions o = p.options;
            o.scale = x;
            return loss(p, o, dout, dlse);
          },
          scale);
      EXPECT_NEAR(g.dscale.values()[0], dscale, 1e-9 * std::max(1.0, std::abs(dscale)))
          << item.first;
      ASSERT_NO_FATAL_FAILURE(expect_stop());
    }
}

TEST(Backward, RowsAndKeysThatSeeNothing_HaveZeroGradients) {
  std::mt19937_64 random(6);
  Problem p = make_problem({2, 4, 2, 40, 33, 16, 16}, DType::f32, random);
  const std::vector<int64_t> lengths = {0, 20};
  p.options.mask = Mask::lengths(lengths);
  const BackwardProblem b = make_backward(p, random, true);
  const Gradients g = run_backward(b, p.options);
  for (int64_t h = 0; h < 4; ++h)
    for (int64_t i = 0; i < 40; ++i)
      for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(g.dq.get(0, h, i, d), 0);
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t j = 0; j < 33; ++j)
      for (int64_t d = 0; d < 16; ++d) {
        EXPECT_EQ(g.dk.get(0, h, j, d), 0);
        EXPECT_EQ(g.dv.get(0, h, j, d), 0);
        EXPECT_EQ(g.dk.get(1, h, j, d) == 0, j >= 20);
        EXPECT_EQ(g.dv.get(1, h, j, d) == 0, j >= 20);
      }
}

// Every element of a row.
void poison(const TestTensor& t, int64_t b, int64_t h, int64_t i, double x) {
  for (int64_t d = 0; d < t.view().shape[3]; ++d)
    test::set_element(t.view(), t.offset(b, h, i, d), x);
}

TEST(Backward, NanInHiddenPlaces_ReachesNoGradient) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed);
    const Extents e{2, 4, 2, seed % 2 ? int64_t{19} : int64_t{70}, 150, 17, 20};
    Problem p = make_problem(e, seed % 3 ? DType::f32 : DType::bf16, random);
    const MaskShape shape = e.mask_shape();
    AttentionOptions& o = p.options;
    o.mask = p.masks->make(static_cast<MaskKind>(seed % kNumMaskKinds));
    if (seed % 4 == 1) o.dropout = 0.3;
    if (seed % 4 == 2) o.softcap = 3;
    if (seed % 5 == 1) {
      p.bias = TestTensor(DType::f32, {1, 4, e.n_q, e.n_kv});
      o.bias = p.bias.fill_random(random);
    }
    if (seed % 5 == 2) {
      p.sinks = TestTensor(DType::f32, {4});
      o.sinks = p.sinks.fill_random(random);
    }
    const auto sees = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
      return o.mask.visible(shape, b, h, i, j);
    };
    // Keys that no query of the group sees, and queries that see no key.
    std::vector<std::array<int64_t, 3>> keys, rows;
    for (int64_t b = 0; b < e.batch; ++b)
      for (int64_t h_kv = 0; h_kv < e.num_kv_heads; ++h_kv)
        for (int64_t j = 0; j < e.n_kv; ++j) {
          bool seen = false;
          for (int64_t h = 2 * h_kv; h < 2 * h_kv + 2; ++h)
            for (int64_t i = 0; i < e.n_q; ++i) seen = seen || sees(b, h, i, j);
          if (!seen) keys.push_back({b, h_kv, j});
        }
    for (int64_t b = 0; b < e.batch; ++b)
      for (int64_t h = 0; h < e.num_heads; ++h)
        for (int64_t i = 0; i < e.n_q; ++i) {
          bool any = false;
          for (int64_t j = 0; j < e.n_kv; ++j) any = any || sees(b, h, i, j);
          if (!any) rows.push_back({b, h, i});
        }
    const BackwardProblem b = make_backward(p, random, true);
    const auto clean = run_backward(b, o).bits();
    for (double x :
         {std::numeric_limits<double>::quiet_NaN(), -std::numeric_limits<double>::infinity()}) {
      for (const auto& [batch, h, j] : keys)
        poison(p.k, batch, h, j, x), poison(p.v, batch, h, j, x);
      for (const auto& [batch, h, i] : rows)
        poison(p.q, batch, h, i, x), poison(b.dout, batch, h, i, x);
      EXPECT_EQ(run_backward(b, o).bits(), clean)
          << p.text << " " << o.mask.name() << " seed " << seed << ", " << x << " in "
          << keys.size() << " keys and " << rows.size() << " rows";
      ASSERT_NO_FATAL_FAILURE(expect_stop());
    }
  }
}

// A query that some keys must not see it: what it holds reaches only the keys that it sees.
TEST(Backward, NanInAQuery_ReachesOnlyTheKeysItSees) {
  std::mt19937_64 random(8);
  for (const bool in_dout : {false, true}) {
    Problem p = make_problem({1, 1, 1, 50, 50, 16, 16}, DType::f32, random);
    p.options.mask = Mask::causal_top_left();
    BackwardProblem b = make_backward(p, random, false);
    poison(in_dout ? b.dout : p.q, 0, 0, 20, std::numeric_limits<double>::quiet_NaN());
    if (!in_dout) attention(p.q, p.k, p.v, {.out = b.out.view(), .lse = b.lse.view()}, p.options);
    const Gradients g = run_backward(b, p.options);
    for (int64_t j = 0; j < 50; ++j) {
      EXPECT_EQ(std::isnan(g.dk.get(0, 0, j, 3)), j <= 20) << j;
      EXPECT_EQ(std::isnan(g.dv.get(0, 0, j, 3)), j <= 20) << j;
      EXPECT_EQ(std::isnan(g.dq.get(0, 0, j, 3)), j == 20) << j;
    }
  }
}

TEST(Backward, BadArguments_AreNamedAndNothingIsWritten) {
  std::mt19937_64 random(9);
  Problem p = make_problem({2, 4, 2, 3, 5, 8, 6}, DType::f32, random);
  p.bias = TestTensor(DType::f32, {3, 5});
  p.options.bias = p.bias.fill_random(random);
  const BackwardProblem b = make_backward(p, random, true);
  TestTensor dq(DType::f32, {2, 4, 3, 8}), dk(DType::f32, {2, 2, 5, 8}), dbias(DType::f32, {3, 5});
  struct Call {
    BackwardInputs in;
    BackwardOutputs out;
    AttentionOptions options;
  };
  const std::pair<const char*, std::function<void(Call&)>> cases[] = {
      {"inputs.lse needs shape [2, 4, 3]", [](Call& c) { c.in.lse = {}; }},
      {"inputs.dout needs shape [2, 4, 3, 6], got [2, 4, 3, 5]",
       [](Call& c) { c.in.dout.shape[3] = 5; }},
      {"inputs.out must be f32", [](Call& c) { c.in.out.dtype = DType::bf16; }},
      {"the last axis of inputs.dout must be contiguous", [](Call& c) { c.in.dout.stride[3] = 0; }},
      {"inputs.dlse must be f32", [](Call& c) { c.in.dlse.dtype = DType::f64; }},
      {"outputs.dk needs shape [2, 2, 5, 8]", [](Call& c) { c.out.dk.shape[1] = 4; }},
      {"outputs.dq must be f32", [](Call& c) { c.out.dq.dtype = DType::f16; }},
      {"outputs.dq repeats elements", [](Call& c) { c.out.dq.stride[1] = 0; }},
      {"outputs.dbias needs the shape of the bias, got dbias [3, 4] and bias [3, 5]",
       [](Call& c) { c.out.dbias.shape[1] = 4; }},
      {"outputs.dbias is wanted but there is no bias", [](Call& c) { c.options.bias = {}; }},
      {"outputs.dsinks is wanted but there are no sinks",
       [&](Call& c) { c.out.dsinks = Tensor(static_cast<float*>(dbias.view().data), {4}); }},
      {"outputs.dalibi_slopes is wanted but there are no alibi_slopes",
       [&](Call& c) { c.out.dalibi_slopes = Tensor(static_cast<float*>(dbias.view().data), {4}); }},
      {"outputs.dscale needs one element of f32, got f32 [2]",
       [&](Call& c) { c.out.dscale = Tensor(static_cast<float*>(dbias.view().data), {2}); }},
      {"softcap must be", [](Call& c) { c.options.softcap = -1; }},
  };
  for (const auto& [text, spoil] : cases) {
    Call call{b.inputs(), {.dq = dq.view(), .dk = dk.view(), .dbias = dbias.view()}, p.options};
    spoil(call);
    std::string got;
    try {
      attention_backward(call.in, call.out, call.options);
    } catch (const Error& e) {
      got = e.what();
    }
    EXPECT_EQ(got.rfind("attention_backward: ", 0), 0u) << text;
    EXPECT_NE(got.find(text), std::string::npos) << "got: " << got << ", want: " << text;
    for (const TestTensor* t : {&dq, &dk, &dbias})
      for (double x : t->values()) ASSERT_TRUE(std::isnan(x)) << "written before: " << text;
  }
}

}  // namespace
}  // namespace qkv

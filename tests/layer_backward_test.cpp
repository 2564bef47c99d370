// SPDX-License-Identifier: Apache-2.0
// Tier: test. AttentionLayer's training: gradients against their definition in double, which is held
// against finite differences; bits under threads and batches; hidden rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/bounds.h"
#include "support/layer_gradients.h"

namespace qkv::test {
namespace {

void expect_definition(const LayerProblem& p) {
  SCOPED_TRACE(p.text());
  const TestTensor doutput = doutput_of(p);
  const std::vector<double> d = doutput.values();
  const AllLayerGradients want = PlainLayerBackward<double>(p, d, Loop::upwards).run();
  const AllLayerGradients up = PlainLayerBackward<float>(p, d, Loop::upwards).run(),
                          down = PlainLayerBackward<float>(p, d, Loop::downwards).run();
  const LayerResults got = layer_backward(AttentionLayer(p.weights), p, doutput);
  for (size_t i = 0; i < got.all.size(); ++i) {
    if (!got.all[i]) continue;
    const double error = std::max(max_error(up[i].values, want[i].values),
                                  max_error(down[i].values, want[i].values));
    EXPECT_TRUE(within_bound(kLayerGradientNames[i], DType::f32, got.all[i].values(),
                             want[i].values, error, up[i].magnitude));
  }
}

// All numbers whole multiples of 2^-12, so that steps of 2^-9 are exact in f32.
void round_all(LayerProblem* p) {
  const auto rounded = [](double x) { return std::round(x * 4096) / 4096; };
  LayerWeights& w = p->weights;
  for (std::vector<float>* x : {&w.fc_q_weight, &w.fc_q_bias, &w.fc_k_weight, &w.fc_k_bias,
                                &w.fc_v_weight, &w.fc_v_bias, &w.fc_o_weight, &w.fc_o_bias}) {
    for (float& value : *x) value = static_cast<float>(rounded(static_cast<double>(value)));
  }
  for (TestTensor* t : {&p->q, &p->k, &p->v}) {
    for_each_offset(
        *t, [&](int64_t at) { set_element(t->view(), at, rounded(element(t->view(), at))); });
  }
}

// Central differences of fourth order in double.
TEST(LayerBackward, Definition_EqualsFiniteDifferences) {
  std::vector<LayerProblem> problems;
  problems.emplace_back(LayerConfig::mha(2, 5, 4, 3, 2, 3, 6), 2, 3, 4);
  problems.emplace_back(LayerConfig::mqa(3, 5, 4, 2, 3, 2), 2, 4, 3);
  problems.back().options.mask = Mask::causal_bottom_right();  // row 0 sees nothing
  LayerConfig c = LayerConfig::gqa(4, 2, 3, 5, 2, 3, 4);
  c.softcap = 1.5, c.scale = 0.8, c.bias_q = c.bias_v = false;
  problems.emplace_back(c, 1, 3, 5);
  problems.back().options.mask = Mask::window(1, 1);
  for (LayerProblem& p : problems) {
    round_all(&p);
    const std::vector<double> doutput = doutput_of(p).values();
    const AllLayerGradients got = PlainLayerBackward<double>(p, doutput, Loop::upwards).run();
    const auto check = [&](size_t which, size_t at, double x,
                           const std::function<void(double)>& set) {
      const double h = std::ldexp(1.0, -9);
      const auto loss = [&](double value) {
        set(value);
        const std::vector<double> output = plain_layer<double>(p).output;
        double sum = 0;
        for (size_t e = 0; e < output.size(); ++e) sum += output[e] * doutput[e];
        return sum;
      };
      const double slope =
          (8 * (loss(x + h) - loss(x - h)) - (loss(x + 2 * h) - loss(x - 2 * h))) / (12 * h);
      set(x);
      EXPECT_NEAR(got[which].values[at], slope, 1e-9 * std::max(1.0, std::abs(slope)))
          << kLayerGradientNames[which] << " " << at << " " << p.text();
    };
    TestTensor* const inputs[] = {&p.q, &p.k, &p.v};
    for (size_t t = 0; t < 3; ++t) {
      size_t next = 0;
      for_each_offset(*inputs[t], [&](int64_t at) {
        check(t, next++, element(inputs[t]->view(), at),
              [&](double x) { set_element(inputs[t]->view(), at, x); });
      });
    }
    LayerWeights& w = p.weights;
    std::vector<float>* const parameters[] = {&w.fc_q_weight, &w.fc_q_bias,   &w.fc_k_weight,
                                              &w.fc_k_bias,   &w.fc_v_weight, &w.fc_v_bias,
                                              &w.fc_o_weight, &w.fc_o_bias};
    for (size_t t = 0; t < 8; ++t) {
      ASSERT_EQ(got[3 + t].values.size(), parameters[t]->size());
      for (size_t e = 0; e < parameters[t]->size(); ++e) {
        check(3 + t, e, static_cast<double>((*parameters[t])[e]),
              [&](double x) { (*parameters[t])[e] = static_cast<float>(x); });
      }
    }
  }
}

TEST(LayerBackward, LessonModules_EqualTheDefinition) { for_lesson_modules(expect_definition); }

TEST(LayerBackward, AllSizesDifferent_EqualsTheDefinition) {
  for_all_sizes_different(expect_definition);
}

TEST(LayerBackward, HeadWidths_EqualTheDefinition) { for_head_widths(expect_definition); }

// More rows than a chunk, more columns than a block.
TEST(LayerBackward, LongRows_EqualTheDefinition) {
  LayerProblem p(LayerConfig::mqa(5, 64, 48, 64, 32, 270), 2, 300, 140);
  p.options.mask = Mask::causal_bottom_right();
  expect_definition(p);
}

TEST(LayerBackward, EachBiasAbsent_EqualsTheDefinition) { for_each_bias_absent(expect_definition); }

TEST(LayerBackward, ScaleSoftcapAndAdditiveMask_EqualTheDefinition) {
  LayerConfig c = odd_gqa();
  c.scale = 0.7, c.softcap = 1.5;
  LayerProblem p(c, 2, 5, 7);
  TestTensor mask(DType::f32, {2, 5, 7});
  std::mt19937_64 random(5);
  mask.fill_random(random);
  set_element(mask.view(), mask.offset(0, 1, 2), -std::numeric_limits<double>::infinity());
  p.options.bias = mask;
  expect_definition(p);
}

// Row 1 of entry 0 sees nothing, and nothing sees key 4 of entry 1, which may hold anything.
TEST(LayerBackward, RowsAndKeysWithoutPartner_HaveZerosAndNanStaysThere) {
  LayerProblem p(odd_gqa(), 2, 3, 6);
  TestTensor mask(DType::boolean, {2, 3, 6});
  mask.fill(1);
  for (int64_t j = 0; j < 6; ++j) set_element(mask.view(), mask.offset(0, 1, j), 0);
  for (int64_t i = 0; i < 3; ++i) set_element(mask.view(), mask.offset(1, i, 4), 0);
  p.options.mask = Mask::dense(mask);
  expect_definition(p);
  const TestTensor doutput = doutput_of(p);
  const AttentionLayer layer(p.weights);
  const LayerResults clean = layer_backward(layer, p, doutput);
  const auto expect_zero = [](const TestTensor& t, int64_t b, int64_t row) {
    for (int64_t d = 0; d < t.view().shape[2]; ++d)
      EXPECT_EQ(element(t.view(), t.offset(b, row, d)), 0);
  };
  expect_zero(clean.all[0], 0, 1), expect_zero(clean.all[1], 1, 4), expect_zero(clean.all[2], 1, 4);
  for (double x : {std::numeric_limits<double>::quiet_NaN(), HUGE_VAL}) {
    for (TestTensor* t : {&p.k, &p.v}) {
      for (int64_t d = 0; d < 19; ++d) set_element(t->view(), t->offset(1, 4, d), x);
    }
    set_element(p.q.view(), p.q.offset(0, 1, 5), x);
    EXPECT_EQ(layer_backward(layer, p, doutput).bits(), clean.bits());
  }
}

TEST(LayerBackward, ExtentsOfZero_GiveZeros) {
  for (const auto& [batch, n_q, n_kv] :
       std::vector<std::array<int64_t, 3>>{{0, 3, 4}, {2, 0, 4}, {2, 3, 0}}) {
    const LayerProblem p(odd_gqa(), batch, n_q, n_kv);
    const LayerResults g = layer_backward(AttentionLayer(p.weights), p, doutput_of(p));
    for (size_t i = 0; i < 9; ++i) {
      for (double x : g.all[i].values()) EXPECT_EQ(x, 0) << kLayerGradientNames[i];
    }
  }
}

TEST(LayerBackward, ThreadsAndWhatIsWanted_SameBits) {
  for (const LayerConfig& c : {LayerConfig::mha(4, 160, 96, 32, 48, 130), odd_gqa()}) {
    LayerProblem p(c, 3, 150, 170);
    p.options.mask = Mask::causal_bottom_right();
    const TestTensor doutput = doutput_of(p);
    const AttentionLayer layer(p.weights);
    p.options.num_threads = 1;
    const auto one = layer_backward(layer, p, doutput).bits();
    for (int threads : {2, 3, 7}) {
      p.options.num_threads = threads;
      EXPECT_EQ(layer_backward(layer, p, doutput).bits(), one) << threads;
    }
    AttentionLayer::State state;
    layer.forward_training(p.q, p.k, p.v, {}, state, p.options);
    for (size_t i = 0; i < one.size(); ++i) {
      LayerResults g;
      g.all[i] = std::move(gradients_of(p).all[i]);
      layer.backward(state, doutput, g.views());
      EXPECT_EQ(g.all[i].bits(), one[i]) << kLayerGradientNames[i] << " alone";
    }
  }
}

TEST(LayerBackward, AloneOrInABatch_SameBitsOfTheInputs) {
  const LayerProblem p(odd_gqa(), 4, 6, 10);
  const AttentionLayer layer(p.weights);
  const TestTensor doutput = doutput_of(p);
  const LayerResults all = layer_backward(layer, p, doutput);
  for (int64_t b = 0; b < 4; ++b) {
    const auto entry = [&](const TestTensor& t) {
      Tensor one = t.view();
      one.data = static_cast<float*>(one.data) + b * one.stride[0], one.shape[0] = 1;
      return one;
    };
    AttentionLayer::State state;
    layer.forward_training(entry(p.q), entry(p.k), entry(p.v), {}, state);
    TestTensor q(DType::f32, {1, 6, 23}), k(DType::f32, {1, 10, 21}), v(DType::f32, {1, 10, 19});
    layer.backward(state, entry(doutput), {.q = q.view(), .k = k.view(), .v = v.view()});
    EXPECT_EQ(q.values(), values(entry(all.all[0])));
    EXPECT_EQ(k.values(), values(entry(all.all[1])));
    EXPECT_EQ(v.values(), values(entry(all.all[2])));
  }
}

}  // namespace
}  // namespace qkv::test

// SPDX-License-Identifier: Apache-2.0
// Tier: test. How AttentionLayer::backward() is called: adding, shared views, strides, states, other
// weights, refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "support/layer_gradients.h"

namespace qkv::test {
namespace {

// Sums of one chunk: adding is exactly one addition.
TEST(LayerBackward, Add_AddsToWhatIsThere) {
  const LayerProblem p(odd_gqa(), 2, 5, 7);
  const AttentionLayer layer(p.weights);
  const TestTensor doutput = doutput_of(p);
  const LayerResults once = layer_backward(layer, p, doutput), more = gradients_of(p);
  for (const TestTensor& t : more.all)
    for_each_offset(t, [&](int64_t at) { set_element(t.view(), at, 0.3); });
  AttentionLayer::State state;
  layer.forward_training(p.q, p.k, p.v, {}, state);
  LayerGradients views = more.views();
  views.inputs = views.parameters = GradientWrite::add;
  layer.backward(state, doutput, views);
  for (size_t i = 0; i < 11; ++i) {
    std::vector<double> want;
    for (double x : once.all[i].values())
      want.push_back(static_cast<double>(static_cast<float>(x) + 0.3f));
    EXPECT_EQ(more.all[i].values(), want) << kLayerGradientNames[i];
  }
  views.inputs = GradientWrite::overwrite;  // each choice stands alone
  layer.backward(state, doutput, views);
  EXPECT_EQ(more.all[0].bits(), once.all[0].bits());
  EXPECT_NE(more.all[3].bits(), once.all[3].bits());
}

TEST(LayerBackward, SelfAttention_SumsIntoOneView) {
  LayerProblem p(LayerConfig::gqa(6, 2, 21, 21, 13, 11, 17), 2, 8, 8);
  const AttentionLayer layer(p.weights);
  const TestTensor doutput = doutput_of(p);
  AttentionLayer::State state;
  layer.forward_training(p.q, p.q, p.q, {}, state);
  const TestTensor q(DType::f32, {2, 8, 21}), k(DType::f32, {2, 8, 21}), v(DType::f32, {2, 8, 21}),
      x(DType::f32, {2, 8, 21});
  layer.backward(state, doutput, {.q = q.view(), .k = k.view(), .v = v.view()});
  std::vector<double> want;
  for (size_t e = 0; e < q.values().size(); ++e) {
    const auto at = [&](const TestTensor& t) { return static_cast<float>(t.values()[e]); };
    want.push_back(static_cast<double>(at(q) + at(k) + at(v)));
  }
  layer.backward(state, doutput, {.q = x.view(), .k = x.view(), .v = x.view()});
  EXPECT_EQ(x.values(), want);
  layer.backward(state, doutput, {.q = k.view(), .k = x.view(), .v = x.view()});
  EXPECT_EQ(k.bits(), q.bits());
}

// Gradients in rows that lie apart; inputs and doutput too.
TEST(LayerBackward, AnyStrides_SameBits) {
  const LayerProblem p(odd_gqa(), 3, 7, 9);
  const AttentionLayer layer(p.weights);
  const TestTensor doutput = doutput_of(p);
  const LayerResults want = layer_backward(layer, p, doutput);
  std::vector<std::vector<float>> memory;
  const auto spread = [&](const TestTensor& t, bool with_values) {
    Tensor to = t.view();
    int64_t step = to.shape[to.rank - 1] + 3;
    for (int a = to.rank - 2; a >= 0; --a) to.stride[a] = step, step = step * to.shape[a] + 5;
    memory.emplace_back(static_cast<size_t>(step), -7.0f);
    to.data = memory.back().data();
    const std::vector<double> x = t.values();
    size_t next = 0;
    if (with_values) for_each_offset(to, [&](int64_t at) { set_element(to, at, x[next++]); });
    return to;
  };
  memory.reserve(20);
  AttentionLayer::State state;
  layer.forward_training(spread(p.q, true), spread(p.k, true), spread(p.v, true), {}, state);
  const LayerResults tight = gradients_of(p);
  LayerGradients g = tight.views();
  const std::pair<Tensor*, size_t> apart[] = {
      {&g.q, 0},           {&g.k, 1},           {&g.v, 2},          {&g.fc_q_weight, 3},
      {&g.fc_k_weight, 5}, {&g.fc_v_weight, 7}, {&g.fc_o_weight, 9}};
  for (const auto& item : apart) *item.first = spread(tight.all[item.second], false);
  const size_t first = memory.size() - 7;
  layer.backward(state, spread(doutput, true), g);
  for (size_t i = 0; i < 7; ++i) {
    EXPECT_EQ(values(*apart[i].first), want.all[apart[i].second].values());
    const std::vector<float>& m = memory[first + i];
    EXPECT_EQ(std::count(m.begin(), m.end(), -7.0f),
              static_cast<int64_t>(m.size()) - apart[i].first->num_elements());
  }
  for (size_t i : {4, 6, 8, 10}) EXPECT_EQ(tight.all[i].bits(), want.all[i].bits());
}

TEST(LayerBackward, TrainingForward_SameBitsAndTheStateIsKept) {
  LayerProblem p(odd_gqa(), 2, 5, 7), larger(odd_gqa(), 3, 20, 30);
  p.options.mask = Mask::causal_bottom_right();
  const AttentionLayer layer(p.weights);
  const TestTensor doutput = doutput_of(p);
  const LayerResults want = layer_backward(layer, p, doutput);
  const TestTensor output(DType::f32, {2, 5, 17}), weights(DType::f32, {12, 5, 7}),
      output2(DType::f32, {2, 5, 17}), weights2(DType::f32, {12, 5, 7});
  layer.forward(p.q, p.k, p.v, {output.view(), weights.view()}, p.options);
  AttentionLayer::State state;
  layer.forward_training(larger.q, larger.k, larger.v, {}, state);
  layer.forward_training(p.q, p.k, p.v, {output2.view(), weights2.view()}, state, p.options);
  EXPECT_EQ(output2.bits(), output.bits());
  EXPECT_EQ(weights2.bits(), weights.bits());
  AttentionLayer::State moved = std::move(state);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const LayerResults g = gradients_of(p);
    layer.backward(moved, doutput, g.views());
    EXPECT_EQ(g.bits(), want.bits());
  }
}

TEST(LayerBackward, SetWeights_EqualsALayerMadeOfThem) {
  LayerProblem p(odd_gqa(), 2, 5, 7), other(odd_gqa(), 2, 5, 7, 2);
  other.weights.config.scale = 0.3;
  AttentionLayer layer(p.weights);
  const TestTensor doutput = doutput_of(p);
  const LayerResults before = layer_backward(layer, p, doutput);
  layer.set_weights(other.weights);
  EXPECT_EQ(layer_backward(layer, p, doutput).bits(),
            layer_backward(AttentionLayer(other.weights), p, doutput).bits());
  layer.set_weights(p.weights);
  EXPECT_EQ(layer_backward(layer, p, doutput).bits(), before.bits());
}

void expect_error(const std::function<void()>& call, const std::string& caller,
                  const std::string& words) {
  try {
    call();
    ADD_FAILURE() << "not refused: " << words;
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.rfind(caller + ": ", 0), 0U) << text;
    EXPECT_NE(text.find(words), std::string::npos) << text << " does not say: " << words;
  }
}

TEST(LayerBackward, BadArguments_AreNamedAndNothingIsWritten) {
  LayerConfig c = odd_gqa();
  c.bias_k = false;
  const LayerProblem p(c, 2, 3, 4);  // dim_q 23, dim_k 21, dim_v 19, dim_out 17
  AttentionLayer layer(p.weights);
  const AttentionLayer twin(p.weights);
  const TestTensor doutput = doutput_of(p);
  const LayerResults g = gradients_of(p);
  AttentionLayer::State empty, state;
  const std::string caller = "AttentionLayer::backward";
  expect_error([&] { layer.backward(empty, doutput, g.views()); }, caller, "holds no call");
  layer.forward_training(p.q, p.k, p.v, {}, state);
  expect_error([&] { twin.backward(state, doutput, g.views()); }, caller, "another layer");
  const TestTensor wrong(DType::f32, {2, 3, 16}), bias(DType::f32, {26});
  expect_error([&] { layer.backward(state, wrong, g.views()); }, caller,
               "doutput needs shape [2, 3, 17], got [2, 3, 16]");
  const std::pair<const char*, std::function<void(LayerGradients&)>> cases[] = {
      {"gradients.q needs shape [2, 3, 23]", [](LayerGradients& x) { x.q.shape[1] = 2; }},
      {"gradients.v repeats elements", [](LayerGradients& x) { x.v.stride[0] = 0; }},
      {"gradients.q and gradients.k begin at the same address",
       [](LayerGradients& x) { x.k.data = x.q.data; }},
      {"gradients.fc_k_weight must be f32",
       [](LayerGradients& x) { x.fc_k_weight.dtype = DType::f64; }},
      {"gradients.fc_o_weight needs shape [17, 66]",
       [](LayerGradients& x) { x.fc_o_weight.shape[0] = 66; }},
      {"gradients.fc_v_bias needs shape [22]", [](LayerGradients& x) { x.fc_v_bias.shape[0] = 2; }},
      {"the last axis of gradients.fc_q_weight must be contiguous",
       [](LayerGradients& x) { x.fc_q_weight.stride[1] = 2; }},
      {"gradients.fc_k_bias is wanted but the layer has no fc_k.bias",
       [&](LayerGradients& x) { x.fc_k_bias = bias.view(); }},
  };
  for (const auto& item : cases) {
    LayerGradients views = g.views();
    item.second(views);
    expect_error([&] { layer.backward(state, doutput, views); }, caller, item.first);
  }
  for (const TestTensor& t : g.all) {
    for (double x : t.values()) ASSERT_TRUE(std::isnan(x));
  }
  const AttentionLayer& user = layer;
  expect_error([&] { user.forward_training(wrong, p.k, p.v, {}, state); },
               "AttentionLayer::forward_training", "dim_q differs");
  layer.backward(state, doutput, g.views());  // the state is still that of the last good call
  LayerWeights other = random_weights(LayerConfig::gqa(6, 2, 21, 19, 13, 11, 17, 24));
  expect_error([&] { layer.set_weights(other); }, "AttentionLayer::set_weights",
               "dim_q differs, the layer has 23, got 24");
  layer.set_weights(p.weights);
  expect_error([&] { layer.backward(state, doutput, g.views()); }, caller, "set_weights()");
}

TEST(LayerBackward, GradientsOf_AreViewsOfTheArrays) {
  LayerConfig c = odd_gqa();
  c.bias_k = false;
  const LayerProblem p(c, 2, 5, 7);
  const AttentionLayer layer(p.weights);
  const TestTensor doutput = doutput_of(p);
  const LayerResults want = layer_backward(layer, p, doutput);
  LayerWeights into = p.weights;
  AttentionLayer::State state;
  layer.forward_training(p.q, p.k, p.v, {}, state);
  layer.backward(state, doutput, LayerGradients::of(into));
  const std::vector<float>* const arrays[] = {
      &into.fc_q_weight, &into.fc_q_bias, &into.fc_k_weight, &into.fc_k_bias,
      &into.fc_v_weight, &into.fc_v_bias, &into.fc_o_weight, &into.fc_o_bias};
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(std::vector<double>(arrays[i]->begin(), arrays[i]->end()),
              want.all[i + 3] ? want.all[i + 3].values() : std::vector<double>());
  }
  into.fc_v_bias.pop_back();
  expect_error([&] { LayerGradients::of(into); }, "LayerGradients::of", "fc_v_bias");
}

}  // namespace
}  // namespace qkv::test

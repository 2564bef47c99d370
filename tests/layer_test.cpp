// SPDX-License-Identifier: Apache-2.0
// Tier: test. AttentionLayer against the layer in plain loops, its bits under threads and batches,
// its memory and its refusals.
#include "qkv/layer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "support/allocations.h"
#include "support/bounds.h"
#include "support/layers.h"

namespace qkv::test {
namespace {

struct Results {
  TestTensor output, weights;
};

Results forward(const AttentionLayer& layer, const LayerProblem& p, const LayerOptions& options,
                bool wants_output = true, bool wants_weights = true,
                AttentionLayer::Workspace* workspace = nullptr) {
  const LayerConfig& c = layer.config();
  Results r;
  if (wants_output) r.output = TestTensor(DType::f32, {p.batch, p.n_q, c.dim_out});
  if (wants_weights) r.weights = TestTensor(DType::f32, {c.num_heads * p.batch, p.n_q, p.n_kv});
  layer.forward(p.q, p.k, p.v, {r.output.view(), r.weights.view()}, options, workspace);
  return r;
}

void expect_definition(const LayerProblem& p) {
  SCOPED_TRACE(p.text());
  const LayerValues want = plain_layer<double>(p);
  double output_error = 0, weights_error = 0;
  for (Loop loop : kLoops) {
    const LayerValues plain = plain_layer<float>(p, loop);
    output_error = std::max(output_error, max_error(plain.output, want.output));
    weights_error = std::max(weights_error, max_error(plain.weights, want.weights));
  }
  const AttentionLayer layer(p.weights);
  const Results got = forward(layer, p, p.options);
  EXPECT_TRUE(
      within_bound("output", DType::f32, got.output.values(), want.output, output_error, 1));
  EXPECT_TRUE(
      within_bound("weights", DType::f32, got.weights.values(), want.weights, weights_error));
  const Results alone = forward(layer, p, p.options, true, false);
  EXPECT_EQ(alone.output.bits(), got.output.bits()) << "output changes when weights are asked for";
  const Results weights_alone = forward(layer, p, p.options, false, true);
  EXPECT_EQ(weights_alone.weights.bits(), got.weights.bits());
}

TEST(Layer, LessonModules_EqualTheDefinition) { for_lesson_modules(expect_definition); }

TEST(Layer, AllSizesDifferent_EqualsTheDefinition) { for_all_sizes_different(expect_definition); }

TEST(Layer, HeadWidths_EqualTheDefinition) { for_head_widths(expect_definition); }

TEST(Layer, LongRows_EqualTheDefinition) {
  LayerProblem p(LayerConfig::mha(2, 64, 64, 32, 32, 64), 1, 300, 290);
  expect_definition(p);
  p.options.mask = Mask::causal_bottom_right();
  expect_definition(p);
}

TEST(Layer, EachBiasAbsent_EqualsTheDefinition) { for_each_bias_absent(expect_definition); }

TEST(Layer, ScaleAndSoftcap_EqualTheDefinition) {
  LayerConfig c = odd_gqa();
  c.scale = 0.7;
  expect_definition(LayerProblem(c, 2, 5, 7));
  c.softcap = 1.5;
  expect_definition(LayerProblem(c, 2, 5, 7));
}

TEST(Layer, AdditiveMaskOfTheLesson_IsRepeatedOverTheHeads) {
  LayerProblem p(lesson_mha(), 3, 4, 6);
  TestTensor mask(DType::f32, {3, 4, 6});
  std::mt19937_64 random(5);
  mask.fill_random(random);
  const float infinity = std::numeric_limits<float>::infinity();
  set_element(mask.view(), mask.offset(0, 1, 2), -infinity);
  for (int64_t j = 0; j < 6; ++j) set_element(mask.view(), mask.offset(2, 3, j), -infinity);
  p.options.bias = mask;
  expect_definition(p);
  // The same array as a mask, together with another mask.
  LayerProblem both(lesson_mqa(), 3, 4, 6);
  both.options.mask = Mask::dense(mask) & Mask::causal_bottom_right();
  expect_definition(both);
  both.options.bias = mask;  // twice
  expect_definition(both);
}

TEST(Layer, BooleanMask_EqualsTheDefinition) {
  LayerProblem p(odd_gqa(), 2, 6, 9);
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{6, 9}, {2, 6, 9}, {2, 6, 6, 9}, {1, 6, 1, 9}}) {
    TestTensor mask(DType::boolean, shape);
    int n = 0;
    for_each_offset(mask, [&](int64_t at) { set_element(mask.view(), at, n++ * 7 % 5 < 3); });
    p.options.mask = Mask::dense(mask);
    expect_definition(p);
  }
  p.options.mask = Mask::lengths(std::vector<int64_t>{4, 0}) & Mask::causal_bottom_right();
  expect_definition(p);
}

TEST(Layer, RowWithoutKeys_GivesWeightsZeroAndTheBias) {
  LayerProblem p(lesson_mha(), 2, 3, 4);
  TestTensor mask(DType::f32, {2, 3, 4});
  mask.fill(0);
  for (int64_t j = 0; j < 4; ++j)
    set_element(mask.view(), mask.offset(1, 0, j), -std::numeric_limits<double>::infinity());
  p.options.bias = mask;
  const AttentionLayer layer(p.weights);
  const Results got = forward(layer, p, p.options);
  for (int64_t d = 0; d < 8; ++d) {
    EXPECT_EQ(element(got.output.view(), got.output.offset(1, 0, d)),
              static_cast<double>(p.weights.fc_o_bias[static_cast<size_t>(d)]));
  }
  for (int64_t h = 0; h < 8; ++h) {
    for (int64_t j = 0; j < 4; ++j)
      EXPECT_EQ(element(got.weights.view(), got.weights.offset(h * 2 + 1, 0, j)), 0);
  }
}

TEST(Layer, ExtentsOfZero) {
  LayerProblem no_keys(lesson_mqa(), 2, 3, 0);
  const AttentionLayer layer(no_keys.weights);
  const Results got = forward(layer, no_keys, {});
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t d = 0; d < 8; ++d) {
        EXPECT_EQ(element(got.output.view(), got.output.offset(b, i, d)),
                  static_cast<double>(no_keys.weights.fc_o_bias[static_cast<size_t>(d)]));
      }
    }
  }
  EXPECT_TRUE(forward(layer, LayerProblem(lesson_mqa(), 0, 3, 4), {}).output.values().empty());
  EXPECT_TRUE(forward(layer, LayerProblem(lesson_mqa(), 2, 0, 4), {}).output.values().empty());
  layer.forward(no_keys.q, no_keys.k, no_keys.v, {});  // nothing wanted
}

TEST(Layer, Threads_SameBits) {
  const LayerConfig configs[] = {lesson_mha(), LayerConfig::gqa(4, 2, 160, 96, 32, 48, 130)};
  for (const LayerConfig& c : configs) {
    LayerProblem p(c, 3, 150, 170);
    p.options.mask = Mask::causal_bottom_right();
    const AttentionLayer layer(p.weights);
    p.options.num_threads = 1;
    const Results one = forward(layer, p, p.options);
    for (int threads : {2, 3, 7}) {
      p.options.num_threads = threads;
      const Results many = forward(layer, p, p.options);
      EXPECT_EQ(many.output.bits(), one.output.bits()) << threads;
      EXPECT_EQ(many.weights.bits(), one.weights.bits()) << threads;
    }
  }
}

TEST(Layer, AloneOrInABatch_SameBits) {
  for (const LayerConfig& c : {lesson_mha(), lesson_mqa(), odd_gqa()}) {
    LayerProblem p(c, 5, 6, 10);
    const AttentionLayer layer(p.weights);
    const Results all = forward(layer, p, {});
    const std::vector<double> output = all.output.values();
    for (int64_t b = 0; b < 5; ++b) {
      LayerProblem one(c, 1, 6, 10);
      const auto copy = [&](const TestTensor& from, TestTensor& to) {
        const std::vector<double> x = from.values();
        size_t next = static_cast<size_t>(b) * to.values().size();
        for_each_offset(to, [&](int64_t at) { set_element(to.view(), at, x[next++]); });
      };
      copy(p.q, one.q), copy(p.k, one.k), copy(p.v, one.v);
      const std::vector<double> alone = forward(layer, one, {}).output.values();
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(),
                             output.begin() + b * static_cast<int64_t>(alone.size())));
    }
  }
}

// Inputs and outputs in other memory orders: rows apart, batch entries apart, one batch entry for
// all.
TEST(Layer, AnyStrides_SameBits) {
  const int64_t batch = 3, n_q = 7, n_kv = 9;
  for (const LayerConfig& c : {odd_gqa(), LayerConfig::mqa(4, 32, 32, 32, 32, 32)}) {
    LayerProblem p(c, batch, n_q, n_kv);
    const AttentionLayer layer(p.weights);
    const Results want = forward(layer, p, {});
    const auto spread = [](const TestTensor& t, int64_t row_gap, int64_t batch_gap,
                           std::vector<float>* memory) {
      const ConstTensor x = t;
      const int64_t row = x.shape[2] + row_gap, entry = x.shape[1] * row + batch_gap;
      memory->assign(static_cast<size_t>(x.shape[0] * entry),
                     std::numeric_limits<float>::quiet_NaN());
      Tensor to(memory->data(), {x.shape[0], x.shape[1], x.shape[2]}, {entry, row, 1});
      const std::vector<double> values = t.values();
      size_t next = 0;
      for_each_offset(to, [&](int64_t at) { set_element(to, at, values[next++]); });
      return to;
    };
    for (int64_t row_gap : {0, 5}) {
      for (int64_t batch_gap : {0, 11}) {
        std::vector<float> mq, mk, mv, mo, mw;
        const Tensor q = spread(p.q, row_gap, batch_gap, &mq), k = spread(p.k, row_gap, 0, &mk),
                     v = spread(p.v, 0, batch_gap, &mv);
        const Tensor output = spread(want.output, row_gap, batch_gap, &mo),
                     weights = spread(want.weights, row_gap, batch_gap, &mw);
        for_each_offset(output, [&](int64_t at) { set_element(output, at, 77); });
        for_each_offset(weights, [&](int64_t at) { set_element(weights, at, 77); });
        layer.forward(q, k, v, {output, weights});
        EXPECT_EQ(values(output), want.output.values());
        EXPECT_EQ(values(weights), want.weights.values());
        const auto count_nan = [](const std::vector<float>& x) {
          return std::count_if(x.begin(), x.end(), [](float f) { return std::isnan(f); });
        };
        EXPECT_EQ(count_nan(mo), static_cast<int64_t>(mo.size()) - output.num_elements());
        EXPECT_EQ(count_nan(mw), static_cast<int64_t>(mw.size()) - weights.num_elements());
      }
    }
    // One batch entry of k and v for all: stride 0.
    LayerProblem same(c, batch, n_q, n_kv);
    for (TestTensor* t : {&same.k, &same.v}) {
      for (int64_t b = 1; b < batch; ++b) {
        for (int64_t j = 0; j < n_kv; ++j) {
          for (int64_t d = 0; d < t->view().shape[2]; ++d)
            set_element(t->view(), t->offset(b, j, d), element(t->view(), t->offset(0, j, d)));
        }
      }
    }
    Tensor k = same.k.view(), v = same.v.view();
    k.stride[0] = v.stride[0] = 0;
    const Results copied = forward(layer, same, {});
    TestTensor output(DType::f32, {batch, n_q, c.dim_out});
    layer.forward(same.q, k, v, {output.view(), {}});
    EXPECT_EQ(output.bits(), copied.output.bits());
  }
}

TEST(Layer, SecondCall_AllocatesNothing) {
  for (const LayerConfig& c : {lesson_mha(), lesson_mqa(), odd_gqa()}) {
    LayerProblem p(c, 10, 20, 40);
    TestTensor mask(DType::f32, {10, 20, 40});
    mask.fill(0.25);
    const AttentionLayer layer(p.weights);
    AttentionLayer::Workspace workspace;
    for (AttentionLayer::Workspace* w :
         {static_cast<AttentionLayer::Workspace*>(nullptr), &workspace}) {
      for (const Mask& m : {Mask::full(), Mask::causal_bottom_right(), Mask::dense(mask)}) {
        LayerOptions options;
        options.mask = m, options.num_threads = 1;
        Results r = forward(layer, p, options, true, true, w);
        const int64_t before = num_allocations;
        layer.forward(p.q, p.k, p.v, {r.output.view(), r.weights.view()}, options, w);
        layer.forward(p.q, p.k, p.v, {r.output.view(), {}}, options, w);
        EXPECT_EQ(num_allocations - before, 0) << m.name();
      }
    }
    EXPECT_GT(workspace.size_bytes(), 0);
  }
}

TEST(Layer, WorkspaceGrowsAndIsKept) {
  LayerProblem small(odd_gqa(), 1, 2, 3), large(odd_gqa(), 4, 30, 50);
  const AttentionLayer layer(small.weights);
  const Results want = forward(layer, small, {});
  AttentionLayer::Workspace workspace;
  forward(layer, small, {}, true, true, &workspace);
  const int64_t first = workspace.size_bytes();
  forward(layer, large, {}, true, true, &workspace);
  const int64_t grown = workspace.size_bytes();
  EXPECT_GT(grown, first);
  EXPECT_EQ(forward(layer, small, {}, true, true, &workspace).output.bits(), want.output.bits());
  EXPECT_EQ(workspace.size_bytes(), grown);
  AttentionLayer::Workspace moved = std::move(workspace);
  EXPECT_EQ(moved.size_bytes(), grown);
  EXPECT_EQ(workspace.size_bytes(), 0);  // NOLINT: empty after the move
  EXPECT_EQ(forward(layer, small, {}, true, true, &workspace).output.bits(), want.output.bits());
}

// An executor that runs another call of the layer on this thread before each task, as a pool that
// steals work while it waits may do.
TEST(Layer, CallInsideACall_DoesNotDisturbIt) {
  const LayerConfig c = LayerConfig::mha(4, 256, 256, 64, 64, 256);
  LayerProblem outer(c, 1, 300, 300), inner(c, 2, 20, 30, 9);
  const AttentionLayer layer(outer.weights);
  const Results want = forward(layer, outer, {});
  class Nesting final : public Executor {
   public:
    std::function<void()> nested;
    int calls = 0;
    void run(int64_t num_tasks, int, void (*task)(void*, int64_t), void* context) override {
      for (int64_t i = 0; i < num_tasks; ++i) {
        ++calls;
        nested();
        task(context, i);
      }
    }
  } executor;
  TestTensor output(DType::f32, {2, 20, 256});
  executor.nested = [&] {
    layer.forward(inner.q, inner.k, inner.v, {output.view(), {}}, {.num_threads = 1});
  };
  const Results got = forward(layer, outer, {.num_threads = 4, .executor = &executor});
  EXPECT_GT(executor.calls, 2);
  EXPECT_EQ(got.output.bits(), want.output.bits());
  EXPECT_EQ(got.weights.bits(), want.weights.bits());
}

TEST(Layer, OnParametersOfTheCaller_SameBitsAndSeesEveryWrite) {
  for (LayerConfig c : {lesson_mha(), lesson_mqa(), odd_gqa()}) {
    c.bias_k = c.num_heads != 6;
    LayerProblem p(c, 10, 5, 7);
    p.options.mask = Mask::causal_bottom_right();
    const AttentionLayer layer(LayerParameters::of(p.weights));
    for (int write = 0; write < 2; ++write) {
      const Results want = forward(AttentionLayer(p.weights), p, p.options);
      const Results got = forward(layer, p, p.options);
      EXPECT_EQ(got.output.bits(), want.output.bits());
      EXPECT_EQ(got.weights.bits(), want.weights.bits());
      p.weights.fc_q_weight[3] += 1, p.weights.fc_o_bias[0] = 2;
    }
  }
}

TEST(Layer, OnParametersOfTheCaller_CannotBeTrained) {
  LayerProblem p(lesson_mha(), 2, 3, 4);
  AttentionLayer layer(LayerParameters::of(p.weights));
  TestTensor output(DType::f32, {2, 3, 8});
  output.fill(7);
  AttentionLayer::State state;
  const std::function<void()> calls[] = {
      [&] {
        layer.forward_training(p.q, p.k, p.v, {output.view(), {}}, state);
      },
      [&] { layer.set_weights(p.weights); }};
  for (const auto& call : calls) {
    try {
      call();
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("cannot be trained"), std::string::npos);
    }
  }
  for (double x : output.values()) EXPECT_EQ(x, 7);
}

TEST(Layer, MovedLayer_StillWorks) {
  LayerProblem p(odd_gqa(), 2, 3, 4);
  AttentionLayer a = AttentionLayer::from_weights(p.weights);
  const Results want = forward(a, p, {});
  AttentionLayer b(std::move(a));
  EXPECT_EQ(forward(b, p, {}).output.bits(), want.output.bits());
  a = std::move(b);
  EXPECT_EQ(forward(a, p, {}).output.bits(), want.output.bits());
}

TEST(Layer, NanInAHiddenKey_NeverArrives) {
  LayerProblem p(lesson_mha(), 2, 5, 6);
  p.options.mask = Mask::lengths(std::vector<int64_t>{4, 6});
  const AttentionLayer layer(p.weights);
  const Results want = forward(layer, p, p.options);
  for (int64_t j : {4, 5}) {
    for (TestTensor* t : {&p.k, &p.v}) {
      for (int64_t d = 0; d < t->view().shape[2]; ++d)
        set_element(t->view(), t->offset(0, j, d), std::numeric_limits<double>::quiet_NaN());
    }
  }
  const Results got = forward(layer, p, p.options);
  EXPECT_EQ(got.output.bits(), want.output.bits());
  EXPECT_EQ(got.weights.bits(), want.weights.bits());
}

// What is refused, with the words the text must hold; the outputs stay as they were.
TEST(Layer, BadArguments_AreRefusedBeforeAnythingIsWritten) {
  LayerProblem p(odd_gqa(), 2, 3, 4);  // dim_q 23, dim_k 21, dim_v 19, dim_out 17, 6 heads
  const AttentionLayer layer(p.weights);
  TestTensor output(DType::f32, {2, 3, 17}), weights(DType::f32, {12, 3, 4});
  output.fill(3), weights.fill(3);
  struct Arguments {
    ConstTensor q, k, v;
    Tensor output, weights;
    LayerOptions options{};
  };
  const auto tensor = [](DType dtype, std::vector<int64_t> shape) {
    return TestTensor(dtype, std::move(shape));
  };
  const TestTensor wide = tensor(DType::f32, {2, 3, 24}), flat = tensor(DType::f32, {6, 23}),
                   few = tensor(DType::f32, {1, 3, 23}), longer = tensor(DType::f32, {2, 5, 19}),
                   doubles = tensor(DType::f64, {2, 3, 23}), out18 = tensor(DType::f32, {2, 3, 18}),
                   batch_major = tensor(DType::f32, {2, 6, 3, 4}),
                   bias = tensor(DType::f32, {3, 5}), bool_bias = tensor(DType::boolean, {3, 4});
  Tensor gaps = tensor(DType::f32, {2, 3, 23}).view();
  gaps.stride[2] = 2;
  Tensor repeated = output.view();
  repeated.stride[0] = 0;
  const std::vector<int64_t> lengths = {5, 1};
  const struct {
    std::function<void(Arguments&)> spoil;
    std::vector<std::string> words;
  } cases[] = {
      {[&](Arguments& a) { a.q = wide; }, {"q [2, 3, 24]", "fc_q.weight [78, 23]", "dim_q"}},
      {[&](Arguments& a) { a.k = wide; }, {"k [2, 3, 24]", "fc_k.weight [26, 21]", "dim_k"}},
      {[&](Arguments& a) { a.v = wide; }, {"v [2, 3, 24]", "fc_v.weight [22, 19]", "dim_v"}},
      {[&](Arguments& a) { a.q = flat; }, {"3 axes", "[6, 23]"}},
      {[&](Arguments& a) { a.q = few; }, {"batch", "[1, 3, 23]", "[2, 4, 21]"}},
      {[&](Arguments& a) { a.v = longer; }, {"n_kv", "[2, 4, 21]", "[2, 5, 19]"}},
      {[&](Arguments& a) { a.q = doubles; }, {"q must be f32", "f64"}},
      {[&](Arguments& a) { a.q = gaps; }, {"last axis of q", "stride 2", "[2, 3, 23]"}},
      {[&](Arguments& a) { a.q.data = nullptr; }, {"q has no data", "[2, 3, 23]"}},
      {[&](Arguments& a) { a.output = out18.view(); },
       {"outputs.output", "[2, 3, 17]", "[2, 3, 18]"}},
      {[&](Arguments& a) { a.output = repeated; }, {"outputs.output repeats", "[2, 3, 17]"}},
      {[&](Arguments& a) { a.weights = batch_major.view(); },
       {"outputs.weights", "[12, 3, 4]", "[2, 6, 3, 4]"}},
      {[&](Arguments& a) { a.options.bias = bias; }, {"bias", "[3, 5]", "[2, 6, 3, 4]"}},
      {[&](Arguments& a) { a.options.bias = bool_bias; }, {"bias must be floating point", "bool"}},
      {[&](Arguments& a) { a.options.mask = Mask::dense(bias); }, {"[3, 5]", "[2, 6, 3, 4]"}},
      {[&](Arguments& a) { a.options.mask = Mask::lengths(lengths); }, {"5", "4"}},
      {[&](Arguments& a) { a.options.num_threads = -1; }, {"num_threads", "-1"}},
  };
  for (const auto& one : cases) {
    Arguments a{p.q, p.k, p.v, output.view(), weights.view()};
    one.spoil(a);
    try {
      layer.forward(a.q, a.k, a.v, {a.output, a.weights}, a.options);
      ADD_FAILURE() << "not refused: " << one.words[0];
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.rfind("AttentionLayer::forward: ", 0), 0u) << text;
      for (const std::string& word : one.words)
        EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
    }
  }
  for (const TestTensor* t : {&output, &weights}) {
    for (double x : t->values()) EXPECT_EQ(x, 3);
  }
}

TEST(Layer, BadWeights_AreRefused) {
  LayerWeights w = random_weights(odd_gqa());
  w.fc_v_weight.pop_back();
  try {
    const AttentionLayer layer(w);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.rfind("AttentionLayer: fc_v_weight", 0), 0u) << text;
    EXPECT_NE(text.find("[22, 19]"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace qkv::test

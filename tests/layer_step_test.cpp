// SPDX-License-Identifier: Apache-2.0
// Tier: test. AttentionLayer on a KvCache: a layer of a real model with rope, prefill and token by token;
// the bits of forward() for self- and cross-attention; errors.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "qkv/kv_cache.h"
#include "qkv/layer.h"
#include "qkv/weights.h"
#include "support/bounds.h"
#include "support/files.h"
#include "support/layers.h"

namespace qkv::test {
namespace {

constexpr KvCacheKind kKinds[] = {KvCacheKind::contiguous, KvCacheKind::ring, KvCacheKind::paged};

// Tokens [begin, end) of [batch, n, dim].
template <class View>
View tokens(View t, int64_t begin, int64_t end) {
  using Byte = std::conditional_t<View::kConst, const char, char>;
  t.data = static_cast<Byte*>(t.data) + begin * t.stride[1] * size_bytes(t.dtype);
  t.shape[1] = end - begin;
  return t;
}

// The layer on x in chunks of these sizes.
TestTensor in_chunks(const AttentionLayer& layer, KvCache cache, ConstTensor x,
                     const std::vector<int64_t>& chunks) {
  TestTensor output(DType::f32, {x.shape[0], x.shape[1], layer.config().dim_out});
  int64_t at = 0;
  for (const int64_t n : chunks) {
    layer.step(tokens(x, at, at + n), cache,
               {.output = tokens(output.view(), at, at + n), .weights = {}});
    at += n;
  }
  EXPECT_EQ(at, x.shape[1]);
  EXPECT_EQ(cache.longest(), at);
  return output;
}

TEST(LayerStep, RealModel_PrefillAndTokenByToken) {
  const std::string shared = shared_data_folder();
  if (shared.empty()) GTEST_SKIP() << "the folder of shared data is missing (QKV_SHARED_DATA)";
  const std::string folder = shared + "/smollm2/";
  std::ifstream json(folder + "tokens.json");
  const auto about = nlohmann::json::parse(json);
  LoadLayerOptions options;
  options.num_heads = about["num_heads"], options.num_kv_heads = about["num_kv_heads"];
  const AttentionLayer layer(load_layer(folder + "weights_f32.safetensors", options));
  EXPECT_EQ(layer.config().group_size(), 3);
  const SafetensorsFile input = SafetensorsFile::open(folder + "input_f32.safetensors");
  const SafetensorsFile expected = SafetensorsFile::open(folder + "expected_f32.safetensors");
  const ConstTensor x = input.tensor("hidden");
  const double tolerance = about["tol_f32"]["output"];
  const std::vector<double> want = values(expected.tensor("output"));
  const std::vector<int64_t> all = {21}, single(21, 1), mixed = {5, 1, 1, 9, 2, 3};
  for (const KvCacheKind kind : kKinds) {
    KvCacheConfig config = layer.cache_config(1);
    config.kind = kind, config.page_size = 8;
    if (kind == KvCacheKind::ring) config.window = 21;
    config.rope = RopeOptions{.base = about["rope_theta"]};
    for (const std::vector<int64_t>& chunks : {all, single, mixed}) {
      const TestTensor got = in_chunks(layer, KvCache(config), x, chunks);
      EXPECT_TRUE(within("output", got.values(), want, [&](size_t) { return tolerance; }));
    }
    // The keys in the cache are the recorded ones.
    KvCache cache(config);
    layer.step(x, cache, {});
    std::vector<double> keys;
    for (int64_t h = 0; h < 3; ++h)
      for (const KvCacheSegment& s : cache.segments(0, h)) {
        const std::vector<double> rows = values(s.k);
        keys.insert(keys.end(), rows.begin(), rows.end());
      }
    EXPECT_TRUE(within("k_rotated", keys, values(expected.tensor("k_rotated")),
                       [&](size_t) { return tolerance; }));
  }
}

TEST(LayerStep, WithoutRope_TheBitsOfForward) {
  const LayerConfig c = LayerConfig::gqa(6, 2, 40, 40, 16, 12, 24);
  const LayerProblem p(c, 3, 50, 50);
  const AttentionLayer layer(p.weights);
  TestTensor want(DType::f32, {3, 50, 24}), want_weights(DType::f32, {18, 50, 50});
  LayerOptions causal;
  causal.mask = Mask::causal_bottom_right();
  layer.forward(p.q, p.q, p.q, {want.view(), want_weights.view()}, causal);
  for (const KvCacheKind kind : kKinds) {
    KvCacheConfig config = layer.cache_config(3, 60);
    config.kind = kind, config.page_size = 16;
    if (kind == KvCacheKind::ring) config.window = 50;
    KvCache cache(config);
    TestTensor output(DType::f32, {3, 50, 24}), weights(DType::f32, {18, 50, 50});
    layer.step(p.q, cache, {output.view(), weights.view()});
    EXPECT_EQ(output.bits(), want.bits());
    EXPECT_EQ(weights.bits(), want_weights.bits());
    const std::vector<int64_t> chunks = {20, 1, 1, 28};
    const TestTensor in_parts = in_chunks(layer, KvCache(config), p.q, chunks);
    EXPECT_TRUE(within_bound("output", DType::f32, in_parts.values(), want.values(), 0, 1));
  }
}

TEST(LayerStep, CrossAttention_ProjectsKeysOnce_TheBitsOfForward) {
  const LayerConfig c = LayerConfig::gqa(4, 2, 24, 20, 16, 16, 12, 28);
  for (const int64_t n_q : {1, 9, 70}) {
    const LayerProblem p(c, 2, n_q, 33, 7);
    const AttentionLayer layer(p.weights);
    KvCache cache(layer.cache_config(2));
    layer.project_kv(p.k, p.v, cache);
    EXPECT_EQ(cache.longest(), 33);
    TestTensor want(DType::f32, {2, n_q, 12}), want_weights(DType::f32, {8, n_q, 33});
    TestTensor got(DType::f32, {2, n_q, 12}), got_weights(DType::f32, {8, n_q, 33});
    for (const Mask& mask : {Mask(), Mask::prefix(10), Mask::causal_top_left()}) {
      LayerOptions options;
      options.mask = mask;
      layer.forward(p.q, p.k, p.v, {want.view(), want_weights.view()}, options);
      layer.attend(p.q, cache, {got.view(), got_weights.view()}, options);
      EXPECT_EQ(got.bits(), want.bits());
      EXPECT_EQ(got_weights.bits(), want_weights.bits());
    }
    EXPECT_EQ(cache.longest(), 33);
  }
}

TEST(LayerStep, Errors_LeaveTheCacheAsItWas) {
  const LayerConfig c = LayerConfig::gqa(4, 2, 24, 24, 16, 16, 12);
  const LayerProblem p(c, 2, 5, 5);
  const AttentionLayer layer(p.weights);
  KvCache cache(layer.cache_config(2, 8));
  layer.step(p.q, cache, {});
  TestTensor output(DType::f32, {2, 5, 12});
  const auto refused = [&](auto call, const std::string& words) {
    const std::string text = error_text(call);
    EXPECT_NE(text.find(words), std::string::npos) << words << " in: " << text;
    EXPECT_EQ(cache.longest(), 5);
    EXPECT_TRUE(std::isnan(element(output.view(), 0)));
  };
  const LayerOutputs outputs{output.view(), {}};
  refused([&] { layer.step(p.q, cache, outputs); }, "5 tokens do not fit, length 5 of capacity 8");
  const LayerProblem few(c, 2, 2, 2);
  refused([&] { layer.step(few.q, cache, outputs); }, "outputs.output needs shape [2, 2, 12]");
  TestTensor small(DType::f32, {2, 2, 12}), wide(DType::f32, {2, 2, 25});
  TestTensor bad_mask(DType::boolean, {2, 6});
  LayerOptions options;
  options.mask = Mask::dense(bad_mask.fill(1).view());
  refused(
      [&] {
        layer.step(few.q, cache, {small.view(), {}}, options);
      },
      "mask does not broadcast");
  refused([&] { layer.step(wide, cache, {}); }, "x needs shape [2, n, 24], got [2, 2, 25]");
  KvCacheConfig other = layer.cache_config(2);
  other.num_kv_heads = 4;
  KvCache wrong(other);
  refused([&] { layer.step(p.q, wrong, outputs); }, "the cache is of another layer");
  other = layer.cache_config(2);
  other.window = 4;
  KvCache windowed(other);
  refused([&] { layer.attend(p.q, windowed, outputs); }, "have no position");
  const AttentionLayer cross(random_weights(LayerConfig::gqa(4, 2, 24, 20, 16, 16, 12)));
  refused([&] { cross.step(p.q, cache, outputs); }, "self-attention needs one width");
  refused([&] { cross.project_kv(p.k, p.v, cache); }, "v needs shape [2, n, 20]");
}

}  // namespace
}  // namespace qkv::test

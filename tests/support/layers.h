// SPDX-License-Identifier: Apache-2.0
// Layers of tests: random weights and inputs, and the definition of a layer in plain loops.
#pragma once
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "qkv/layer.h"
#include "reference.h"
#include "support/naive.h"
#include "support/tensors.h"

namespace qkv::test {

inline std::vector<float> normal_floats(int64_t n, double deviation, std::mt19937_64& random) {
  std::normal_distribution<double> normal(0, deviation);
  std::vector<float> all;
  for (int64_t i = 0; i < n; ++i) all.push_back(static_cast<float>(normal(random)));
  return all;
}

/// Weights of about 1 / sqrt(width), as layers have them; biases where config says so.
inline LayerWeights random_weights(const LayerConfig& c, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  const auto weight = [&](int64_t n, int64_t k) {
    return normal_floats(n * k, 1 / std::sqrt(static_cast<double>(k)), random);
  };
  const auto bias = [&](bool has, int64_t n) { return normal_floats(has ? n : 0, 0.5, random); };
  LayerWeights w;
  w.config = c;
  w.fc_q_weight = weight(c.num_heads * c.head_dim_qk, c.dim_q);
  w.fc_k_weight = weight(c.num_kv_heads * c.head_dim_qk, c.dim_k);
  w.fc_v_weight = weight(c.num_kv_heads * c.head_dim_v, c.dim_v);
  w.fc_o_weight = weight(c.dim_out, c.num_heads * c.head_dim_v);
  w.fc_q_bias = bias(c.bias_q, c.num_heads * c.head_dim_qk);
  w.fc_k_bias = bias(c.bias_k, c.num_kv_heads * c.head_dim_qk);
  w.fc_v_bias = bias(c.bias_v, c.num_kv_heads * c.head_dim_v);
  w.fc_o_bias = bias(c.bias_o, c.dim_out);
  return w;
}

struct LayerProblem {
  LayerWeights weights;
  int64_t batch, n_q, n_kv;
  TestTensor q, k, v;
  LayerOptions options{};

  LayerProblem(const LayerConfig& c, int64_t batch_size, int64_t queries, int64_t keys,
               uint64_t seed = 1)
      : weights(random_weights(c, seed)), batch(batch_size), n_q(queries), n_kv(keys) {
    std::mt19937_64 random(seed + 1000);
    q = TestTensor(DType::f32, {batch, n_q, c.dim_q});
    k = TestTensor(DType::f32, {batch, n_kv, c.dim_k});
    v = TestTensor(DType::f32, {batch, n_kv, c.dim_v});
    for (TestTensor* t : {&q, &k, &v}) t->fill_random(random);
  }

  std::string text() const {
    const LayerConfig& c = weights.config;
    std::string all("layer");
    for (int64_t n : {c.num_heads, c.num_kv_heads, c.dim_q, c.dim_k, c.dim_v, c.head_dim_qk,
                      c.head_dim_v, c.dim_out})
      all.append(" ").append(std::to_string(n));
    return all + " batch " + std::to_string(batch) + " n_q " + std::to_string(n_q) + " n_kv " +
           std::to_string(n_kv) + " mask " + options.mask.name();
  }
};

inline LayerConfig lesson_mha() { return LayerConfig::mha(8, 128, 64, 16, 16, 8); }
inline LayerConfig lesson_mqa() { return LayerConfig::mqa(8, 128, 64, 16, 16, 8); }
/// Every size another one.
inline LayerConfig odd_gqa() { return LayerConfig::gqa(6, 2, 21, 19, 13, 11, 17, 23); }

/// What forward and backward are held against their definitions on. check: void(const LayerProblem&).
template <class Check>
void for_lesson_modules(Check check) {
  for (const LayerConfig& c : {lesson_mha(), lesson_mqa()}) {
    LayerProblem p(c, 10, 2, 4);
    check(p);
    p.options.mask = Mask::causal_top_left();
    check(p);
    p.options.mask = Mask::causal_bottom_right();
    check(p);
  }
}

template <class Check>
void for_all_sizes_different(Check check) {
  for (int64_t n_q : {1, 3, 33}) {
    for (int64_t n_kv : {1, 5, 40}) {
      LayerProblem p(odd_gqa(), 3, n_q, n_kv);
      check(p);
      p.options.mask = Mask::window(3, 1) & Mask::causal_bottom_right();
      check(p);
    }
  }
}

/// Heads that are whole vectors of some instruction sets and not of others.
template <class Check>
void for_head_widths(Check check) {
  for (int64_t head_dim_qk : {1, 8, 16, 24, 32, 64}) {
    for (int64_t head_dim_v : {1, 4, 16, 32, 48}) {
      check(LayerProblem(LayerConfig::gqa(4, 2, 40, 24, head_dim_qk, head_dim_v, 20), 2, 9, 11));
    }
  }
}

template <class Check>
void for_each_bias_absent(Check check) {
  for (int absent = 0; absent < 16; ++absent) {
    LayerConfig c = odd_gqa();
    c.bias_q = !(absent & 1), c.bias_k = !(absent & 2);
    c.bias_v = !(absent & 4), c.bias_o = !(absent & 8);
    check(LayerProblem(c, 2, 5, 7));
  }
}

/// What a layer must give, row-major, weights head-major [num_heads * batch, n_q, n_kv].
struct LayerValues {
  std::vector<double> output, weights;
};

/// x w^T + bias in T, summed upwards or downwards.
template <class T>
std::vector<T> plain_projection(const std::vector<double>& x, const std::vector<float>& w,
                                const std::vector<float>& bias, int64_t n, int64_t k, Loop loop) {
  std::vector<T> y;
  const int64_t rows = static_cast<int64_t>(x.size()) / k;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      T sum = 0;
      for (int64_t u = 0; u < k; ++u) {
        const int64_t at = loop == Loop::downwards ? k - 1 - u : u;
        sum += static_cast<T>(x[static_cast<size_t>(i * k + at)]) *
               static_cast<T>(w[static_cast<size_t>(j * k + at)]);
      }
      if (!bias.empty()) sum += static_cast<T>(bias[static_cast<size_t>(j)]);
      y.push_back(sum);
    }
  }
  return y;
}

/// The layer in plain loops. T double: the definition. T float: what its rounding costs.
template <class T>
LayerValues plain_layer(const LayerProblem& p, Loop loop = Loop::upwards) {
  const LayerWeights& w = p.weights;
  const LayerConfig& c = w.config;
  const int64_t h = c.num_heads, h_kv = c.num_kv_heads;
  std::vector<T> q = plain_projection<T>(p.q.values(), w.fc_q_weight, w.fc_q_bias,
                                         h * c.head_dim_qk, c.dim_q, loop);
  std::vector<T> k = plain_projection<T>(p.k.values(), w.fc_k_weight, w.fc_k_bias,
                                         h_kv * c.head_dim_qk, c.dim_k, loop);
  std::vector<T> v = plain_projection<T>(p.v.values(), w.fc_v_weight, w.fc_v_bias,
                                         h_kv * c.head_dim_v, c.dim_v, loop);
  const auto split = [&](std::vector<T>& x, int64_t heads, int64_t tokens, int64_t dim) {
    return Tensor(x.data(), {p.batch, heads, tokens, dim},
                  {tokens * heads * dim, dim, heads * dim, 1});
  };
  const Tensor qs = split(q, h, p.n_q, c.head_dim_qk), ks = split(k, h_kv, p.n_kv, c.head_dim_qk),
               vs = split(v, h_kv, p.n_kv, c.head_dim_v);
  AttentionOptions o;
  o.mask = p.options.mask, o.bias = p.options.bias, o.scale = c.scale, o.softcap = c.softcap;
  reference::Forward heads;
  if constexpr (std::is_same_v<T, double>) {
    heads = reference::forward(qs, ks, vs, o);
  } else {
    heads = NaiveForward<T>(qs, ks, vs, o, loop).run();
  }
  std::vector<double> merged;  // [batch, n_q, num_heads * head_dim_v]
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t i = 0; i < p.n_q; ++i)
      for (int64_t head = 0; head < h; ++head)
        for (int64_t d = 0; d < c.head_dim_v; ++d)
          merged.push_back(
              heads.out[static_cast<size_t>(((b * h + head) * p.n_q + i) * c.head_dim_v + d)]);
  LayerValues result;
  for (T y :
       plain_projection<T>(merged, w.fc_o_weight, w.fc_o_bias, c.dim_out, h * c.head_dim_v, loop))
    result.output.push_back(static_cast<double>(y));
  for (int64_t head = 0; head < h; ++head)
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t e = 0; e < p.n_q * p.n_kv; ++e)
        result.weights.push_back(
            heads.weights[static_cast<size_t>((b * h + head) * p.n_q * p.n_kv + e)]);
  return result;
}

}  // namespace qkv::test

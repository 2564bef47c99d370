// SPDX-License-Identifier: Apache-2.0
// Gradients of a layer in plain loops: the definition in double, and what float makes of the same
// inputs.
#pragma once
#include <array>
#include <cmath>
#include <vector>

#include "reference.h"
#include "support/layers.h"
#include "support/naive_backward.h"

namespace qkv::test {

/// Row-major; magnitude: the largest sum of the magnitudes of the terms of an element.
struct LayerGradient {
  std::vector<double> values;
  double magnitude = 0;
};

inline constexpr std::array kLayerGradientNames = {
    "q",         "k",           "v",         "fc_q_weight", "fc_q_bias", "fc_k_weight",
    "fc_k_bias", "fc_v_weight", "fc_v_bias", "fc_o_weight", "fc_o_bias"};
using AllLayerGradients = std::array<LayerGradient, 11>;  // in the order of the names

/// Gradients of sum(doutput * output) in T. double: the definition. float: what its rounding costs,
/// rows and columns upwards or downwards.
template <class T>
class PlainLayerBackward {
 public:
  PlainLayerBackward(const LayerProblem& p, const std::vector<double>& doutput, Loop loop)
      : p_(p), c_(p.weights.config), loop_(loop), doutput_(doutput.begin(), doutput.end()) {}

  AllLayerGradients run() {
    const LayerWeights& w = p_.weights;
    const int64_t h = c_.num_heads, h_kv = c_.num_kv_heads;
    const std::vector<double> xq = p_.q.values(), xk = p_.k.values(), xv = p_.v.values();
    std::vector<T> q =
        plain_projection<T>(xq, w.fc_q_weight, w.fc_q_bias, h * c_.head_dim_qk, c_.dim_q, loop_);
    std::vector<T> k =
        plain_projection<T>(xk, w.fc_k_weight, w.fc_k_bias, h_kv * c_.head_dim_qk, c_.dim_k, loop_);
    std::vector<T> v =
        plain_projection<T>(xv, w.fc_v_weight, w.fc_v_bias, h_kv * c_.head_dim_v, c_.dim_v, loop_);
    std::vector<T> dout = times(doutput_, w.fc_o_weight, c_.dim_out, h * c_.head_dim_v).values;
    const auto split = [&](std::vector<T>& x, int64_t heads, int64_t tokens, int64_t dim) {
      return Tensor(x.data(), {p_.batch, heads, tokens, dim},
                    {tokens * heads * dim, dim, heads * dim, 1});
    };
    BackwardInputs in;
    in.q = split(q, h, p_.n_q, c_.head_dim_qk), in.k = split(k, h_kv, p_.n_kv, c_.head_dim_qk);
    in.v = split(v, h_kv, p_.n_kv, c_.head_dim_v), in.dout = split(dout, h, p_.n_q, c_.head_dim_v);
    AttentionOptions o;
    o.mask = p_.options.mask, o.bias = p_.options.bias, o.scale = c_.scale, o.softcap = c_.softcap;
    std::vector<T> out, lse, dq, dk, dv;
    double size_q = 0, size_k = 0, size_v = 0;
    if constexpr (std::is_same_v<T, double>) {
      out = token_major(reference::forward(in.q, in.k, in.v, o).out, h, p_.n_q, c_.head_dim_v);
      const reference::Backward b = reference::backward(in.q, in.k, in.v, in.dout, {}, o);
      dq = token_major(b.dq, h, p_.n_q, c_.head_dim_qk);
      dk = token_major(b.dk, h_kv, p_.n_kv, c_.head_dim_qk);
      dv = token_major(b.dv, h_kv, p_.n_kv, c_.head_dim_v);
    } else {
      const reference::Forward f = NaiveForward<T>(in.q, in.k, in.v, o, loop_).run();
      out = token_major(f.out, h, p_.n_q, c_.head_dim_v);
      lse.assign(f.lse.begin(), f.lse.end());
      in.out = split(out, h, p_.n_q, c_.head_dim_v);
      in.lse = Tensor(lse.data(), {p_.batch, h, p_.n_q});
      const NaiveBackward b = naive_backward<T>(in, o, loop_ == Loop::downwards);
      dq = token_major(b.dq.values, h, p_.n_q, c_.head_dim_qk);
      dk = token_major(b.dk.values, h_kv, p_.n_kv, c_.head_dim_qk);
      dv = token_major(b.dv.values, h_kv, p_.n_kv, c_.head_dim_v);
      size_q = b.dq.magnitude, size_k = b.dk.magnitude, size_v = b.dv.magnitude;
    }
    AllLayerGradients all;
    const auto input = [&](size_t at, const std::vector<T>& dy, const std::vector<float>& weight,
                           int64_t n, int64_t width, double size) {
      const Product x = times(dy, weight, n, width);
      all[at] = {{x.values.begin(), x.values.end()}, x.magnitude};
      double row = 0;  // what an error of dy of its own size becomes
      for (int64_t u = 0; u < width; ++u) {
        double sum = 0;
        for (int64_t j = 0; j < n; ++j)
          sum += std::abs(static_cast<double>(weight[static_cast<size_t>(j * width + u)]));
        row = std::max(row, sum);
      }
      all[at].magnitude = std::max(all[at].magnitude, size * row);
    };
    input(0, dq, w.fc_q_weight, h * c_.head_dim_qk, c_.dim_q, size_q);
    input(1, dk, w.fc_k_weight, h_kv * c_.head_dim_qk, c_.dim_k, size_k);
    input(2, dv, w.fc_v_weight, h_kv * c_.head_dim_v, c_.dim_v, size_v);
    parameters(&all[3], dq, xq, h * c_.head_dim_qk, c_.dim_q, c_.bias_q, size_q);
    parameters(&all[5], dk, xk, h_kv * c_.head_dim_qk, c_.dim_k, c_.bias_k, size_k);
    parameters(&all[7], dv, xv, h_kv * c_.head_dim_v, c_.dim_v, c_.bias_v, size_v);
    parameters(&all[9], doutput_, {out.begin(), out.end()}, c_.dim_out, h * c_.head_dim_v,
               c_.bias_o, 0);
    return all;
  }

 private:
  struct Product {
    std::vector<T> values;
    double magnitude;
  };

  // dy [rows, n] times weight [n, width].
  Product times(const std::vector<T>& dy, const std::vector<float>& weight, int64_t n,
                int64_t width) const {
    Product x{{}, 0};
    for (int64_t i = 0; i < static_cast<int64_t>(dy.size()) / n; ++i) {
      for (int64_t u = 0; u < width; ++u) {
        T sum = 0, size = 0;
        for (int64_t step = 0; step < n; ++step) {
          const int64_t j = loop_ == Loop::downwards ? n - 1 - step : step;
          const T term = dy[static_cast<size_t>(i * n + j)] *
                         static_cast<T>(weight[static_cast<size_t>(j * width + u)]);
          sum += term, size += std::abs(term);
        }
        x.values.push_back(sum);
        if (std::isfinite(size)) x.magnitude = std::max(x.magnitude, static_cast<double>(size));
      }
    }
    return x;
  }

  // Weight [n, width] = dy^T x and bias [n]. A row whose dy is all zero adds nothing. dy_size: an
  // error of dy of its own size adds to the error of each sum.
  void parameters(LayerGradient* to, const std::vector<T>& dy, const std::vector<double>& x,
                  int64_t n, int64_t width, bool has_bias, double dy_size) const {
    const int64_t rows = static_cast<int64_t>(dy.size()) / n;
    std::vector<bool> adds;
    for (int64_t i = 0; i < rows; ++i) {
      adds.push_back(false);
      for (int64_t j = 0; j < n; ++j)
        adds.back() = adds.back() || dy[static_cast<size_t>(i * n + j)] != 0;
    }
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t u = 0; u <= (has_bias ? width : width - 1); ++u) {
        T sum = 0, size = 0, x_size = 0;
        for (int64_t step = 0; step < rows; ++step) {
          const int64_t i = loop_ == Loop::downwards ? rows - 1 - step : step;
          const T factor =
              u == width ? T{1} : static_cast<T>(x[static_cast<size_t>(i * width + u)]);
          if (std::isfinite(factor)) x_size += std::abs(factor);
          if (!adds[static_cast<size_t>(i)]) continue;
          const T term = dy[static_cast<size_t>(i * n + j)] * factor;
          sum += term, size += std::abs(term);
        }
        LayerGradient& g = to[u == width ? 1 : 0];
        g.values.push_back(static_cast<double>(sum));
        for (double m : {static_cast<double>(size), dy_size * static_cast<double>(x_size)})
          if (std::isfinite(m)) g.magnitude = std::max(g.magnitude, m);
      }
    }
  }

  // [batch, heads, tokens, dim] -> [batch, tokens, heads * dim].
  std::vector<T> token_major(const std::vector<double>& x, int64_t heads, int64_t tokens,
                             int64_t dim) const {
    std::vector<T> y;
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t i = 0; i < tokens; ++i)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t d = 0; d < dim; ++d)
            y.push_back(
                static_cast<T>(x[static_cast<size_t>(((b * heads + h) * tokens + i) * dim + d)]));
    return y;
  }

  const LayerProblem& p_;
  const LayerConfig& c_;
  Loop loop_;
  std::vector<T> doutput_;
};

/// What one backward wrote, in guarded memory that was NaN before, in the order of the names.
struct LayerResults {
  std::array<TestTensor, 11> all;

  std::vector<std::vector<std::byte>> bits() const {
    std::vector<std::vector<std::byte>> b;
    for (const TestTensor& t : all) b.push_back(t ? t.bits() : std::vector<std::byte>());
    return b;
  }
  LayerGradients views() const {
    LayerGradients g;
    Tensor* const to[] = {&g.q,         &g.k,           &g.v,         &g.fc_q_weight,
                          &g.fc_q_bias, &g.fc_k_weight, &g.fc_k_bias, &g.fc_v_weight,
                          &g.fc_v_bias, &g.fc_o_weight, &g.fc_o_bias};
    for (size_t i = 0; i < all.size(); ++i) *to[i] = all[i].view();
    return g;
  }
};

inline LayerResults gradients_of(const LayerProblem& p) {
  const LayerConfig& c = p.weights.config;
  const int64_t q = c.num_heads * c.head_dim_qk, k = c.num_kv_heads * c.head_dim_qk,
                v = c.num_kv_heads * c.head_dim_v, o = c.num_heads * c.head_dim_v;
  const auto tensor = [](std::vector<int64_t> shape) { return TestTensor(DType::f32, shape); };
  const auto bias = [&](bool has, int64_t n) { return has ? tensor({n}) : TestTensor(); };
  LayerResults g;
  g.all = {tensor({p.batch, p.n_q, c.dim_q}),
           tensor({p.batch, p.n_kv, c.dim_k}),
           tensor({p.batch, p.n_kv, c.dim_v}),
           tensor({q, c.dim_q}),
           bias(c.bias_q, q),
           tensor({k, c.dim_k}),
           bias(c.bias_k, k),
           tensor({v, c.dim_v}),
           bias(c.bias_v, v),
           tensor({c.dim_out, o}),
           bias(c.bias_o, c.dim_out)};
  return g;
}

inline TestTensor doutput_of(const LayerProblem& p, uint64_t seed = 50) {
  std::mt19937_64 random(seed);
  TestTensor d(DType::f32, {p.batch, p.n_q, p.weights.config.dim_out});
  d.fill_random(random);
  return d;
}

inline LayerResults layer_backward(const AttentionLayer& layer, const LayerProblem& p,
                                   const TestTensor& doutput) {
  LayerResults g = gradients_of(p);
  AttentionLayer::State state;
  layer.forward_training(p.q, p.k, p.v, {}, state, p.options);
  layer.backward(state, doutput, g.views());
  return g;
}

}  // namespace qkv::test

// SPDX-License-Identifier: Apache-2.0
// Tier: call. The sizes of a layer: factories, counts, and the checks of LayerConfig, LayerWeights and
// LayerParameters.
#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>

#include "qkv/layer.h"

namespace qkv {
namespace {

[[noreturn]] void fail(const char* caller, const std::string& text) {
  throw Error(std::string(caller) + ": " + text);
}

/// Products and sums of sizes; overflow is the caller's mistake, not wrap-around.
struct Count {
  const char* caller;
  int64_t mul(int64_t a, int64_t b) const {
    int64_t r = 0;
    if (__builtin_mul_overflow(a, b, &r)) overflow();
    return r;
  }
  int64_t add(int64_t a, int64_t b) const {
    int64_t r = 0;
    if (__builtin_add_overflow(a, b, &r)) overflow();
    return r;
  }
  [[noreturn]] void overflow() const {
    fail(caller, "the sizes are too large: the number of parameters does not fit 64 bits");
  }
};

int64_t count_parameters(const LayerConfig& c, const char* caller) {
  const Count n{caller};
  const int64_t rows_q = n.mul(c.num_heads, c.head_dim_qk);
  const int64_t rows_k = n.mul(c.num_kv_heads, c.head_dim_qk);
  const int64_t rows_v = n.mul(c.num_kv_heads, c.head_dim_v);
  const int64_t columns_o = n.mul(c.num_heads, c.head_dim_v);
  int64_t total = n.mul(rows_q, c.dim_q);
  total = n.add(total, n.mul(rows_k, c.dim_k));
  total = n.add(total, n.mul(rows_v, c.dim_v));
  total = n.add(total, n.mul(columns_o, c.dim_out));
  if (c.bias_q) total = n.add(total, rows_q);
  if (c.bias_k) total = n.add(total, rows_k);
  if (c.bias_v) total = n.add(total, rows_v);
  if (c.bias_o) total = n.add(total, c.dim_out);
  return total;
}

LayerConfig checked(const char* caller, int64_t num_heads, int64_t num_kv_heads, int64_t dim_k,
                    int64_t dim_v, int64_t head_dim_qk, int64_t head_dim_v, int64_t dim_out,
                    int64_t dim_q) {
  LayerConfig config;
  config.num_heads = num_heads;
  config.num_kv_heads = num_kv_heads;
  config.dim_q = dim_q == 0 ? dim_k : dim_q;
  config.dim_k = dim_k;
  config.dim_v = dim_v;
  config.head_dim_qk = head_dim_qk;
  config.head_dim_v = head_dim_v;
  config.dim_out = dim_out;
  config.check(caller);
  return config;
}

}  // namespace

LayerConfig LayerConfig::mha(int64_t num_heads, int64_t dim_k, int64_t dim_v, int64_t head_dim_qk,
                             int64_t head_dim_v, int64_t dim_out, int64_t dim_q) {
  return checked("LayerConfig::mha", num_heads, num_heads, dim_k, dim_v, head_dim_qk, head_dim_v,
                 dim_out, dim_q);
}

LayerConfig LayerConfig::mqa(int64_t num_heads, int64_t dim_k, int64_t dim_v, int64_t head_dim_qk,
                             int64_t head_dim_v, int64_t dim_out, int64_t dim_q) {
  return checked("LayerConfig::mqa", num_heads, 1, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out,
                 dim_q);
}

LayerConfig LayerConfig::gqa(int64_t num_heads, int64_t num_kv_heads, int64_t dim_k, int64_t dim_v,
                             int64_t head_dim_qk, int64_t head_dim_v, int64_t dim_out,
                             int64_t dim_q) {
  return checked("LayerConfig::gqa", num_heads, num_kv_heads, dim_k, dim_v, head_dim_qk, head_dim_v,
                 dim_out, dim_q);
}

int64_t LayerConfig::num_parameters() const {
  return count_parameters(*this, "LayerConfig::num_parameters");
}

int64_t LayerConfig::kv_bytes_per_token(DType dtype) const {
  const Count n{"LayerConfig::kv_bytes_per_token"};
  return n.mul(n.mul(num_kv_heads, n.add(head_dim_qk, head_dim_v)), size_bytes(dtype));
}

void LayerConfig::check(const char* caller) const {
  const struct {
    const char* name;
    int64_t value;
  } sizes[] = {{"num_heads", num_heads},   {"num_kv_heads", num_kv_heads},
               {"dim_q", dim_q},           {"dim_k", dim_k},
               {"dim_v", dim_v},           {"head_dim_qk", head_dim_qk},
               {"head_dim_v", head_dim_v}, {"dim_out", dim_out}};
  for (const auto& size : sizes) {
    if (size.value <= 0) {
      fail(caller,
           std::string(size.name) + " must be at least 1, got " + std::to_string(size.value));
    }
  }
  if (num_heads % num_kv_heads != 0) {
    fail(caller, "num_heads " + std::to_string(num_heads) + " is not a multiple of num_kv_heads " +
                     std::to_string(num_kv_heads));
  }
  if (scale && !std::isfinite(*scale)) {
    fail(caller, "scale must be a finite number, got " + std::to_string(*scale));
  }
  if (!(softcap >= 0 && std::isfinite(softcap))) {
    fail(caller, "softcap must be 0 (none) or a positive number, got " + std::to_string(softcap));
  }
  count_parameters(*this, caller);
}

namespace {

// The four projections of a layer: name, rows, columns, whether there is a bias.
struct Part {
  const char* name;
  int64_t rows, columns;
  bool has_bias;
};

std::array<Part, 4> parts_of(const LayerConfig& c) {
  return {{{"fc_q", c.num_heads * c.head_dim_qk, c.dim_q, c.bias_q},
           {"fc_k", c.num_kv_heads * c.head_dim_qk, c.dim_k, c.bias_k},
           {"fc_v", c.num_kv_heads * c.head_dim_v, c.dim_v, c.bias_v},
           {"fc_o", c.dim_out, c.num_heads * c.head_dim_v, c.bias_o}}};
}

}  // namespace

void LayerWeights::check(const char* caller) const {
  config.check(caller);
  const std::vector<float>* const weights[] = {&fc_q_weight, &fc_k_weight, &fc_v_weight,
                                               &fc_o_weight};
  const std::vector<float>* const biases[] = {&fc_q_bias, &fc_k_bias, &fc_v_bias, &fc_o_bias};
  const std::array<Part, 4> parts = parts_of(config);
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const int64_t shape[] = {part.rows, part.columns};
    if (static_cast<int64_t>(weights[i]->size()) != part.rows * part.columns) {
      fail(caller, std::string(part.name) + "_weight must hold " + shape_text(shape) +
                       " numbers, got " + std::to_string(weights[i]->size()));
    }
    const int64_t bias_size = part.has_bias ? part.rows : 0;
    if (static_cast<int64_t>(biases[i]->size()) != bias_size) {
      fail(caller,
           std::string(part.name) + "_bias must hold " + std::to_string(bias_size) + " numbers (" +
               (part.has_bias ? "one per row of " : "config says that it is absent; ") + part.name +
               "_weight " + shape_text(shape) + "), got " + std::to_string(biases[i]->size()));
    }
  }
}

LayerParameters LayerParameters::of(const LayerWeights& w) {
  w.check("LayerParameters::of");
  const std::array<Part, 4> parts = parts_of(w.config);
  const auto weight = [](const std::vector<float>& x, const Part& p) {
    return ConstTensor(x.data(), {p.rows, p.columns});
  };
  const auto bias = [](const std::vector<float>& x, const Part& p) {
    return p.has_bias ? ConstTensor(x.data(), {p.rows}) : ConstTensor();
  };
  return {w.config,
          weight(w.fc_q_weight, parts[0]),
          bias(w.fc_q_bias, parts[0]),
          weight(w.fc_k_weight, parts[1]),
          bias(w.fc_k_bias, parts[1]),
          weight(w.fc_v_weight, parts[2]),
          bias(w.fc_v_bias, parts[2]),
          weight(w.fc_o_weight, parts[3]),
          bias(w.fc_o_bias, parts[3])};
}

void LayerParameters::check(const char* caller) const {
  config.check(caller);
  const ConstTensor* const weights[] = {&fc_q_weight, &fc_k_weight, &fc_v_weight, &fc_o_weight};
  const ConstTensor* const biases[] = {&fc_q_bias, &fc_k_bias, &fc_v_bias, &fc_o_bias};
  const auto require = [&](const Part& part, const char* what, const ConstTensor& t,
                           std::span<const int64_t> shape) {
    const bool fits = t && t.dtype == DType::f32 && t.data && t.is_contiguous() &&
                      std::equal(shape.begin(), shape.end(), t.shape, t.shape + t.rank);
    if (fits) return;
    fail(caller, std::string(part.name) + what + " must be f32 " + shape_text(shape) +
                     " in C order, got " +
                     (t ? std::string(name(t.dtype)) + " " + shape_text(t) : "none"));
  };
  const std::array<Part, 4> parts = parts_of(config);
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t shape[] = {parts[i].rows, parts[i].columns};
    require(parts[i], "_weight", *weights[i], shape);
    if (parts[i].has_bias) {
      require(parts[i], "_bias", *biases[i], {shape, 1});
    } else if (*biases[i]) {
      fail(caller, std::string(parts[i].name) + "_bias is given " + shape_text(*biases[i]) +
                       ", but config says that it is absent");
    }
  }
}

}  // namespace qkv

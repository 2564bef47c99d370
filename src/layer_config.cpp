// SPDX-License-Identifier: Apache-2.0
// Tier: call. The sizes of a layer: factories, counts, and the checks of LayerConfig and
// LayerWeights.
#include <cmath>
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

void LayerWeights::check(const char* caller) const {
  config.check(caller);
  const int64_t rows_q = config.num_heads * config.head_dim_qk;
  const int64_t rows_k = config.num_kv_heads * config.head_dim_qk;
  const int64_t rows_v = config.num_kv_heads * config.head_dim_v;
  const int64_t columns_o = config.num_heads * config.head_dim_v;
  const struct {
    const char* name;
    const std::vector<float>& weight;
    const std::vector<float>& bias;
    int64_t rows;
    int64_t columns;
    bool has_bias;
  } parts[] = {
      {"fc_q", fc_q_weight, fc_q_bias, rows_q, config.dim_q, config.bias_q},
      {"fc_k", fc_k_weight, fc_k_bias, rows_k, config.dim_k, config.bias_k},
      {"fc_v", fc_v_weight, fc_v_bias, rows_v, config.dim_v, config.bias_v},
      {"fc_o", fc_o_weight, fc_o_bias, config.dim_out, columns_o, config.bias_o},
  };
  for (const auto& part : parts) {
    const int64_t shape[] = {part.rows, part.columns};
    if (static_cast<int64_t>(part.weight.size()) != part.rows * part.columns) {
      fail(caller, std::string(part.name) + "_weight must hold " + shape_text(shape) +
                       " numbers, got " + std::to_string(part.weight.size()));
    }
    const int64_t bias_size = part.has_bias ? part.rows : 0;
    if (static_cast<int64_t>(part.bias.size()) != bias_size) {
      fail(caller,
           std::string(part.name) + "_bias must hold " + std::to_string(bias_size) + " numbers (" +
               (part.has_bias ? "one per row of " : "config says that it is absent; ") + part.name +
               "_weight " + shape_text(shape) + "), got " + std::to_string(part.bias.size()));
    }
  }
}

}  // namespace qkv

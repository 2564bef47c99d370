// SPDX-License-Identifier: Apache-2.0
// Tier: plan. See check.h.
#include "check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "element.h"

namespace qkv {
namespace {

void check_rows(const Check& check, const ConstTensor& rows, const Tensor& row_weights,
                int64_t n_q) {
  if (!rows || !row_weights) {
    check.refuse(fmt::format(
        "outputs.weight_rows and outputs.row_weights go together, got {} and {}",
        rows ? shape_text(rows) : "none", row_weights ? shape_text(row_weights) : "none"));
  }
  if (rows.rank != 1 || rows.dtype != DType::i64 || (!rows.data && rows.shape[0] > 0)) {
    check.refuse(fmt::format("outputs.weight_rows needs indices [n_rows] in i64, got {} {}{}",
                             name(rows.dtype), shape_text(rows), rows.data ? "" : " without data"));
  }
  for (int64_t r = 0; r < rows.shape[0]; ++r) {
    const int64_t row = static_cast<const int64_t*>(rows.data)[r * rows.stride[0]];
    if (row < 0 || row >= n_q) {
      check.refuse(fmt::format("outputs.weight_rows must lie in [0, n_q {}), got {} at index {}",
                               n_q, row, r));
    }
  }
}

}  // namespace

void HeadNumbers::fill(const ConstTensor& t) {
  if (!t) return;
  n_ = t.shape[0];
  if (n_ > kFew) many_.resize(static_cast<size_t>(n_));
  double* to = n_ > kFew ? many_.data() : few_;
  for (int64_t h = 0; h < n_; ++h) to[h] = element(t, h * t.stride[0]);
}

void Check::refuse(const std::string& text) const {
  throw Error(fmt::format("{}: {}", caller_, text));
}

void Check::layout(const ConstTensor& t, const char* what) const {
  if (t.rank > 0 && t.shape[t.rank - 1] > 1 && t.stride[t.rank - 1] != 1) {
    refuse(fmt::format("the last axis of {} must be contiguous, got stride {} for {}", what,
                       t.stride[t.rank - 1], shape_text(t)));
  }
  if (!t.data && t.num_elements() > 0)
    refuse(fmt::format("{} has no data, got {}", what, shape_text(t)));
}

void Check::inputs(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v) const {
  const auto both = [&] {
    return fmt::format("got q {}, k {} and v {}", shape_text(q), shape_text(k), shape_text(v));
  };
  if (q.rank != 4 || k.rank != 4 || v.rank != 4) {
    refuse(fmt::format("q, k and v need 4 axes [batch, heads, tokens, dim], {}", both()));
  }
  if (q.shape[0] != k.shape[0] || q.shape[0] != v.shape[0])
    refuse(fmt::format("batch differs, {}", both()));
  if (k.shape[1] != v.shape[1]) refuse(fmt::format("num_kv_heads of k and v differ, {}", both()));
  if (k.shape[1] == 0 ? q.shape[1] != 0 : q.shape[1] % k.shape[1] != 0) {
    refuse(fmt::format("num_heads {} is not a multiple of num_kv_heads {}, got q {} and k {}",
                       q.shape[1], k.shape[1], shape_text(q), shape_text(k)));
  }
  if (k.shape[2] != v.shape[2]) refuse(fmt::format("n_kv of k and v differ, {}", both()));
  if (q.shape[3] != k.shape[3]) refuse(fmt::format("head_dim_qk of q and k differ, {}", both()));
  const auto types = [&] {
    return fmt::format("got q {}, k {} and v {}", name(q.dtype), name(k.dtype), name(v.dtype));
  };
  for (const ConstTensor* t : {&q, &k, &v}) {
    if (!info(t->dtype).is_float)
      refuse(fmt::format("element types f32, f64, bf16 and f16 are known, {}", types()));
  }
  if (k.dtype != v.dtype || (q.dtype == DType::f64) != (k.dtype == DType::f64)) {
    refuse(
        fmt::format("k and v must have one element type, and f64 goes with f64 only, {}", types()));
  }
  layout(q, "q");
  layout(k, "k");
  layout(v, "v");
}

void Check::shape(const ConstTensor& t, const char* what, std::span<const int64_t> shape,
                  DType dtype) const {
  const ConstTensor expected(static_cast<const void*>(nullptr), dtype, shape);
  bool same = t.rank == expected.rank;
  for (int a = 0; same && a < t.rank; ++a) same = t.shape[a] == expected.shape[a];
  if (!same)
    refuse(fmt::format("{} needs shape {}, got {}", what, shape_text(expected), shape_text(t)));
  if (t.dtype != dtype)
    refuse(fmt::format("{} must be {}, got {}", what, name(dtype), name(t.dtype)));
  if (!t.data && t.num_elements() > 0)
    refuse(fmt::format("{} has no data, got {}", what, shape_text(t)));
}

void Check::output(const ConstTensor& t, const char* what, std::span<const int64_t> shape,
                   DType dtype) const {
  this->shape(t, what, shape, dtype);
  for (int a = 0; a < t.rank; ++a) {
    if (t.stride[a] == 0 && t.shape[a] > 1 && t.num_elements() > 0) {
      refuse(
          fmt::format("{} repeats elements: axis {} of {} has stride 0", what, a, shape_text(t)));
    }
  }
}

void Check::no_forms(const AttentionOutputs& o) const {
  if (o.mean_weights || o.weight_rows || o.row_weights || o.top_weights || o.top_keys ||
      o.column_sums || o.entropy)
    refuse("forms of the weights are not made here");
}

bool Check::outputs(const AttentionOutputs& o, const OutputShape& n, DType out_dtype,
                    DType arithmetic) const {
  if (o.out) {
    n.batch ? output(o.out, "outputs.out", {*n.batch, n.num_heads, n.n_q, n.head_dim_v}, out_dtype)
            : output(o.out, "outputs.out", {n.n_q, n.num_heads, n.head_dim_v}, out_dtype);
    layout(o.out, "outputs.out");
  }
  return forms(o, n, arithmetic);
}

// lse, weights and the forms of weights: head-major, behind a batch axis if there is one.
bool Check::forms(const AttentionOutputs& o, const OutputShape& n, DType arithmetic) const {
  const auto output = [&](const Tensor& t, const char* what, std::initializer_list<int64_t> entry,
                          DType dtype) {
    if (!t) return;
    int64_t shape[4] = {n.batch.value_or(0)};
    std::copy(entry.begin(), entry.end(), shape + 1);
    const std::span all(shape, entry.size() + 1);
    this->output(t, what, n.batch ? all : all.subspan(1), dtype);
  };
  const auto rows = [&](const Tensor& t, const char* what, std::initializer_list<int64_t> entry,
                        DType dtype) {
    if (!t) return;
    output(t, what, entry, dtype);
    layout(t, what);
  };
  output(o.lse, "outputs.lse", {n.num_heads, n.n_q}, arithmetic);
  rows(o.weights, "outputs.weights", {n.num_heads, n.n_q, n.n_kv}, arithmetic);
  rows(o.mean_weights, "outputs.mean_weights", {n.n_q, n.n_kv}, arithmetic);
  if (o.weight_rows || o.row_weights) {
    check_rows(*this, o.weight_rows, o.row_weights, n.n_q);
    rows(o.row_weights, "outputs.row_weights", {n.num_heads, o.weight_rows.shape[0], n.n_kv},
         arithmetic);
  }
  if (o.top_weights || o.top_keys) {
    if (!o.top_weights || !o.top_keys)
      refuse("outputs.top_weights and outputs.top_keys are wanted together or not at all");
    const int rank = n.batch ? 4 : 3;
    const int64_t k = o.top_weights.rank == rank ? o.top_weights.shape[rank - 1] : 0;
    rows(o.top_weights, "outputs.top_weights", {n.num_heads, n.n_q, k}, arithmetic);
    rows(o.top_keys, "outputs.top_keys", {n.num_heads, n.n_q, k}, DType::i64);
  }
  rows(o.column_sums, "outputs.column_sums", {n.num_heads, n.num_keys}, arithmetic);
  output(o.entropy, "outputs.entropy", {n.num_heads, n.n_q}, arithmetic);
  return o.mean_weights || o.row_weights || o.top_weights || o.column_sums || o.entropy;
}

void Check::per_head(const ConstTensor& t, const char* what, int64_t num_heads) const {
  if (!t) return;
  if (t.rank != 1 || t.shape[0] != num_heads || !info(t.dtype).is_float ||
      (!t.data && num_heads > 0)) {
    refuse(fmt::format("{} needs one floating-point number per head, [{}], got {} {}", what,
                       num_heads, name(t.dtype), shape_text(t)));
  }
}

void Check::options(const AttentionOptions& options, const Call& call) const {
  if (call.num_entries == call.batch) {
    options.mask.check(call.mask_shape(), caller_);
  } else {
    options.mask.check(call.mask_shape(), caller_, call.first_entry);
  }
  if (options.bias) {
    if (!info(options.bias.dtype).is_float) {
      refuse(fmt::format("bias must be floating point (a boolean mask goes into mask), got {}",
                         name(options.bias.dtype)));
    }
    check_scores_tensor(options.bias, call.mask_shape(), caller_, "bias");
    if (!options.bias.data && options.bias.num_elements() > 0)
      refuse(fmt::format("bias has no data, got {}", shape_text(options.bias)));
  }
  if (options.scale && !std::isfinite(*options.scale))
    refuse(fmt::format("scale must be finite, got {}", *options.scale));
  if (!(options.softcap >= 0) || std::isinf(options.softcap)) {
    refuse(fmt::format("softcap must be 0 (none) or positive and finite, got {}", options.softcap));
  }
  if (!(options.dropout >= 0 && options.dropout <= 1)) {
    refuse(fmt::format("dropout must lie in [0, 1], got {}", options.dropout));
  }
  if (options.num_threads < 0)
    refuse(fmt::format("num_threads must not be negative, got {}", options.num_threads));
  per_head(options.sinks, "sinks", call.num_heads);
  per_head(options.alibi_slopes, "alibi_slopes", call.num_heads);
}

Call Check::call(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                 const AttentionOptions& options) const {
  return call(q, k, v, options, 0, q.rank > 0 ? q.shape[0] : 0);
}

Call Check::call(const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                 const AttentionOptions& options, int64_t entry, int64_t num_entries) const {
  inputs(q, k, v);
  Call call{};
  call.arithmetic = q.dtype == DType::f64 ? 1 : 0;
  call.batch = q.shape[0], call.num_heads = q.shape[1], call.num_kv_heads = k.shape[1];
  call.group_size = call.num_kv_heads ? call.num_heads / call.num_kv_heads : 1;
  call.n_q = q.shape[2], call.n_kv = k.shape[2];
  call.head_dim_qk = q.shape[3], call.head_dim_v = v.shape[3];
  call.q = q, call.k = k, call.v = v;
  call.options = &options;
  call.first_entry = entry, call.num_entries = num_entries;
  this->options(options, call);
  const double dim = static_cast<double>(call.head_dim_qk);
  call.scale = options.scale ? *options.scale : call.head_dim_qk ? 1.0 / std::sqrt(dim) : 1.0;
  call.sinks.fill(options.sinks);
  call.alibi_slopes.fill(options.alibi_slopes);
  call.kernels = &kernels::active();
  return call;
}

}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// Tier: plan. attention(): checks every argument, then hands a validated Call to the schedule.
// Nothing is written before all checks have passed.
#include "qkv/attention.h"

#include <fmt/format.h>

#include "call.h"
#include "check.h"

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

// The forms of the weights; returns whether there are any.
bool check_forms(const Check& check, const AttentionOutputs& outputs, const Call& call) {
  const AttentionOutputs& o = outputs;
  const DType arithmetic = call.arithmetic ? DType::f64 : DType::f32;
  const auto output = [&](const Tensor& t, const char* what, std::initializer_list<int64_t> shape,
                          DType dtype) {
    check.output(t, what, shape, dtype);
    check.layout(t, what);
  };
  if (o.mean_weights) {
    output(o.mean_weights, "outputs.mean_weights", {call.batch, call.n_q, call.n_kv}, arithmetic);
  }
  if (o.weight_rows || o.row_weights) {
    check_rows(check, o.weight_rows, o.row_weights, call.n_q);
    output(o.row_weights, "outputs.row_weights",
           {call.batch, call.num_heads, o.weight_rows.shape[0], call.n_kv}, arithmetic);
  }
  if (o.top_weights || o.top_keys) {
    if (!o.top_weights || !o.top_keys)
      check.refuse("outputs.top_weights and outputs.top_keys are wanted together or not at all");
    const int64_t k = o.top_weights.rank == 4 ? o.top_weights.shape[3] : 0;
    output(o.top_weights, "outputs.top_weights", {call.batch, call.num_heads, call.n_q, k},
           arithmetic);
    output(o.top_keys, "outputs.top_keys", {call.batch, call.num_heads, call.n_q, k}, DType::i64);
  }
  if (o.column_sums) {
    output(o.column_sums, "outputs.column_sums", {call.batch, call.num_heads, call.n_kv},
           arithmetic);
  }
  if (o.entropy) {
    check.output(o.entropy, "outputs.entropy", {call.batch, call.num_heads, call.n_q}, arithmetic);
  }
  return o.mean_weights || o.row_weights || o.top_weights || o.column_sums || o.entropy;
}

}  // namespace

void attention(ConstTensor q, ConstTensor k, ConstTensor v, const AttentionOutputs& outputs,
               const AttentionOptions& options) {
  const Check check("attention");
  Call call = check.call(q, k, v, options);
  call.out = outputs.out, call.lse = outputs.lse, call.weights = outputs.weights;
  const DType arithmetic = call.arithmetic ? DType::f64 : DType::f32;
  if (outputs.out) {
    check.output(outputs.out, "outputs.out",
                 {call.batch, call.num_heads, call.n_q, call.head_dim_v}, q.dtype);
    check.layout(outputs.out, "outputs.out");
  }
  if (outputs.lse) {
    check.output(outputs.lse, "outputs.lse", {call.batch, call.num_heads, call.n_q}, arithmetic);
  }
  if (outputs.weights) {
    check.output(outputs.weights, "outputs.weights",
                 {call.batch, call.num_heads, call.n_q, call.n_kv}, arithmetic);
    check.layout(outputs.weights, "outputs.weights");
  }
  if (check_forms(check, outputs, call)) call.forms = &outputs;
  run(call);
}

}  // namespace qkv

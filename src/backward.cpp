// SPDX-License-Identifier: Apache-2.0
// Tier: plan. attention_backward(): checks every argument, then hands a validated BackwardCall to
// the schedule. Nothing is written before all checks have passed.
#include "backward.h"

#include <fmt/format.h>

#include "check.h"

namespace qkv {
namespace {

// One number per head, and only if the option is there.
void check_per_head(const Check& check, const Tensor& t, const ConstTensor& option,
                    const char* output_name, const char* option_name, int64_t num_heads,
                    DType dtype) {
  if (!t) return;
  if (!option)
    check.refuse(fmt::format("{} is wanted but there are no {}", output_name, option_name));
  check.output(t, output_name, {num_heads}, dtype);
}

void check_dbias(const Check& check, const Tensor& t, const ConstTensor& bias, DType dtype) {
  if (!t) return;
  if (!bias) check.refuse("outputs.dbias is wanted but there is no bias");
  bool same = t.rank == bias.rank;
  for (int a = 0; same && a < t.rank; ++a) same = t.shape[a] == bias.shape[a];
  if (!same) {
    check.refuse(fmt::format("outputs.dbias needs the shape of the bias, got dbias {} and bias {}",
                             shape_text(t), shape_text(bias)));
  }
  switch (t.rank) {
    case 2:
      return check.output(t, "outputs.dbias", {t.shape[0], t.shape[1]}, dtype);
    case 3:
      return check.output(t, "outputs.dbias", {t.shape[0], t.shape[1], t.shape[2]}, dtype);
    default:
      return check.output(t, "outputs.dbias", {t.shape[0], t.shape[1], t.shape[2], t.shape[3]},
                          dtype);
  }
}

}  // namespace

void attention_backward(const BackwardInputs& inputs, const BackwardOutputs& outputs,
                        const AttentionOptions& options) {
  const Check check("attention_backward");
  BackwardCall b{};
  b.call = check.call(inputs.q, inputs.k, inputs.v, options);
  const Call& c = b.call;
  const DType dtype = inputs.q.dtype, dtype_kv = inputs.k.dtype;
  const DType arithmetic = c.arithmetic ? DType::f64 : DType::f32;
  const auto check_input = [&](const ConstTensor& t, const char* what) {
    check.shape(t, what, {c.batch, c.num_heads, c.n_q, c.head_dim_v}, dtype);
    check.layout(t, what);
  };
  check_input(inputs.out, "inputs.out");
  check_input(inputs.dout, "inputs.dout");
  check.shape(inputs.lse, "inputs.lse", {c.batch, c.num_heads, c.n_q}, arithmetic);
  if (inputs.dlse)
    check.shape(inputs.dlse, "inputs.dlse", {c.batch, c.num_heads, c.n_q}, arithmetic);

  const auto check_output = [&](const Tensor& t, const char* what, const ConstTensor& like,
                                DType type) {
    if (!t) return;
    check.output(t, what, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]}, type);
    check.layout(t, what);
  };
  check_output(outputs.dq, "outputs.dq", inputs.q, dtype);
  check_output(outputs.dk, "outputs.dk", inputs.k, dtype_kv);
  check_output(outputs.dv, "outputs.dv", inputs.v, dtype_kv);
  check_dbias(check, outputs.dbias, options.bias, arithmetic);
  check_per_head(check, outputs.dsinks, options.sinks, "outputs.dsinks", "sinks", c.num_heads,
                 arithmetic);
  check_per_head(check, outputs.dalibi_slopes, options.alibi_slopes, "outputs.dalibi_slopes",
                 "alibi_slopes", c.num_heads, arithmetic);
  if (outputs.dscale) {
    const Tensor& t = outputs.dscale;
    if (t.num_elements() != 1 || t.dtype != arithmetic || !t.data) {
      check.refuse(fmt::format("outputs.dscale needs one element of {}, got {} {}",
                               name(arithmetic), name(t.dtype), shape_text(t)));
    }
  }
  b.out = inputs.out, b.lse = inputs.lse, b.dout = inputs.dout, b.dlse = inputs.dlse;
  b.outputs = outputs;
  run(b);
}

}  // namespace qkv

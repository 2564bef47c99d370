// SPDX-License-Identifier: Apache-2.0
// Tier: plan. attention(): checks every argument, then hands a validated Call to the schedule.
// Nothing is written before all checks have passed.
#include "qkv/attention.h"

#include "call.h"
#include "check.h"

namespace qkv {
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
  if (check.forms(outputs, {call.batch, call.num_heads, call.n_q, call.n_kv}, arithmetic))
    call.forms = &outputs;
  run(call);
}

}  // namespace qkv

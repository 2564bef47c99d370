// SPDX-License-Identifier: Apache-2.0
// Tier: plan. attention(): checks every argument, then hands a validated Call to the schedule.
// Nothing is written before all checks have passed.
#include "qkv/attention.h"

#include "check.h"
#include "output_parts.h"

namespace qkv {
void attention(ConstTensor q, ConstTensor k, ConstTensor v, const AttentionOutputs& outputs,
               const AttentionOptions& options) {
  const Check check("attention");
  Call call = check.call(q, k, v, options);
  const DType arithmetic = call.arithmetic ? DType::f64 : DType::f32;
  const OutputShape shape{call.batch, call.num_heads,  call.n_q,
                          call.n_kv,  call.head_dim_v, call.n_kv};
  call.out = outputs.out, call.lse = outputs.lse, call.weights = outputs.weights;
  std::vector<WeightRow> rows;
  if (check.outputs(outputs, shape, q.dtype, arithmetic)) {
    rows = weight_rows(outputs);
    call.forms = &outputs, call.weight_rows = rows;
  }
  run(call);
}

}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// Tier: plan. attention_double_backward(): checks every argument, then runs the reference's loops.
#include "check.h"
#include "element.h"
#include "qkv/attention.h"
#include "reference.h"

namespace qkv {
namespace {

void store(const std::vector<double>& values, const Tensor& t) {
  if (!t) return;
  size_t next = 0;
  for (int64_t b = 0; b < t.shape[0]; ++b)
    for (int64_t h = 0; h < t.shape[1]; ++h)
      for (int64_t i = 0; i < t.shape[2]; ++i)
        for (int64_t d = 0; d < t.shape[3]; ++d) {
          const int64_t at = b * t.stride[0] + h * t.stride[1] + i * t.stride[2] + d * t.stride[3];
          store_element(t, at, values[next++]);
        }
}

}  // namespace

void attention_double_backward(const DoubleBackwardInputs& inputs,
                               const DoubleBackwardOutputs& outputs,
                               const AttentionOptions& options) {
  const Check check("attention_double_backward");
  const Call c = check.call(inputs.q, inputs.k, inputs.v, options);
  const DType dtype = inputs.q.dtype, dtype_kv = inputs.k.dtype;
  const auto input = [&](const ConstTensor& t, const char* what, const ConstTensor& like,
                         DType type) {
    check.shape(t, what, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]}, type);
    check.layout(t, what);
  };
  const auto output = [&](const Tensor& t, const char* what, const ConstTensor& like, DType type) {
    if (!t) return;
    check.output(t, what, {like.shape[0], like.shape[1], like.shape[2], like.shape[3]}, type);
    check.layout(t, what);
  };
  check.shape(inputs.dout, "inputs.dout", {c.batch, c.num_heads, c.n_q, c.head_dim_v}, dtype);
  check.layout(inputs.dout, "inputs.dout");
  if (inputs.ddq) input(inputs.ddq, "inputs.ddq", inputs.q, dtype);
  if (inputs.ddk) input(inputs.ddk, "inputs.ddk", inputs.k, dtype_kv);
  if (inputs.ddv) input(inputs.ddv, "inputs.ddv", inputs.v, dtype_kv);
  output(outputs.dq, "outputs.dq", inputs.q, dtype);
  output(outputs.dk, "outputs.dk", inputs.k, dtype_kv);
  output(outputs.dv, "outputs.dv", inputs.v, dtype_kv);
  output(outputs.ddout, "outputs.ddout", inputs.dout, dtype);
  const auto g = reference::double_backward(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.ddq,
                                            inputs.ddk, inputs.ddv, options);
  store(g.dq, outputs.dq);
  store(g.dk, outputs.dk);
  store(g.dv, outputs.dv);
  store(g.ddout, outputs.ddout);
}

}  // namespace qkv

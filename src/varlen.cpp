// SPDX-License-Identifier: Apache-2.0
// Tier: plan. attention_varlen(): every sequence is a call on views of the packed rows; all of them are one job.
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "call.h"
#include "check.h"
#include "output_parts.h"
#include "qkv/attention.h"

namespace qkv {
namespace {

const Check kCheck("attention_varlen");

std::vector<int64_t> offsets(const ConstTensor& t, const char* what, int64_t total) {
  if (t.rank != 1 || t.shape[0] < 1 || (t.dtype != DType::i32 && t.dtype != DType::i64) ||
      !t.data) {
    kCheck.refuse(fmt::format("{} needs [num_sequences + 1] integers (i32 or i64), got {} {}", what,
                              name(t.dtype), shape_text(t)));
  }
  std::vector<int64_t> values(static_cast<size_t>(t.shape[0]));
  for (int64_t s = 0; s < t.shape[0]; ++s) {
    values[static_cast<size_t>(s)] = t.dtype == DType::i32
                                         ? static_cast<const int32_t*>(t.data)[s * t.stride[0]]
                                         : static_cast<const int64_t*>(t.data)[s * t.stride[0]];
  }
  if (values.front() != 0 || values.back() != total) {
    kCheck.refuse(
        fmt::format("{} must begin with 0 and end with the number of rows {}, got {} ... {}", what,
                    total, values.front(), values.back()));
  }
  for (size_t s = 1; s < values.size(); ++s) {
    if (values[s] < values[s - 1]) {
      kCheck.refuse(fmt::format("{} must not fall, got {} after {} at index {}", what, values[s],
                                values[s - 1], s));
    }
  }
  return values;
}

// Rows [begin, end) of a packed tensor [total, heads, dim] as [1, heads, tokens, dim].
template <class View>
View sequence(const View& t, int64_t begin, int64_t end) {
  View view = t;
  view.rank = 4;
  view.shape[0] = 1, view.shape[1] = t.shape[1], view.shape[2] = end - begin,
  view.shape[3] = t.shape[2];
  view.stride[0] = 0, view.stride[1] = t.stride[1], view.stride[2] = t.stride[0],
  view.stride[3] = t.stride[2];
  using Byte = std::conditional_t<View::kConst, const char, char>;
  if (t.data) view.data = static_cast<Byte*>(t.data) + begin * t.stride[0] * size_bytes(t.dtype);
  return view;
}

// Results [num_heads, total, ...] with a batch axis in front; likewise [total_q, longest].
Tensor with_batch(Tensor t) {
  if (!t) return t;
  for (int a = t.rank; a > 0; --a) t.shape[a] = t.shape[a - 1], t.stride[a] = t.stride[a - 1];
  t.shape[0] = 1, t.stride[0] = 0;
  ++t.rank;
  return t;
}

// The outputs of one batch entry whose queries are those of all sequences.
AttentionOutputs with_batch(const AttentionOutputs& packed) {
  AttentionOutputs o = packed;
  if (o.out) o.out = sequence(o.out, 0, o.out.shape[0]);
  for (Tensor* t : {&o.lse, &o.weights, &o.mean_weights, &o.row_weights, &o.top_weights,
                    &o.top_keys, &o.column_sums, &o.entropy})
    *t = with_batch(*t);
  return o;
}

}  // namespace

void attention_varlen(ConstTensor q, ConstTensor k, ConstTensor v, ConstTensor cu_seqlens_q,
                      ConstTensor cu_seqlens_kv, const AttentionOutputs& outputs,
                      const AttentionOptions& options) {
  if (q.rank != 3 || k.rank != 3 || v.rank != 3) {
    kCheck.refuse(fmt::format("q, k and v need 3 axes [total, heads, dim], got q {}, k {} and v {}",
                              shape_text(q), shape_text(k), shape_text(v)));
  }
  if (k.shape[0] != v.shape[0]) {
    kCheck.refuse(
        fmt::format("k and v differ in rows, got k {} and v {}", shape_text(k), shape_text(v)));
  }
  const std::vector<int64_t> at_q = offsets(cu_seqlens_q, "cu_seqlens_q", q.shape[0]);
  const std::vector<int64_t> at_kv = offsets(cu_seqlens_kv, "cu_seqlens_kv", k.shape[0]);
  if (at_q.size() != at_kv.size()) {
    kCheck.refuse(fmt::format("cu_seqlens_q and cu_seqlens_kv differ in length, got {} and {}",
                              shape_text(cu_seqlens_q), shape_text(cu_seqlens_kv)));
  }
  const int64_t sequences = static_cast<int64_t>(at_q.size()) - 1;
  int64_t longest = 0;
  for (size_t s = 1; s < at_kv.size(); ++s) longest = std::max(longest, at_kv[s] - at_kv[s - 1]);
  kCheck.outputs(outputs, {{}, q.shape[1], q.shape[0], longest, v.shape[2], k.shape[0]}, q.dtype,
                 q.dtype == DType::f64 ? DType::f64 : DType::f32);

  const AttentionOutputs entry = with_batch(outputs);
  OutputParts parts(entry);
  std::vector<Call> calls;
  std::vector<OutputPart> all;
  calls.reserve(static_cast<size_t>(sequences));
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t q0 = at_q[static_cast<size_t>(s)], q1 = at_q[static_cast<size_t>(s) + 1];
    const int64_t k0 = at_kv[static_cast<size_t>(s)], k1 = at_kv[static_cast<size_t>(s) + 1];
    Call call = kCheck.call(sequence(q, q0, q1), sequence(k, k0, k1), sequence(v, k0, k1), options,
                            s, sequences);
    parts.use(all.emplace_back(OutputPart{0, 1, q0, q1 - q0, k0, k1 - k0}), &call);
    calls.push_back(call);
  }
  run(calls);
  for (const OutputPart& part : all) parts.clear_keys(part);
}

}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// Tier: plan. See entry_calls.h. Entries that are alike are one call; others are a call each, in one
// job, so that the bits of an entry never depend on the entries beside it.
#include "entry_calls.h"

#include <fmt/format.h>

#include <deque>

#include "output_parts.h"
#include "task.h"

namespace qkv {
namespace {

// Rows of some batch entries of q.
ConstTensor rows_of(ConstTensor q, int64_t entry, int64_t entries, const EntryWork& e) {
  if (q.data) q.data = element_pointer(q, entry * q.stride[0] + e.first_row * q.stride[2]);
  q.shape[0] = entries, q.shape[2] = e.n_rows;
  return q;
}

// [batch, num_kv_heads, n_kv, dim]: stands for keys that lie in segments. Nothing reads it.
ConstTensor stand_in(const KvSizes& s, int64_t batch, int64_t n_kv, int64_t dim, int64_t row_stride,
                     DType dtype) {
  static const double kNothing = 0;
  const int64_t shape[] = {batch, s.num_kv_heads, n_kv, dim}, stride[] = {0, 0, row_stride, 1};
  return {&kNothing, dtype, shape, stride};
}

}  // namespace

void EntryCalls::check_query(const ConstTensor& q) const {
  const auto batch = static_cast<int64_t>(entries.size());
  if (q.rank != 4 || q.shape[0] != batch || q.shape[3] != keys.head_dim_qk)
    check.refuse(fmt::format("q needs shape [{}, num_heads, n_q, {}], got {}", batch,
                             keys.head_dim_qk, shape_text(q)));
  if (keys.num_kv_heads == 0 ? q.shape[1] != 0 : q.shape[1] % keys.num_kv_heads != 0)
    check.refuse(fmt::format("num_heads {} is not a multiple of num_kv_heads {}, got q {}",
                             q.shape[1], keys.num_kv_heads, shape_text(q)));
  if (!info(q.dtype).is_float)
    check.refuse(fmt::format("q must be floating point, got {}", name(q.dtype)));
  check.layout(q, "q");
}

void EntryCalls::run(const ConstTensor& q, DType out_dtype, const AttentionOutputs& outputs,
                     const AttentionOptions& options) const {
  check_query(q);
  const int64_t batch = q.shape[0], num_heads = q.shape[1], n_q = q.shape[2];
  const DType arithmetic = q.dtype == DType::f64 ? DType::f64 : DType::f32;
  check.outputs(outputs, {batch, num_heads, n_q, longest, keys.head_dim_v, longest}, out_dtype,
                arithmetic);

  bool alike = same_mask;
  for (const EntryWork& e : entries)
    alike &=
        e.n_kv == longest && e.first_row == entries[0].first_row && e.n_rows == entries[0].n_rows;
  std::vector<EntryKeys> all_keys;
  for (const EntryWork& e : entries) all_keys.push_back(e.keys);
  std::deque<AttentionOptions> all_options;
  OutputParts parts(outputs);
  std::vector<Call> calls;
  const MaskShape arrays{batch, num_heads, n_q, longest};
  const DType kv_dtype = keys.dtype == DType::i8 ? DType::f32 : keys.dtype;
  const auto add = [&](int64_t first, int64_t n) {
    const EntryWork& e = entries[static_cast<size_t>(first)];
    AttentionOptions& o = all_options.emplace_back(options);
    o.mask = e.mask & given_mask;
    if (!alike || e.n_rows != n_q) {
      o.mask = Mask::Term::narrowed(o.mask, arrays, e.first_row, e.n_rows, e.n_kv);
      if (o.bias && o.bias.rank >= 2)
        o.bias = narrow_scores(o.bias, arrays, e.first_row, e.n_rows, e.n_kv);
    }
    Call call = check.call(rows_of(q, first, n, e),
                           stand_in(keys, n, e.n_kv, keys.head_dim_qk, keys.k_row_stride, kv_dtype),
                           stand_in(keys, n, e.n_kv, keys.head_dim_v, keys.v_row_stride, kv_dtype),
                           o, first, batch);
    call.k.dtype = call.v.dtype = keys.dtype;
    call.keys = all_keys.data() + first;
    parts.use({first, n, e.first_row, e.n_rows, 0, e.n_kv}, &call);
    calls.push_back(call);
  };
  if (alike) {
    if (batch > 0) add(0, batch);
  } else {
    for (int64_t b = 0; b < batch; ++b) add(b, 1);
  }
  qkv::run(calls);
  for (int64_t b = 0; b < batch; ++b) {
    const EntryWork& e = entries[static_cast<size_t>(b)];
    parts.clear_keys({b, 1, e.first_row, e.n_rows, 0, e.n_kv});
    parts.clear_columns(b, e.n_kv);
    parts.clear_rows(b, 0, e.first_row, options.sinks);
    const int64_t behind = e.first_row + e.n_rows;
    parts.clear_rows(b, behind, n_q - behind, options.sinks);
  }
}

}  // namespace qkv

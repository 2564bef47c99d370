// SPDX-License-Identifier: Apache-2.0
// Tier: plan. See entry_calls.h. Entries that are alike are one call; others are a call each, in one
// job, so that the bits of an entry never depend on the entries beside it.
#include "entry_calls.h"

#include <fmt/format.h>

#include <deque>
#include <limits>

#include "element.h"

namespace qkv {
namespace {

// Rows of every batch entry of t, or of one entry.
template <class View>
View rows_of(View t, int64_t entry, int64_t entries, int64_t first, int64_t n) {
  if (!t) return t;
  using Byte = std::conditional_t<View::kConst, const char, char>;
  const int64_t offset = entry * t.stride[0] + first * t.stride[2];
  if (t.data) t.data = static_cast<Byte*>(t.data) + offset * size_bytes(t.dtype);
  t.shape[0] = entries, t.shape[2] = n;
  return t;
}

// The forms of the weights of some rows and keys of some entries.
AttentionOutputs forms_of(const AttentionOutputs& all, int64_t entry, int64_t entries,
                          int64_t first, int64_t n, int64_t n_kv) {
  AttentionOutputs part;
  part.top_weights = rows_of(all.top_weights, entry, entries, first, n);
  part.top_keys = rows_of(all.top_keys, entry, entries, first, n);
  part.entropy = rows_of(all.entropy, entry, entries, first, n);
  part.column_sums = rows_of(all.column_sums, entry, entries, 0, n_kv);  // axis 2 are keys
  if (const Tensor& mean = all.mean_weights) {                           // [batch, n_q, n_kv]
    part.mean_weights = rows_of(mean, entry, entries, 0, n_kv);
    part.mean_weights.shape[1] = n;
    if (mean.data)
      part.mean_weights.data = static_cast<char*>(part.mean_weights.data) +
                               first * mean.stride[1] * size_bytes(mean.dtype);
  }
  return part;
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
  if (outputs.out) {
    check.output(outputs.out, "outputs.out", {batch, num_heads, n_q, keys.head_dim_v}, out_dtype);
    check.layout(outputs.out, "outputs.out");
  }
  if (outputs.lse) check.output(outputs.lse, "outputs.lse", {batch, num_heads, n_q}, arithmetic);
  if (outputs.weights) {
    check.output(outputs.weights, "outputs.weights", {batch, num_heads, n_q, longest}, arithmetic);
    check.layout(outputs.weights, "outputs.weights");
  }
  if (outputs.weight_rows || outputs.row_weights)
    check.refuse("row_weights are made by attention() only");
  const bool has_forms = check.forms(outputs, {batch, num_heads, n_q, longest}, arithmetic);

  bool alike = same_mask;
  for (const EntryWork& e : entries)
    alike &=
        e.n_kv == longest && e.first_row == entries[0].first_row && e.n_rows == entries[0].n_rows;
  std::vector<EntryKeys> all_keys;
  for (const EntryWork& e : entries) all_keys.push_back(e.keys);
  std::deque<AttentionOptions> all_options;
  std::deque<AttentionOutputs> all_forms;
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
    Call call = check.call(rows_of(q, first, n, e.first_row, e.n_rows),
                           stand_in(keys, n, e.n_kv, keys.head_dim_qk, keys.k_row_stride, kv_dtype),
                           stand_in(keys, n, e.n_kv, keys.head_dim_v, keys.v_row_stride, kv_dtype),
                           o, first, batch);
    call.k.dtype = call.v.dtype = keys.dtype;
    call.keys = all_keys.data() + first;
    call.out = rows_of(outputs.out, first, n, e.first_row, e.n_rows);
    call.lse = rows_of(outputs.lse, first, n, e.first_row, e.n_rows);
    call.weights = rows_of(outputs.weights, first, n, e.first_row, e.n_rows);
    if (call.weights) call.weights.shape[3] = e.n_kv;
    if (has_forms) {
      call.forms =
          &all_forms.emplace_back(forms_of(outputs, first, n, e.first_row, e.n_rows, e.n_kv));
    }
    calls.push_back(call);
  };
  if (alike) {
    if (batch > 0) add(0, batch);
  } else {
    for (int64_t b = 0; b < batch; ++b) add(b, 1);
  }
  qkv::run(calls);
  clear_padding(q, outputs, options);
}

// Rows of padding, and weights of keys that an entry does not have.
void EntryCalls::clear_padding(const ConstTensor& q, const AttentionOutputs& outputs,
                               const AttentionOptions& options) const {
  const double none = -std::numeric_limits<double>::infinity();
  const auto clear = [](const Tensor& t, int64_t offset, int64_t n) {
    for (int64_t d = 0; d < n; ++d) store_element(t, offset + d * t.stride[3], 0);
  };
  for (int64_t b = 0; b < q.shape[0]; ++b) {
    const EntryWork& e = entries[static_cast<size_t>(b)];
    if (e.n_rows == q.shape[2] && e.n_kv == longest) continue;
    clear_forms(outputs, b, e);
    for (int64_t h = 0; h < q.shape[1]; ++h)
      for (int64_t i = 0; i < q.shape[2]; ++i) {
        const bool is_padding = i < e.first_row || i >= e.first_row + e.n_rows;
        const auto at = [&](const Tensor& t) {
          return b * t.stride[0] + h * t.stride[1] + i * t.stride[2];
        };
        if (outputs.weights) {
          const int64_t from = is_padding ? 0 : e.n_kv, step = outputs.weights.stride[3];
          clear(outputs.weights, at(outputs.weights) + from * step, longest - from);
        }
        if (!is_padding) continue;
        if (outputs.out) clear(outputs.out, at(outputs.out), keys.head_dim_v);
        if (outputs.lse)
          store_element(outputs.lse, at(outputs.lse),
                        options.sinks ? element(options.sinks, h * options.sinks.stride[0]) : none);
      }
  }
}

// The same of the forms of the weights.
void EntryCalls::clear_forms(const AttentionOutputs& o, int64_t b, const EntryWork& e) const {
  const auto clear = [](const Tensor& t, int64_t offset, int64_t n) {
    for (int64_t d = 0; d < n; ++d) store_element(t, offset + d, 0);
  };
  for (int64_t h = 0; o.column_sums && h < o.column_sums.shape[1]; ++h)
    clear(o.column_sums, b * o.column_sums.stride[0] + h * o.column_sums.stride[1] + e.n_kv,
          longest - e.n_kv);
  const auto is_padding = [&](int64_t i) { return i < e.first_row || i >= e.first_row + e.n_rows; };
  for (int64_t i = 0; o.mean_weights && i < o.mean_weights.shape[1]; ++i) {
    const int64_t from = is_padding(i) ? 0 : e.n_kv;
    clear(o.mean_weights, b * o.mean_weights.stride[0] + i * o.mean_weights.stride[1] + from,
          longest - from);
  }
  const auto each_row = [&](const Tensor& t, auto f) {
    for (int64_t h = 0; t && h < t.shape[1]; ++h)
      for (int64_t i = 0; i < t.shape[2]; ++i)
        if (is_padding(i)) f(b * t.stride[0] + h * t.stride[1] + i * t.stride[2]);
  };
  each_row(o.entropy, [&](int64_t at) { clear(o.entropy, at, 1); });
  each_row(o.top_weights, [&](int64_t at) { clear(o.top_weights, at, o.top_weights.shape[3]); });
  each_row(o.top_keys, [&](int64_t at) {
    for (int64_t n = 0; n < o.top_keys.shape[3]; ++n)
      static_cast<int64_t*>(o.top_keys.data)[at + n] = -1;
  });
}

}  // namespace qkv

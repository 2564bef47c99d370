// SPDX-License-Identifier: Apache-2.0
// Tier: plan. See output_parts.h.
#include "output_parts.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "element.h"
#include "task.h"

namespace qkv {
namespace {

// Rows [first, first + n) of axis 2 of some batch entries.
Tensor rows_of(Tensor t, int64_t entry, int64_t entries, int64_t first, int64_t n) {
  if (!t) return t;
  if (t.data) t.data = element_pointer(t, entry * t.stride[0] + first * t.stride[2]);
  t.shape[0] = entries, t.shape[2] = n;
  return t;
}

// [batch, n_q, n_kv] as [batch, 1, n_q, n_kv], and back.
Tensor with_head(Tensor t) {
  if (!t) return t;
  t.shape[3] = t.shape[2], t.shape[2] = t.shape[1], t.shape[1] = 1;
  t.stride[3] = t.stride[2], t.stride[2] = t.stride[1], t.stride[1] = 0;
  t.rank = 4;
  return t;
}
Tensor without_head(Tensor t) {
  if (!t) return t;
  t.shape[1] = t.shape[2], t.shape[2] = t.shape[3];
  t.stride[1] = t.stride[2], t.stride[2] = t.stride[3];
  t.rank = 3;
  return t;
}

// Sets every byte of the elements [from, end) of the last axis of rows [first, first + n).
void fill_bytes(const Tensor& t, int64_t entry, int64_t first, int64_t n, int64_t from, int byte) {
  if (!t || from >= t.shape[3]) return;
  const auto bytes = static_cast<size_t>((t.shape[3] - from) * size_bytes(t.dtype));
  for (int64_t h = 0; h < t.shape[1]; ++h)
    for (int64_t i = first; i < first + n; ++i)
      std::memset(
          element_pointer(t, entry * t.stride[0] + h * t.stride[1] + i * t.stride[2] + from), byte,
          bytes);
}

// Sets rows [first, first + n) of [batch, num_heads, n_q]; f(h) is the value.
template <class F>
void fill_numbers(const Tensor& t, int64_t entry, int64_t first, int64_t n, F f) {
  for (int64_t h = 0; t && h < t.shape[1]; ++h)
    for (int64_t i = first; i < first + n; ++i)
      store_element(t, entry * t.stride[0] + h * t.stride[1] + i * t.stride[2], f(h));
}

bool is_earlier(const WeightRow& a, const WeightRow& b) { return a.token < b.token; }

}  // namespace

std::vector<WeightRow> weight_rows(const AttentionOutputs& outputs) {
  std::vector<WeightRow> rows;
  const ConstTensor& t = outputs.weight_rows;
  if (!t) return rows;
  for (int64_t slot = 0; slot < t.shape[0]; ++slot)
    rows.push_back({slot, static_cast<const int64_t*>(t.data)[slot * t.stride[0]]});
  return rows;
}

OutputParts::OutputParts(const AttentionOutputs& o)
    : outputs_(o),
      mean_(with_head(o.mean_weights)),
      has_forms_(o.mean_weights || o.row_weights || o.top_weights || o.column_sums || o.entropy),
      rows_(weight_rows(o)) {
  std::stable_sort(rows_.begin(), rows_.end(), is_earlier);
}

std::span<const WeightRow> OutputParts::rows_in(int64_t first, int64_t n) const {
  const auto at = [&](int64_t token) {
    return std::lower_bound(rows_.begin(), rows_.end(), WeightRow{0, token}, is_earlier);
  };
  return {at(first), at(first + n)};
}

void OutputParts::use(const OutputPart& p, Call* call) {
  const AttentionOutputs& o = outputs_;
  const auto rows = [&](const Tensor& t) {
    return rows_of(t, p.entry, p.entries, p.first_row, p.n_rows);
  };
  const auto keys = [&](Tensor t) {
    if (t) t.shape[3] = p.n_kv;
    return t;
  };
  call->out = rows(o.out), call->lse = rows(o.lse), call->weights = keys(rows(o.weights));
  if (!has_forms_) return;
  AttentionOutputs& f = forms_.emplace_back();
  f.mean_weights = without_head(keys(rows(mean_)));
  f.top_weights = rows(o.top_weights), f.top_keys = rows(o.top_keys);
  f.entropy = rows(o.entropy);
  f.column_sums = rows_of(o.column_sums, p.entry, p.entries, p.first_column, p.n_kv);
  if (const std::span<const WeightRow> own = rows_in(p.first_row, p.n_rows); !own.empty()) {
    std::vector<WeightRow>& mine = call_rows_.emplace_back(own.begin(), own.end());
    // By slot: rows that follow each other in both are made together.
    std::sort(mine.begin(), mine.end(),
              [](const WeightRow& a, const WeightRow& b) { return a.slot < b.slot; });
    for (WeightRow& row : mine) row.token -= p.first_row;
    f.row_weights = keys(rows_of(o.row_weights, p.entry, p.entries, 0, o.row_weights.shape[2]));
    call->weight_rows = mine;
  }
  call->forms = &f;
}

void OutputParts::clear_weights(int64_t entry, int64_t first, int64_t n, int64_t first_key) const {
  fill_bytes(outputs_.weights, entry, first, n, first_key, 0);
  fill_bytes(mean_, entry, first, n, first_key, 0);
  for (const WeightRow& row : rows_in(first, n))
    fill_bytes(outputs_.row_weights, entry, row.slot, 1, first_key, 0);
}

void OutputParts::clear_keys(const OutputPart& p) const {
  for (int64_t b = p.entry; b < p.entry + p.entries; ++b)
    clear_weights(b, p.first_row, p.n_rows, p.n_kv);
}

void OutputParts::clear_columns(int64_t entry, int64_t first) const {
  const Tensor& t = outputs_.column_sums;
  if (!t || first >= t.shape[2]) return;
  for (int64_t h = 0; h < t.shape[1]; ++h)
    std::memset(element_pointer(t, entry * t.stride[0] + h * t.stride[1] + first), 0,
                static_cast<size_t>((t.shape[2] - first) * size_bytes(t.dtype)));
}

void OutputParts::clear_rows(int64_t entry, int64_t first, int64_t n,
                             const ConstTensor& sinks) const {
  if (n <= 0) return;
  const AttentionOutputs& o = outputs_;
  clear_weights(entry, first, n, 0);
  fill_bytes(o.out, entry, first, n, 0, 0);
  fill_bytes(o.top_weights, entry, first, n, 0, 0);
  fill_bytes(o.top_keys, entry, first, n, 0, 0xFF);  // -1
  fill_numbers(o.entropy, entry, first, n, [](int64_t) { return 0.0; });
  fill_numbers(o.lse, entry, first, n, [&](int64_t h) {
    return sinks ? element(sinks, h * sinks.stride[0]) : -std::numeric_limits<double>::infinity();
  });
}

}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Outputs that several calls share: which part each of them writes, and what none does.
// For entries and packed sequences of different lengths.
#pragma once
#include <cstdint>
#include <deque>
#include <vector>

#include "call.h"

namespace qkv {

/// What weight_rows asks for, in its order.
std::vector<WeightRow> weight_rows(const AttentionOutputs& outputs);

/// What one call writes: some query rows of some batch entries, with their first n_kv keys. Its keys
/// are the columns [first_column, first_column + n_kv) of column_sums.
struct OutputPart {
  int64_t entry, entries;
  int64_t first_row, n_rows;
  int64_t first_column, n_kv;
};

class OutputParts {
 public:
  /// Checked outputs with a batch axis: [batch, num_heads, n_q, ...].
  explicit OutputParts(const AttentionOutputs& outputs);

  /// Points a call to its part; what it points to lives as long as this object.
  void use(const OutputPart& part, Call* call);
  /// Weights of the part's rows for keys behind its own: 0.
  void clear_keys(const OutputPart& part) const;
  /// The columns [first, end of column_sums) of an entry: 0.
  void clear_columns(int64_t entry, int64_t first) const;
  /// Query rows that no call has: out, weights and entropy 0, top_keys -1, lse that of an empty row.
  void clear_rows(int64_t entry, int64_t first, int64_t n, const ConstTensor& sinks) const;

 private:
  // weight_rows in [first, first + n), by token.
  std::span<const WeightRow> rows_in(int64_t first, int64_t n) const;
  void clear_weights(int64_t entry, int64_t first, int64_t n, int64_t first_key) const;

  const AttentionOutputs& outputs_;
  const Tensor mean_;  // mean_weights as [batch, 1, n_q, n_kv]
  const bool has_forms_;
  std::vector<WeightRow> rows_;         // by token
  std::deque<AttentionOutputs> forms_;  // of the calls
  std::deque<std::vector<WeightRow>> call_rows_;
};

}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// Tier: plan. Attention of a batch whose entries have their keys in segments and may differ in length:
// what KvCache::attend() and attention_paged() share.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "call.h"
#include "check.h"
#include "kv_block.h"

namespace qkv {

/// One batch entry: its keys, and which rows of q are its queries (the others are padding).
struct EntryWork {
  EntryKeys keys;
  int64_t n_kv;
  int64_t first_row, n_rows;
  Mask mask;  // without options.mask
};

struct EntryCalls {
  Check check;
  KvSizes keys;
  std::span<const EntryWork> entries;
  bool same_mask;   // the masks of all entries are one
  Mask given_mask;  // combined with that of each entry; dense arrays are [.., n_q, longest]
  int64_t longest;  // n_kv of arrays and of outputs

  /// Throws Error unless q is [batch, num_heads, n_q, head_dim_qk] and fits the keys.
  void check_query(const ConstTensor& q) const;
  /// Checks all that is left, then attends. q may be in another type than the outputs
  /// (out_dtype): it was prepared.
  void run(const ConstTensor& q, DType out_dtype, const AttentionOutputs& outputs,
           const AttentionOptions& options) const;
};

}  // namespace qkv

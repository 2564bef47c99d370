// SPDX-License-Identifier: Apache-2.0
// Tier: plan. One validated call of attention(): numbers only, nothing left to check.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "mask_terms.h"
#include "qkv/attention.h"

namespace qkv {

/// Where the keys of one batch entry lie: segments of KV head 0; those of head h_kv begin
/// h_kv * k_head_bytes (v_head_bytes, head_scales) behind. They hold all keys that its rows see.
struct EntryKeys {
  const kernels::KvSegment* segments;
  int64_t n_segments;
  int64_t k_head_bytes, v_head_bytes, head_scales;
};

/// A number per head, kept by the call itself; no allocation up to 64 heads.
class HeadNumbers {
 public:
  HeadNumbers() {}                  // NOLINT: few_ is not cleared
  void fill(const ConstTensor& t);  // nothing if t is not given. check.cpp
  const double* data() const { return n_ == 0 ? nullptr : many_.empty() ? few_ : many_.data(); }

 private:
  static constexpr int64_t kFew = 64;
  int64_t n_ = 0;
  double few_[kFew];
  std::vector<double> many_;
};

/// Row `slot` of row_weights holds query row `token`.
struct WeightRow {
  int64_t slot, token;
};

struct Call {
  const kernels::KernelTable* kernels;
  int arithmetic;  // 0: f32, 1: f64; index into the kernel table
  int64_t batch, num_heads, num_kv_heads, group_size, n_q, n_kv, head_dim_qk, head_dim_v;
  ConstTensor q, k, v;
  const EntryKeys* keys;  // [batch], or nullptr: k and v. Of k and v only type and row stride count
  Tensor out, lse, weights;
  const AttentionOutputs* forms;           // of the weights; nullptr: none is wanted
  std::span<const WeightRow> weight_rows;  // the rows of forms->row_weights that this call writes
  const AttentionOptions* options;
  double scale;
  HeadNumbers sinks, alibi_slopes;

  // What the mask calls batch entries: entry first_entry + b of num_entries is this call's b. A sequence of a packed batch
  // is a call of one entry.
  int64_t first_entry, num_entries;

  MaskShape mask_shape() const { return {num_entries, num_heads, n_q, n_kv}; }
  int64_t arithmetic_bytes() const { return arithmetic == 0 ? 4 : 8; }
};

/// How the rows of a call are cut into tasks. Depends on the shape (not the batch) and the
/// instruction set alone, so that the bits of a row depend on neither threads nor batch.
struct Cut {
  bool is_decode;      // head dim in the lanes
  int64_t task_rows;   // rows (token, head of the group) of a task
  int64_t row_blocks;  // per (batch, KV head)
  int64_t kv_splits;
  int64_t split_keys;  // keys per split, a multiple of the key block
};
Cut cut(const kernels::KernelTable& table, int arithmetic, int64_t num_kv_heads, int64_t rows,
        int64_t n_kv);  // plan.cpp

/// Threads worth waking for this much work. plan.cpp.
int useful_threads(int64_t flop, int64_t items, int num_threads);
/// Items that go out together: about 50 us of work. plan.cpp.
int64_t items_per_ticket(int64_t item_flop);

/// Tokens of a task of KvCache::append(), by the elements of a token of all entries. plan.cpp.
int64_t append_task_tokens(int64_t token_elements);
/// Threads worth waking for such tasks. is_copy: no conversion, norm or rope. plan.cpp.
int append_threads(int64_t task_elements, bool is_copy, int64_t tasks, int num_threads);

/// True if a form of the weights is made after the rows: what sums over rows or heads, or is wanted for
/// some rows only. It needs the softmax state of every row.
inline bool needs_states(const Call& call) {
  return call.forms &&
         (call.forms->mean_weights || call.forms->column_sums || call.forms->row_weights);
}

/// Runs a call, or several with the same options as one job. schedule.cpp.
void run(const Call& call);
void run(std::span<const Call> calls);

}  // namespace qkv

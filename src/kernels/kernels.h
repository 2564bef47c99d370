// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. The written contract of every kernel: this is all that the schedule knows of the code in this folder.
//
// Rules of this folder: everything inside Highway's per-target namespace; include only <cstddef>, <cstdint>, <utility>,
// Highway and sibling files (inline copies of other templates would leak out of an object compiled for a newer instruction
// set); no allocation, no locks, no globals. Kernels are noexcept and never read an element outside the extents given here.
#pragma once
#include <cstddef>
#include <cstdint>

#include "qkv/dtype.h"
#include "qkv/mask.h"

namespace qkv::kernels {

/// A run of keys whose K and V rows are equally spaced. Keys [begin, begin + count) of the sequence.
struct KvSegment {
  const void* k;  // row of key `begin`
  const void* v;
  int64_t begin;
  int64_t count;
};

/// One dense term added to the scores of this (batch, KV head): element (token, head of the group, key) is at
/// data + token * token_stride + head * head_stride + key * key_stride (elements). boolean: true = 0, false = -inf.
struct DenseTerm {
  const void* data;
  DType dtype;
  int64_t token_stride;
  int64_t head_stride;
  int64_t key_stride;
};

/// Attention of some query tokens of one (batch, KV head) against a range of keys.
///
/// Row r is (token r / group_size, head r % group_size of the group): MHA, GQA and MQA are one code path.
/// For row r:  s_j = scale * q_r . k_j ; softcap ; + dense terms ; - slope |p - j| ; hidden keys -inf
///             out_r = sum_j exp(s_j) v_j / sum_j exp(s_j) over its visible keys in [kv_begin, kv_end).
struct AttentionTask {
  // Query rows: element (t, h, d) at q + t * q_token_stride + h * q_head_stride + d.
  const void* q;
  DType q_dtype;
  int64_t q_token_stride, q_head_stride;
  int64_t n_tokens;
  int64_t group_size;
  int64_t head_dim_qk, head_dim_v;

  // Keys and values.
  const KvSegment* segments;  // ascending, without gaps, covering [kv_begin, kv_end)
  int64_t n_segments;
  int64_t k_row_stride, v_row_stride;
  DType kv_dtype;
  int64_t kv_begin, kv_end;

  // Scores.
  double scale;
  double softcap;              // 0: none
  const RowRange* ranges;      // [n_tokens] visible keys of each token; nullptr: [kv_begin, kv_end)
  const DenseTerm* dense;
  int64_t n_dense;
  const int32_t* q_ids;        // [n_tokens] and [n_kv]: visible only if equal; nullptr: no documents
  const int32_t* kv_ids;
  const double* alibi_slopes;  // [group_size] or nullptr
  int64_t first_position;      // p of token 0, for ALiBi
  const double* sinks;         // [group_size] natural-log logits, or nullptr

  // Dropout: weight (b, h, i, j) is dropped by Philox keyed by (seed, b, h), counter (i, j). keep = 1: none.
  double keep;
  uint64_t seed;
  int64_t batch_index, first_head, first_token;

  // Results. out may be nullptr. element (t, h, d) at out + t * out_token_stride + h * out_head_stride + d.
  void* out;
  DType out_dtype;
  int64_t out_token_stride, out_head_stride;
  // log2 state of each row [n_tokens * group_size] in the arithmetic type (f32, f64 for f64): sum_j 2^(s_j log2 e) =
  // l * 2^m, m an integer; l = 0 if the row sees no key and has no sink. May be nullptr (both or none).
  void* state_m;
  void* state_l;
  // true: out is the sum before the division by l, in the arithmetic type (a part of a split that is merged later).
  bool unnormalised;
  // Softmax weights, arithmetic type, element (t, h, j) at weights + t * token_stride + h * head_stride + j; every j of
  // [0, n_weights) is written. nullptr: not wanted.
  void* weights;
  int64_t weights_token_stride, weights_head_stride;
  int64_t n_weights;

  void* scratch;  // scratch_bytes(...) bytes, aligned to kAlignment
};

inline constexpr int64_t kAlignment = 128;

/// y[m, n] = x[m, k] w^T + bias, w packed by pack.
struct LinearTask {
  const float* x;
  int64_t x_stride;
  const float* packed;
  const float* bias;  // [n] or nullptr
  float* y;
  int64_t y_stride;
  int64_t m, k, n;
  float* scratch;  // linear_scratch_floats elements
};

/// The kernels of one instruction set.
struct KernelTable {
  const char* target;  // Highway's name
  // Queries in the lanes: many rows. tile_q rows of a panel, tile_kv keys of a block. [0] f32, [1] f64.
  int64_t tile_q[2];
  int64_t tile_kv;
  int64_t panels;  // panels of one query block; a task holds at most panels * tile_q rows
  void (*prefill[2])(const AttentionTask&);
  int64_t (*prefill_scratch_bytes[2])(int64_t head_dim_qk, int64_t head_dim_v);
  // Head dim in the lanes: few rows.
  void (*decode[2])(const AttentionTask&);
  int64_t (*decode_scratch_bytes[2])(int64_t head_dim_qk, int64_t head_dim_v);
  // Projections.
  void (*linear)(const LinearTask&);
  void (*pack)(const float* w, int64_t n, int64_t k, float* packed);  // w row-major [n, k]
  int64_t (*packed_floats)(int64_t n, int64_t k);
  int64_t (*linear_scratch_floats)(int64_t k);
};

/// The kernels of the instruction set in force (set_isa, QKV_ISA, or the best this machine has).
const KernelTable& active();

}  // namespace qkv::kernels

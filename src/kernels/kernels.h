// SPDX-License-Identifier: Apache-2.0
// Tier: kernel. The written contract of every kernel: this is all that the schedule knows of the
// code in this folder.
//
// Rules of this folder: everything inside Highway's per-target namespace; include only <cstddef>,
// <cstdint>, <utility>, Highway and sibling files (inline copies of other templates would leak out
// of an object compiled for a newer instruction set); no allocation, no locks, no globals. Kernels
// are noexcept and never read an element outside the extents given here.
#pragma once
#include <cstddef>
#include <cstdint>

#include "qkv/dtype.h"
#include "qkv/mask.h"

namespace qkv::kernels {

/// A run of keys whose K and V rows are equally spaced. Keys [begin, begin + count) of the
/// sequence. Rows of integers (i8) have a scale each: row x stands for scale[x] * row.
struct KvSegment {
  const void* k;  // row of key `begin`
  const void* v;
  int64_t begin;
  int64_t count;
  const float* k_scale = nullptr;  // of key `begin`, one after the other; i8 only
  const float* v_scale = nullptr;
};

/// One dense term added to the scores of this (batch, KV head): element (token, head of the group,
/// key) is at data + token * token_stride + head * head_stride + key * key_stride (elements).
/// boolean: true = 0, false = -inf. tiles: what the term does to a tile of kDenseTileTokens tokens
/// x one key block of the prefill kernel: bit 0: something is visible, bit 1: something is not 0.
/// Element (token tile, head, key block). nullptr: look at every element.
struct DenseTerm {
  const void* data;
  DType dtype;
  int64_t token_stride, head_stride, key_stride;
  const uint8_t* tiles;
  int64_t tiles_token_stride, tiles_head_stride, tiles_key_stride;
};
inline constexpr int64_t kDenseTileTokens = 16;
inline constexpr int64_t kDenseTileKeys = 128;

/// Attention of some query rows of one (batch, KV head) against a range of keys.
///
/// Row r of the (batch, KV head) is (token r / group_size, head r % group_size of the group): MHA,
/// GQA and MQA are one code path. A task holds the rows [row_begin, row_begin + n_rows). For each
/// of them
///   s_j = scale * q_r . k_j ; softcap ; + dense terms ; - slope |p - j| ; hidden keys -inf
///   out_r = sum_j exp(s_j) v_j / sum_j exp(s_j) over its visible keys in [kv_begin, kv_end).
/// The bits of a row do not depend on the other rows of the task.
struct AttentionTask {
  int64_t row_begin, n_rows;
  int64_t group_size;
  int64_t head_dim_qk, head_dim_v;

  // Queries: element (token, head, d) at q + token * q_token_stride + head * q_head_stride + d.
  const void* q;
  DType q_dtype;
  int64_t q_token_stride, q_head_stride;

  // Keys and values.
  const KvSegment* segments;  // ascending, without gaps, covering all that the rows see of
                              // [kv_begin, kv_end)
  int64_t n_segments;
  int64_t k_row_stride, v_row_stride;
  DType kv_dtype;
  int64_t kv_begin, kv_end;

  // Scores.
  double scale;
  double softcap;  // 0: none
  const RowRange*
      ranges;  // visible keys of the tokens row_begin / group_size ...; nullptr: [kv_begin, kv_end)
  const DenseTerm* dense;
  int64_t n_dense;
  const int32_t* q_ids;  // by token and by key: visible only if equal; nullptr: no documents
  const int32_t* kv_ids;
  const double* alibi_slopes;  // [group_size] or nullptr
  int64_t first_position;      // p of token 0, for ALiBi
  const double* sinks;         // [group_size] natural-log logits, or nullptr

  // Dropout: see philox.h; head 0 of the group is first_head of the batch entry. 0: none.
  double dropout;
  uint64_t seed;
  int64_t dropout_stream;  // h + num_heads * b of head 0 of the group

  // Results. Element (token, head, d) at out + token * out_token_stride + head * out_head_stride +
  // d.
  void* out;
  DType out_dtype;
  int64_t out_token_stride, out_head_stride;
  // true: out holds, per row of the task, head_dim_v sums before the division by l, in the
  // arithmetic type, dense [n_rows, head_dim_v] (a part of a split that is merged later).
  bool unnormalised;
  // log4 state of each row of the task in the arithmetic type (f32, f64 for f64): sum_j exp(s_j) =
  // l * 4^m; l = 0 if the row sees no key and has no sink. Both or none; written by
  // attention, read by weights.
  void* state_m;
  void* state_l;

  // Softmax weights (the weights kernel only), arithmetic type, element (token, head, j); every j
  // of [kv_begin, kv_end). Token weights_first_token is at `weights`. nullptr: not wanted.
  void* weights;
  int64_t weights_token_stride, weights_head_stride;
  int64_t weights_first_token;

  void* scratch;  // scratch_bytes(...) bytes, aligned to kAlignment
};

inline constexpr int64_t kAlignment = 128;

/// What the weights kernels make of the softmax weights p of a task beside AttentionTask::weights, tile
/// by tile. Arithmetic type; nullptr: not wanted, and costs nothing.
struct WeightForms {
  // Added to, for the keys [kv_begin, kv_end): mean_factor * p to element (token, j), p to element
  // (head, j). Rows are added in an order that their place in the task decides.
  void* mean;
  int64_t mean_token_stride;
  double mean_factor;
  void* column_sums;
  int64_t column_sums_head_stride;
  // Written, from all keys of the row: [kv_begin, kv_end) must hold them. Element (token, head):
  // -sum_j p_j ln p_j.
  void* entropy;
  int64_t entropy_token_stride, entropy_head_stride;
  // Element (token, head, n), n < top_k: the largest weights, falling, and their keys; equal weights by
  // rising key; weight 0 and key -1 behind the last visible key. A NaN counts as the largest.
  int64_t top_k;
  void* top_weights;
  int64_t* top_keys;
  int64_t top_weights_token_stride, top_weights_head_stride;
  int64_t top_keys_token_stride, top_keys_head_stride;
};

/// Gradients of sum(dout * out) + sum(dlse * lse) for some query rows of one (batch, KV head), and what
/// these rows add to the gradients of its keys and values. With p from the forward's lse, and drop what
/// dropout did to a weight (1 without):
///   ds_j    = p_j * (drop_j * dout . v_j - dout . out + dlse)      exactly 0 for hidden keys
///   dbias  += ds;   dslope = -sum_j ds_j |p - j|;   then ds_j *= 1 - tanh^2 with a soft cap
///   dq      = scale * sum_j ds_j k_j;   dscale = q . sum_j ds_j k_j
///   dk_j   += ds_j q, without the factor scale;   dv_j += drop_j p_j dout
/// Sums run over keys and rows in ascending order, whatever the blocks. NaN and Inf of hidden keys and
/// values, and of q and dout where a row sees nothing, reach no result.
struct BackwardTask {
  AttentionTask attention;  // rows, operands and scores; sinks and results are not looked at

  // Of the forward: element (token, head, d), or (token, head). lse and dlse: arithmetic type.
  const void* out;   // q_dtype
  const void* dout;  // q_dtype
  const void* lse;   // -inf: the row sees nothing
  const void* dlse;  // nullptr: 0
  int64_t out_token_stride, out_head_stride;
  int64_t dout_token_stride, dout_head_stride;
  int64_t lse_token_stride, lse_head_stride;
  int64_t dlse_token_stride, dlse_head_stride;

  // Results; nullptr: not wanted, and costs nothing.
  void* dq;  // q_dtype, written
  int64_t dq_token_stride, dq_head_stride;
  // Arithmetic type, added to: rows of the keys [kv_begin, kv_end), backward_row_elements(dim) apart,
  // aligned to kAlignment.
  void* dk;
  void* dv;
  // Arithmetic type, added to: element (token, head, key); strides may be 0.
  void* dbias;
  int64_t dbias_token_stride, dbias_head_stride, dbias_key_stride;
  // One number for each row of the task, written.
  double* dlogsum;  // dlse - dout . out: what the gradient of a sink needs
  double* dslope;
  double* dscale;
};

/// out[row] = factor * (part[0][row] + part[1][row] + ...), parts in the arithmetic type, rows padded
/// and aligned as BackwardTask's dk.
struct SumTask {
  const void* parts;
  int64_t n_parts, part_stride, row_stride;  // elements
  int64_t n_rows, dim;
  double factor;
  void* out;
  DType out_dtype;
  int64_t out_row_stride;
};

/// The same task for `count` KV heads in a row: elements from one KV head to the next. state_m and
/// state_l hold n_rows elements per head; weights as in AttentionTask, or nullptr.
struct HeadSteps {
  int64_t count;
  int64_t q, k, v, out, weights;
};

/// y[m, n] = x[m, k] w^T + bias, w packed by pack, or row-major [n, k] and packed panel by panel on the
/// way (panel given): the same bits. Any extent may be 0 (k = 0 leaves the bias). y overlaps nothing.
/// y may be cut into blocks of columns that lie apart (heads): with c = y_column + j, column j of row i
/// is at y + i * y_stride + c / y_block * y_block_stride + c % y_block. y_block is a multiple of
/// linear_block, or 0: one block.
/// A part of the columns is a task of its own: w + column * k, bias + column, y_column + column,
/// for a column that is a multiple of linear_columns. How rows and columns are divided into tasks
/// never changes a bit: a sum depends on k alone.
struct LinearTask {
  const float* x;
  int64_t x_stride;
  const float* w;     // packed: aligned to a vector (kAlignment is enough)
  const float* bias;  // [n] or nullptr
  float* y;
  int64_t y_stride, y_column, y_block, y_block_stride;
  int64_t m, k, n;
  bool adds;     // y += instead
  float* panel;  // nullptr: w is packed; else linear_panel_floats, aligned to kAlignment
};

/// Gradients of a projection's parameters: dw[n, k] = dy^T x and dbias[n] = the sums of the columns of
/// dy, over all rows. Row i of dy and x is row i % group_rows of group i / group_rows.
/// A task is the part of dw with rows [n_begin, n_end) and columns [k_begin, k_end), at most
/// gradient_block rows; dbias is its rows' part. Where both begin and end never changes a bit: a
/// sum depends on the number of rows alone.
/// A row of x that holds NaN or Inf counts for nothing if all n numbers of its row of dy are zero: what
/// is hidden stays hidden. NaN and Inf reach the elements of dw that their row and column meet.
struct LinearGradientTask {
  const float* dy;
  const float* x;
  int64_t dy_group_stride, dy_row_stride, x_group_stride, x_row_stride;
  int64_t groups, group_rows;
  int64_t n;  // columns of dy in all
  int64_t n_begin, n_end, k_begin, k_end;
  float* dw;  // element (0, 0); nullptr: not wanted
  int64_t dw_stride;
  float* dbias;   // [n]; nullptr: not wanted
  bool adds;      // to what is there, instead of writing it
  void* scratch;  // gradient_scratch_bytes, aligned to kAlignment
};

/// The kernels of one instruction set.
struct KernelTable {
  const char* target;  // Highway's name
  // Queries in the lanes: many rows. [0] f32, [1] f64. tile_q rows of a panel, tile_kv keys of a
  // block; a task holds at most task_rows rows.
  int64_t tile_q[2];
  int64_t task_rows[2];
  int64_t tile_kv;
  void (*prefill[2])(const AttentionTask&);
  // Reads state_m and state_l and no values; writes weights and their forms only. kv_begin is a
  // multiple of tile_kv.
  void (*prefill_weights[2])(const AttentionTask&, const WeightForms&);
  int64_t (*prefill_scratch_bytes[2])(int64_t head_dim_qk, int64_t head_dim_v);
  // Head dim in the lanes: few rows (at most decode_rows).
  int64_t decode_rows;
  void (*decode[2])(const AttentionTask&);
  void (*decode_weights[2])(const AttentionTask&, const WeightForms&);
  int64_t (*decode_scratch_bytes[2])(int64_t head_dim_qk, int64_t head_dim_v);
  // The same bits for several heads at once, and the weights with them. Returns false, having
  // written nothing or results of no use, if the task is not of the few simple ones it knows (f32,
  // at most small_keys keys): these heads are then done one by one.
  int64_t small_keys;
  bool (*decode_small)(const AttentionTask&, const HeadSteps&);
  // Gradients; tasks of at most task_rows rows.
  void (*backward[2])(const BackwardTask&);
  int64_t (*backward_scratch_bytes[2])(int64_t head_dim_qk, int64_t head_dim_v);
  int64_t (*backward_row_elements[2])(int64_t dim);
  void (*sum_parts[2])(const SumTask&);
  // Projections. linear_columns: columns of a panel of packed weights. linear_block: y_block is a
  // multiple of it. linear_panel_floats: of LinearTask::panel.
  int64_t linear_columns, linear_block, linear_panel_floats;
  void (*linear)(const LinearTask&);
  void (*pack)(const float* w, int64_t n, int64_t k, float* packed);  // w row-major [n, k]
  int64_t (*packed_floats)(int64_t n, int64_t k);
  // From packed w to packed w^T: as pack(w^T, k, n) would give.
  void (*pack_transposed)(const float* packed, int64_t n, int64_t k, float* transposed);
  int64_t gradient_block, gradient_scratch_bytes;
  void (*linear_gradient)(const LinearGradientTask&);
};

/// The kernels of the instruction set in force (set_isa, QKV_ISA, or the best this machine has).
const KernelTable& active();

}  // namespace qkv::kernels

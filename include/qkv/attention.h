// SPDX-License-Identifier: Apache-2.0
// Tier: call. attention() and its gradients: shapes, options, meaning. The path of a tensor: this file ->
// src/attention.cpp (check, plan, schedule) -> src/kernels/kernels.h (contract) ->
// src/kernels/prefill-inl.h or decode-inl.h (the loop).
#pragma once
#include <cstdint>
#include <optional>

#include "qkv/mask.h"
#include "qkv/runtime.h"
#include "qkv/tensor.h"

namespace qkv {

struct AttentionOptions {
  Mask mask{};                    ///< default: every key is visible
  ConstTensor bias{};             ///< additive, broadcast over [batch, num_heads, n_q, n_kv]
                                  ///< (2-D, 3-D [batch, n_q, n_kv] or 4-D); -inf hides
  std::optional<double> scale{};  ///< default 1 / sqrt(head_dim_qk); else literal, 0 and < 0 too
  double softcap = 0;             ///< s = softcap * tanh(s / softcap) if > 0
  ConstTensor sinks{};            ///< [num_heads]: one more logit per head in the denominator
  ConstTensor alibi_slopes{};     ///< [num_heads]: s -= slope * |p - j|
  double dropout = 0;             ///< probability that a weight is dropped; 0 <= dropout <= 1
  uint64_t seed = 0;              ///< same drops for any tiling and number of threads
  int num_threads = 0;            ///< 0: default_num_threads()
  Executor* executor = nullptr;   ///< nullptr: default_executor()
};

/// An empty tensor means "not wanted" and costs nothing. Asking for more never changes out by a bit.
struct AttentionOutputs {
  Tensor out{};
  Tensor lse{};
  Tensor weights{};

  // Cheaper forms of the weights: made tile by tile, without an n_q x n_kv buffer.
  Tensor mean_weights{};      ///< mean over the query heads
  ConstTensor weight_rows{};  ///< in: the query rows that row_weights holds
  Tensor row_weights{};       ///< of those rows only
  Tensor top_weights{};       ///< the k largest of each row, falling; wanted together with
  Tensor top_keys{};          ///< their keys
  Tensor column_sums{};       ///< what a key got from all query rows
  Tensor entropy{};           ///< of each row
};

/// Exact attention: out = softmax(scale * q k^T over visible keys) v, per head.
///
///   q                [batch, num_heads,    n_q,  head_dim_qk]   f32 | f64 | bf16 | f16
///   k                [batch, num_kv_heads, n_kv, head_dim_qk]   f64 if q is, else f32 | bf16 | f16
///   v                [batch, num_kv_heads, n_kv, head_dim_v ]   same dtype as k
///   outputs.out      [batch, num_heads,    n_q,  head_dim_v ]   same dtype as q; overlaps no input
///   outputs.lse      [batch, num_heads,    n_q]                 f32 (f64 for f64)
///   outputs.weights  [batch, num_heads,    n_q,  n_kv]          f32 (f64 for f64); before dropout
///
/// Forms of the weights p, all before dropout, each alone or with any others:
///
///   mean_weights     [batch, n_q, n_kv]              (1 / num_heads) sum_h p_hij
///   row_weights      [batch, num_heads, n_rows, n_kv]   row r holds query row weight_rows[r]
///   weight_rows      [n_rows]                        i64, each in [0, n_q), in any order
///   top_weights      [batch, num_heads, n_q, k]      k >= 0: any number
///   top_keys         [batch, num_heads, n_q, k]      i64; equal weights by rising key
///   column_sums      [batch, num_heads, n_kv]        sum_i p_hij: what cache eviction asks for
///   entropy          [batch, num_heads, n_q]         -sum_j p_hij ln p_hij, 0 ln 0 = 0
///
/// row_weights, top_weights and top_keys are those of weights bit for bit. A row with fewer than k
/// visible keys has weight 0 and key -1 behind them; a NaN weight counts as the largest. An empty row
/// has entropy 0; a sink has no term of its own in it.
///
/// lse = log(sum(exp(s))), natural log, sinks included.
/// Order of a score s: scale, softcap, + bias, - alibi, mask, softmax; a sink joins the denominator
/// only.
/// Strides are in elements and free (0 broadcasts); the last axis must be contiguous. Any extent
/// may be 0.
/// Query head h reads KV head h / (num_heads / num_kv_heads), so MHA, GQA and MQA are the same call;
/// K and V are not copied.
/// A row that sees no key gives out 0, weights 0 and lse -inf (the sink's logit if there is one).
/// NaN or Inf in a hidden key or value never reaches an output; in a visible one it does.
///
/// Numerics: scores, softmax and sums in f32 (f64 for f64); the same bits for any number of threads
/// and any batch.
/// Cost: 2 * visible_pairs * (head_dim_qk + head_dim_v) flop; scratch O(threads * tile), no
/// n_q x n_kv buffer. weights, top_weights and entropy take one more pass over the scores together;
/// mean_weights, column_sums and row_weights (of its rows) one each, and 2 numbers of scratch per row.
/// Throws Error before anything is written if shapes, dtypes, strides or options do not fit; the
/// text names the shapes.
/// Thread-safe for distinct outputs.
///
/// Sources: online softmax arXiv:1805.02867; tiling arXiv:2205.14135; MQA arXiv:1911.02150;
/// GQA arXiv:2305.13245.
QKV_EXPORT void attention(ConstTensor q, ConstTensor k, ConstTensor v,
                          const AttentionOutputs& outputs, const AttentionOptions& options = {});

/// attention() on packed sequences: sequence s has the query rows [cu_seqlens_q[s], cu_seqlens_q[s + 1])
/// and the key rows [cu_seqlens_kv[s], cu_seqlens_kv[s + 1]).
///
///   q                [total_q,  num_heads,    head_dim_qk]
///   k, v             [total_kv, num_kv_heads, head_dim_qk | head_dim_v]
///   cu_seqlens_q     [num_sequences + 1]   i32 | i64, from 0 to total_q, never falling
///   cu_seqlens_kv    [num_sequences + 1]   likewise to total_kv
///   outputs.out      [total_q,  num_heads,    head_dim_v]
///   outputs.lse      [num_heads, total_q]
///
/// Weights and their forms have no batch axis. Keys of a row are counted within its sequence; longest
/// is the largest number of keys of a sequence, and what a shorter one lacks is 0:
///
///   weights          [num_heads, total_q, longest]
///   mean_weights     [total_q, longest]
///   row_weights      [num_heads, n_rows, longest]   weight_rows are packed rows, in [0, total_q)
///   top_weights      [num_heads, total_q, k]
///   top_keys         [num_heads, total_q, k]
///   column_sums      [num_heads, total_kv]          packed as k
///   entropy          [num_heads, total_q]
///
/// The same bits as one call per sequence. A mask means what it means for that sequence alone (causal
/// bottom-right: the last query of a sequence sees its last key); lengths and per-batch documents have
/// one entry per sequence. Sequences may be empty.
/// One job for all sequences; no copies. Errors, numerics and threads as attention().
QKV_EXPORT void attention_varlen(ConstTensor q, ConstTensor k, ConstTensor v,
                                 ConstTensor cu_seqlens_q, ConstTensor cu_seqlens_kv,
                                 const AttentionOutputs& outputs,
                                 const AttentionOptions& options = {});

/// Attention over the union of two disjoint sets of keys, from the results over each:
/// lse = log(exp(lse_a) + exp(lse_b)), out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b.
///
///   out_a, out_b, out   [..., head_dim_v], up to 4 axes   f32 | f64 | bf16 | f16
///   lse_a, lse_b, lse   [...]                             f32 | f64, natural log; lse may be empty
///
/// For splits of the keys, shared prefixes and several machines. A side whose lse is -inf has seen no
/// key and counts for nothing, whatever its out holds; if both are, out is 0 and lse -inf. out may be
/// out_a or out_b itself. Computed in double. Throws Error if shapes differ.
QKV_EXPORT void merge_states(ConstTensor out_a, ConstTensor lse_a, ConstTensor out_b,
                             ConstTensor lse_b, Tensor out, Tensor lse = {});

/// What attention() read and gave, and the gradient of a loss with respect to that.
struct BackwardInputs {
  ConstTensor q{}, k{}, v{};  ///< as given to attention()
  ConstTensor out{}, lse{};   ///< as written by attention()
  ConstTensor dout{};         ///< gradient with respect to out
  ConstTensor dlse{};         ///< gradient with respect to lse; empty = 0
};

/// An empty tensor means "not wanted" and costs nothing. Asking for more never changes dq, dk or dv
/// by a bit.
struct BackwardOutputs {
  Tensor dq{}, dk{}, dv{};
  Tensor dbias{}, dsinks{}, dalibi_slopes{}, dscale{};
};

/// Gradients of attention(): what sum(dout * out) + sum(dlse * lse) changes with each input.
///
///   inputs.q, k, v         as attention()
///   inputs.out             [batch, num_heads,    n_q,  head_dim_v ]   same dtype as q
///   inputs.lse             [batch, num_heads,    n_q]                 f32 (f64 for f64)
///   inputs.dout            [batch, num_heads,    n_q,  head_dim_v ]   same dtype as q
///   inputs.dlse            [batch, num_heads,    n_q]                 f32 (f64 for f64)
///   outputs.dq             as q; likewise dk and dv; summed over the heads that share a KV head
///   outputs.dbias          [shape of options.bias]                    f32 (f64 for f64)
///   outputs.dsinks         [num_heads]                                f32 (f64 for f64)
///   outputs.dalibi_slopes  [num_heads]                                f32 (f64 for f64)
///   outputs.dscale         one element, any rank                      f32 (f64 for f64)
///
/// options are those of the forward call; dropped weights are found again from the seed. dbias is
/// summed over every axis that the bias broadcasts; an additive array inside options.mask has no
/// gradient. Outputs overlap neither inputs nor each other. Strides as attention().
/// A row that sees no key adds nothing to any gradient but its sink's (through dlse); hidden keys
/// get exact zeros. NaN or Inf in a hidden key or value, or in q or dout of a row that sees
/// nothing, never reaches a gradient.
///
/// Numerics: weights are exp(s - lse), sums in f32 (f64 for f64); the same bits for any number of
/// threads and any batch (dbias, dsinks, dalibi_slopes and dscale may sum over the batch).
/// Cost: visible_pairs * (6 * head_dim_qk + 4 * head_dim_v) flop, and 0.4 of that again for a dbias
/// that several heads or batch entries share; scratch O(threads * n_kv), no n_q x n_kv buffer.
/// Throws Error before anything is written, as attention(). Thread-safe for distinct outputs.
///
/// Sources: recomputation from the log-sum-exp arXiv:2205.14135, arXiv:2307.08691.
QKV_EXPORT void attention_backward(const BackwardInputs& inputs, const BackwardOutputs& outputs,
                                   const AttentionOptions& options = {});

/// A backward pass, and the gradient of a loss with respect to its dq, dk and dv (empty = 0).
struct DoubleBackwardInputs {
  ConstTensor q{}, k{}, v{}, dout{};
  ConstTensor ddq{}, ddk{}, ddv{};
};

/// An empty tensor means "not wanted".
struct DoubleBackwardOutputs {
  Tensor dq{}, dk{}, dv{}, ddout{};
};

/// Gradients of attention_backward(): what sum(ddq * dq) + sum(ddk * dk) + sum(ddv * dv) changes
/// with q, k, v and dout. For gradient checks and gradient penalties; dlse and the other gradients
/// of attention_backward() take no part.
///
///   inputs.ddq, ddk, ddv   as q, k, v
///   outputs.dq, dk, dv     as q, k, v
///   outputs.ddout          as dout
///
/// Plain loops in double (plan() names the path "reference"), on one thread: slow, and exact to
/// double precision for f64. Scratch O(n_q + n_kv) doubles per head. Masks, options, empty rows and
/// errors as attention_backward().
QKV_EXPORT void attention_double_backward(const DoubleBackwardInputs& inputs,
                                          const DoubleBackwardOutputs& outputs,
                                          const AttentionOptions& options = {});

}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// Tier: call. attention(): shapes, options, meaning. The path of a tensor: this file ->
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

/// An empty tensor means "not wanted". Asking for more never changes out by a bit.
struct AttentionOutputs {
  Tensor out{};
  Tensor lse{};
  Tensor weights{};
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
/// n_q x n_kv buffer.
/// Throws Error before anything is written if shapes, dtypes, strides or options do not fit; the
/// text names the shapes.
/// Thread-safe for distinct outputs.
///
/// Sources: online softmax arXiv:1805.02867; tiling arXiv:2205.14135; MQA arXiv:1911.02150;
/// GQA arXiv:2305.13245.
QKV_EXPORT void attention(ConstTensor q, ConstTensor k, ConstTensor v,
                          const AttentionOutputs& outputs, const AttentionOptions& options = {});

}  // namespace qkv

// SPDX-License-Identifier: Apache-2.0
// Tier: call. Docstrings of the plain C functions. The first line is the signature that
// inspect.signature() and help() read; tests compare it with the stubs.
#include "bindings_attention.h"

namespace qkv::python {

const char kAttentionDoc[] =
    R"doc(attention(q, k, v, *, mask=None, bias=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, dropout=0.0, seed=0, return_lse=False, return_weights=False, return_mean_weights=False, weight_rows=None, top_k=None, return_column_sums=False, return_entropy=False, out=None, num_threads=None)
--

Exact attention: out = softmax(scale * q k^T over visible keys) v, per head.

  q        [batch, num_heads,    n_q,  head_dim_qk]   float32 | float64 | bfloat16 | float16
  k        [batch, num_kv_heads, n_kv, head_dim_qk]   same dtype as q (16-bit k, v go with any but float64)
  v        [batch, num_kv_heads, n_kv, head_dim_v ]   same dtype as k
  out      [batch, num_heads,    n_q,  head_dim_v ]   same dtype as q
  lse      [batch, num_heads,    n_q]                 float32 (float64 for float64): log(sum(exp(s))), natural log
  weights  [batch, num_heads,    n_q,  n_kv]          float32 (float64 for float64): softmax, before dropout

Query head h reads KV head h // (num_heads // num_kv_heads), so multi-head, grouped-query and
multi-query attention are one call; K and V are never repeated in memory.

A score s is made in this order:
  s = scale * q . k               scale: default 1 / sqrt(head_dim_qk); any finite number is taken literally
  s = softcap * tanh(s / softcap) if softcap
  s = s + bias                    bias: floating point, broadcast to [batch, num_heads, n_q, n_kv]; -inf hides
  s = s - alibi_slopes[h] * |p-j| alibi_slopes: [num_heads]; p: position of the query, j: of the key
  hidden where mask says so       mask: boolean array (True = attend) broadcast to [batch, num_heads,
                                  n_q, n_kv], or a qkv.Mask; None = every key (3 axes of a mask
                                  or bias are [batch, n_q, n_kv])
  softmax over the visible keys   sinks: [num_heads], one more logit per head in the denominator

dropout drops weights with that probability, by a generator keyed by (seed, b, h, i, j): the same
drops for any number of threads. num_threads: None = all usable cores. out: an array to write to.

Returns out, or a tuple in the order (out, lse, weights, then the forms of the weights as below)
with what was asked for. Arrays are of the kind of q: NumPy in, NumPy out; torch in, torch out;
likewise anything with DLPack.

Forms of the weights p, made tile by tile, all before dropout (float32, float64 for float64):
  return_mean_weights  mean_weights [batch, n_q, n_kv]: (1 / num_heads) sum over h of p
  weight_rows          row_weights  [batch, num_heads, len(weight_rows), n_kv]: those query rows only;
                                    a sequence of integers in [0, n_q)
  top_k                top_weights  [batch, num_heads, n_q, top_k]: the largest of each row, falling,
                       top_keys     [batch, num_heads, n_q, top_k]: and their keys, int64; equal
                                    weights by rising key; 0 and -1 behind the last visible key
  return_column_sums   column_sums  [batch, num_heads, n_kv]: sum over the queries of p, which is
                                    what cache eviction asks for
  return_entropy       entropy      [batch, num_heads, n_q]: -sum over the keys of p ln p, 0 ln 0 = 0

No copies: any strides (broadcast, transposed, negative, read-only) are read in place, with one
exception: an array whose last axis is not contiguous is copied once.

Edge cases: any extent may be 0. A query that sees no key gets out 0, weights 0, lse -inf (its
sink if there is one). NaN or Inf in a hidden key or value never reaches a result; in a visible
one it does. Asking for lse, weights or their forms, or another number of threads, changes no bit
of out; row_weights and top_weights are those of weights, bit for bit.

Errors: ValueError before anything is written, naming both shapes; TypeError for what is no array.
Torch tensors that require gradients are refused: use qkv.torch.scaled_dot_product_attention.

Cost: 2 * visible pairs * (head_dim_qk + head_dim_v) flop, memory O(threads * tile); weights are
the only n_q x n_kv array per head, and only if asked for. weights, top_weights and entropy take one
more pass over the scores together, the other forms one each. The GIL is released; Ctrl-C interrupts.

>>> import numpy as np, qkv
>>> q = np.random.randn(2, 8, 5, 64).astype(np.float32)      # 8 query heads
>>> k, v = np.random.randn(2, 2, 2, 9, 64).astype(np.float32)  # 2 KV heads
>>> qkv.attention(q, k, v, mask=qkv.Mask.causal_bottom_right()).shape
(2, 8, 5, 64)

Sources: Attention Is All You Need, arXiv:1706.03762; online softmax arXiv:1805.02867; tiling
arXiv:2205.14135; MQA arXiv:1911.02150; GQA arXiv:2305.13245.)doc";

const char kBackwardDoc[] =
    R"doc(attention_backward(q, k, v, out, lse, dout, *, mask=None, bias=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, dropout=0.0, seed=0, dlse=None, num_threads=None)
--

Gradients of attention(): what sum(dout * out) + sum(dlse * lse) changes with each input.

  q, k, v    as given to attention()
  out, lse   as attention(..., return_lse=True) gave them
  dout       [batch, num_heads, n_q, head_dim_v]   gradient with respect to out
  dlse       [batch, num_heads, n_q]               gradient with respect to lse; None = 0

Returns (dq, dk, dv), then dbias if a bias is given, then dsinks if sinks are. dq, dk, dv have the
shapes and dtypes of q, k, v; dk and dv are summed over the query heads that share a KV head. dbias
has the shape of the bias, dsinks that of the sinks; both float32 (float64 for float64).

mask, bias, scale, softcap, sinks, alibi_slopes, dropout and seed are those of the forward call;
dropped weights are found again from the seed. A row that sees no key adds nothing to any gradient,
hidden keys get exact zeros, and NaN in a hidden key reaches no gradient.

Cost: visible pairs * (6 * head_dim_qk + 4 * head_dim_v) flop; no n_q x n_kv array. Errors as
attention(). Sources: recomputation from the log-sum-exp, arXiv:2205.14135, arXiv:2307.08691.)doc";

const char kVarlenDoc[] =
    R"doc(attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv, *, mask=None, bias=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, dropout=0.0, seed=0, return_lse=False, return_weights=False, return_mean_weights=False, weight_rows=None, top_k=None, return_column_sums=False, return_entropy=False, out=None, num_threads=None)
--

attention() on packed sequences: sequence s has the query rows cu_seqlens_q[s] .. cu_seqlens_q[s + 1]
and the key rows cu_seqlens_kv[s] .. cu_seqlens_kv[s + 1].

  q              [total_q,  num_heads,    head_dim_qk]
  k, v           [total_kv, num_kv_heads, head_dim_qk | head_dim_v]
  cu_seqlens_q   [num_sequences + 1]   int32 | int64, from 0 to total_q, never falling
  cu_seqlens_kv  [num_sequences + 1]   likewise to total_kv
  out            [total_q,  num_heads,    head_dim_v]
  lse            [num_heads, total_q]

Returns out, or a tuple as attention() does. Weights and their forms have no batch axis; keys of a row
are counted within its sequence. longest is the largest number of keys of a sequence, and what a shorter
one lacks is 0:

  weights        [num_heads, total_q, longest]
  mean_weights   [total_q, longest]
  row_weights    [num_heads, len(weight_rows), longest]   packed rows, in [0, total_q)
  top_weights    [num_heads, total_q, top_k]; top_keys likewise
  column_sums    [num_heads, total_kv]                    packed as k
  entropy        [num_heads, total_q]

The same bits as one call per sequence. A mask means what it means for
that sequence alone: causal_bottom_right lets the last query of a sequence see its last key; lengths
and per-batch documents have one entry per sequence. Sequences may be empty. Everything else as
attention().)doc";

const char kMergeDoc[] =
    R"doc(merge_states(out_a, lse_a, out_b, lse_b)
--

Attention over the union of two disjoint sets of keys, from the results over each.

  lse = log(exp(lse_a) + exp(lse_b))
  out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

  out_a, out_b  [..., head_dim_v], at most 4 axes
  lse_a, lse_b  [...], natural logarithms

Returns (out, lse). For splits of the keys, shared prefixes and several machines. A side whose lse is
-inf has seen no key and counts for nothing; if both are, out is 0 and lse -inf. Computed in double.
Raises ValueError if shapes differ.)doc";

}  // namespace qkv::python

// SPDX-License-Identifier: Apache-2.0
// Tier: call. Docstrings of the plain C functions. The first line is the signature that
// inspect.signature() and help() read; tests compare it with the stubs.
#include "bindings_attention.h"

namespace qkv::python {

const char kAttentionDoc[] =
    R"doc(attention(q, k, v, *, mask=None, bias=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, dropout=0.0, seed=0, return_lse=False, return_weights=False, out=None, num_threads=None)
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

Returns out, or a tuple in the order (out, lse, weights) with what was asked for. Arrays are of
the kind of q: NumPy in, NumPy out; torch in, torch out; likewise anything with DLPack.

No copies: any strides (broadcast, transposed, negative, read-only) are read in place, with one
exception: an array whose last axis is not contiguous is copied once.

Edge cases: any extent may be 0. A query that sees no key gets out 0, weights 0, lse -inf (its
sink if there is one). NaN or Inf in a hidden key or value never reaches a result; in a visible
one it does. Asking for lse or weights, or another number of threads, changes no bit of out.

Errors: ValueError before anything is written, naming both shapes; TypeError for what is no array.
Torch tensors that require gradients are refused: use qkv.torch.scaled_dot_product_attention.

Cost: 2 * visible pairs * (head_dim_qk + head_dim_v) flop, memory O(threads * tile); weights are
the only n_q x n_kv array, and only if asked for. The GIL is released; Ctrl-C interrupts.

>>> import numpy as np, qkv
>>> q = np.random.randn(2, 8, 5, 64).astype(np.float32)      # 8 query heads
>>> k, v = np.random.randn(2, 2, 2, 9, 64).astype(np.float32)  # 2 KV heads
>>> qkv.attention(q, k, v, mask=qkv.Mask.causal_bottom_right()).shape
(2, 8, 5, 64)

Sources: Attention Is All You Need, arXiv:1706.03762; online softmax arXiv:1805.02867; tiling
arXiv:2205.14135; MQA arXiv:1911.02150; GQA arXiv:2305.13245.)doc";

}  // namespace qkv::python

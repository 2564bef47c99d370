# SPDX-License-Identifier: Apache-2.0
"""Exact attention on CPUs: multi-head, grouped-query and multi-query, kernels and layers.

>>> import numpy as np, qkv
>>> q = np.random.randn(1, 8, 5, 64).astype(np.float32)
>>> k, v = np.random.randn(2, 1, 2, 9, 64).astype(np.float32)
>>> out = qkv.attention(q, k, v, mask=qkv.Mask.causal_bottom_right())

Arrays may be NumPy, torch or anything with DLPack; nothing is copied and the result is of the
kind of q. Mistakes raise ValueError and name both shapes. qkv.torch, qkv.hf and qkv.onnx hold the
doors for those libraries and are imported on their own; this module needs NumPy alone.
"""

from . import _core, convert
from ._core import Mask, attention, attention_backward, attention_varlen, merge_states, set_num_threads
from ._cache import KVCache, attention_paged
from ._files import load_npy, load_safetensors, load_safetensors_metadata, save_safetensors
from ._layers import GQA, MHA, MQA, load_layer
from ._positions import alibi_slopes, rope

__version__ = _core.__version__

__all__ = [
    "GQA",
    "KVCache",
    "MHA",
    "MQA",
    "Mask",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_varlen",
    "convert",
    "info",
    "load_layer",
    "load_npy",
    "load_safetensors",
    "load_safetensors_metadata",
    "merge_states",
    "plan",
    "rope",
    "save_safetensors",
    "set_isa",
    "set_num_threads",
]


def plan(
    q=None,
    k=None,
    v=None,
    *,
    batch=1,
    num_heads=1,
    num_kv_heads=None,
    n_q=1,
    n_kv=None,
    head_dim_qk=64,
    head_dim_v=None,
    dtype="float32",
    dtype_kv=None,
    mask=None,
    return_weights=False,
    return_mean_weights=False,
    return_row_weights=False,
    return_column_sums=False,
    num_threads=None,
):
    """What attention() would do, and what it costs, before it runs.

    Sizes come from the arrays q, k, v if they are given, else from the keywords; num_kv_heads
    defaults to num_heads, n_kv to n_q, head_dim_v to head_dim_qk, dtype_kv to dtype.

    Returns a dict:
      path              "prefill" (queries in the lanes), "decode" (head dim in the lanes), "empty"
      reason            why this path, in one sentence
      flop              2 * visible_pairs * (head_dim_qk + head_dim_v)
      bytes             q, k, v and out, each read or written once
      scratch_bytes     exact: memory beside the outputs, all threads together
      visible_pairs, kv_splits, work_items, num_threads, tile_q, tile_kv, isa, expected_seconds

    Raises ValueError for what attention() would refuse, and if a size does not fit 64 bits.

    >>> qkv.plan(batch=1, num_heads=32, num_kv_heads=8, n_q=1, n_kv=4096, head_dim_qk=128)["path"]
    'decode'
    """
    if q is not None:
        if k is None or v is None:
            raise ValueError("plan: q, k and v are given together or not at all")
        shapes = [tuple(int(n) for n in x.shape) for x in (q, k, v)]
        if any(len(s) != 4 for s in shapes):
            raise ValueError(
                "plan: q, k and v need 4 axes [batch, heads, tokens, dim], "
                f"got q {list(shapes[0])}, k {list(shapes[1])} and v {list(shapes[2])}"
            )
        (batch, num_heads, n_q, head_dim_qk), (_, num_kv_heads, n_kv, _), (*_, head_dim_v) = shapes
        dtype, dtype_kv = q.dtype, k.dtype
    return _core.plan(
        batch,
        num_heads,
        num_heads if num_kv_heads is None else num_kv_heads,
        n_q,
        n_q if n_kv is None else n_kv,
        head_dim_qk,
        head_dim_qk if head_dim_v is None else head_dim_v,
        dtype,
        dtype if dtype_kv is None else dtype_kv,
        return_weights,
        return_mean_weights,
        return_row_weights,
        return_column_sums,
        mask,
        num_threads,
    )


def info():
    """This build and this machine, as a dict.

    version, isa (the instruction set in use), isa_target, isa_reason ("detected", "QKV_ISA",
    "set_isa"), isa_available, cpu, num_threads, l1d_bytes, l2_bytes, l3_bytes, compiler.
    """
    return _core.info()


def set_isa(isa="auto"):
    """Force an instruction set for the whole process: "auto", "baseline", "sse4", "avx2", "avx512", "neon".

    Raises ValueError if this machine cannot run it. The environment variable QKV_ISA does the
    same at the first call. Not for use while another thread is inside a call.
    """
    _core.set_isa(isa)

# SPDX-License-Identifier: Apache-2.0
"""qkv for PyTorch on CPUs: scaled_dot_product_attention, sdpa_override and the modules MHA, MQA, GQA.

    out = qkv.torch.scaled_dot_product_attention(q, k, v, is_causal=True)

    with qkv.torch.sdpa_override():    # every F.scaled_dot_product_attention inside
        model(x)

Tensors on CUDA, MPS or other devices, nested and sparse tensors go to torch's own function, here
and under sdpa_override(). Gradients and second gradients, torch.compile(fullgraph=True),
torch.export, torch.func.grad and vmap work. Needs torch 2.10 or newer.
"""

import contextlib
import math
import threading

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from . import _core, _ops
from ._torch_modules import GQA, MHA, MQA, from_multihead_attention

__all__ = ["GQA", "MHA", "MQA", "from_multihead_attention", "scaled_dot_product_attention", "sdpa_override"]

_torch_sdpa = F.scaled_dot_product_attention
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_KERNEL_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_core_sdpa = _core.sdpa
_is_grad_enabled, _is_autocast = torch.is_grad_enabled, torch.is_autocast_enabled
_is_compiling = torch.compiler.is_compiling
_has_transforms = torch._C._are_functorch_transforms_active
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_is_tracing = torch._C._get_tracing_state


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """torch.nn.functional.scaled_dot_product_attention with the kernels of qkv.

      query      [..., num_heads,    n_q,  head_dim_qk]   float32 | float64 | bfloat16 | float16
      key        [..., num_kv_heads, n_kv, head_dim_qk]   same dtype
      value      [..., num_kv_heads, n_kv, head_dim_v ]   same dtype
      attn_mask  broadcasts to [..., num_heads, n_q, n_kv]: bool (True = attend), or a float bias
      returns    [..., num_heads,    n_q,  head_dim_v ]

    Meaning as torch: is_causal is top-left (key j visible if j <= i); scale defaults to
    1 / sqrt(head_dim_qk); a row without a visible key gives 0; enable_gqa lets num_kv_heads divide
    num_heads. Leading axes broadcast. dropout_p draws from torch's generator.

    Unlike torch's CPU kernels no mask, gradient, dropout or head size changes the path: nothing
    builds an n_q x n_kv array (the second derivative alone does). NaN in a hidden key or value
    never reaches the result.

    Tensors that are not plain CPU tensors go to torch's own function. Mistakes raise what torch
    raises; what torch fails to refuse (value shorter than key) is a ValueError.

    Any strides are read in place; a last axis that is not contiguous is copied once.
    """
    if (
        type(query) in _PLAIN
        and type(key) in _PLAIN
        and type(value) in _PLAIN
        and (attn_mask is None or type(attn_mask) in _PLAIN)
        and not _is_compiling()
        and dropout_p == 0.0
        and not (_has_transforms() or _num_dispatch_modes() or _num_function_modes() or _is_tracing())
        and forward_ad._current_level < 0
        and not _is_autocast("cpu")
    ):
        if not _is_grad_enabled() or not (
            query.requires_grad
            or key.requires_grad
            or value.requires_grad
            or (attn_mask is not None and attn_mask.requires_grad)
        ):
            out = _core_sdpa(query, key, value, attn_mask, is_causal, scale, enable_gqa)
            if out is not None:
                return out
        elif _is_usual(query, key, value, attn_mask, is_causal, enable_gqa):
            visible = bias = None
            if attn_mask is not None:
                visible, bias = (attn_mask, None) if attn_mask.dtype == torch.bool else (None, attn_mask)
            return _differentiable(query, key, value, visible, bias, is_causal, scale)
    return _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _is_usual(query, key, value, attn_mask, is_causal, enable_gqa):
    """Four axes, one type and heads that fit as they are: spared the general road. The kernel checks the rest."""
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if not (
        len(q_shape) == len(k_shape) == len(v_shape) == 4
        and query.dtype in _KERNEL_TYPES
        and query.dtype == key.dtype == value.dtype
        and query.is_cpu
        and not (query.is_nested or key.is_nested or value.is_nested)
        and q_shape[0] == k_shape[0]
        and (q_shape[1] == k_shape[1] or (enable_gqa and k_shape[1] and q_shape[1] % k_shape[1] == 0))
        and k_shape[:3] == v_shape[:3]
        and q_shape[3] == k_shape[3]
    ):
        return False
    if attn_mask is None:
        return True
    shape, full = attn_mask.shape, (*q_shape[:3], k_shape[2])
    return (
        not is_causal
        and attn_mask.is_cpu
        and attn_mask.dtype in (torch.bool, query.dtype)
        and len(shape) in (2, 4)
        and all(a in (1, b) for a, b in zip(shape[::-1], full[::-1]))
    )


def _differentiable(q, k, v, mask, bias, causal, scale):
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0
    return _ops.PlainAttention.apply(q, k, v, bias, None, mask, causal, scale, 0.0, 0.0, None)[0]


def _general(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if torch.overrides.has_torch_function(tensors):
        return torch.overrides.handle_torch_function(
            scaled_dot_product_attention,
            tensors,
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    def by_torch():
        return _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return by_torch()  # raises torch's TypeError
    if any(x.device.type != "cpu" or x.layout != torch.strided or x.is_nested for x in tensors):
        return by_torch()
    if torch.is_autocast_enabled("cpu"):
        tensors = [_autocast(x) for x in tensors]
        with torch.autocast("cpu", enabled=False):
            return _general(
                *tensors[:3], tensors[3] if attn_mask is not None else None, dropout_p, is_causal, scale, enable_gqa
            )
    problem = _problem(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if problem:
        by_torch()  # raises torch's error for the same mistake
        raise ValueError(f"scaled_dot_product_attention: {problem}")
    q, k, v, mask, lead = _four_axes(query, key, value, attn_mask, enable_gqa)
    bias = None
    if mask is not None and mask.dtype != torch.bool:
        mask, bias = None, mask
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0
    out = attend(q, k, v, mask=mask, bias=bias, causal=is_causal, scale=scale, dropout=dropout_p)[0]
    return out if lead is None else out.reshape(*lead, *out.shape[2:])


def _autocast(x):
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype("cpu"))


def _problem(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
    """What is wrong with the call, in words, or None."""
    got = f"got query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)}"
    if min(query.dim(), key.dim(), value.dim()) < 2:
        return f"at least 2 axes are needed, {got}"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in _KERNEL_TYPES:
        return f"unknown or different dtypes, got {query.dtype}, {key.dtype} and {value.dtype}"
    if query.shape[-1] != key.shape[-1]:
        return f"head_dim_qk of query and key differ, {got}"
    if key.shape[-2] != value.shape[-2]:
        return f"n_kv of key and value differ, {got}"
    if not 0.0 <= dropout_p <= 1.0:
        return f"dropout_p must lie in [0, 1], got {dropout_p}"
    heads = query.shape[:-2]
    if enable_gqa:
        if min(query.dim(), key.dim(), value.dim()) < 3 or key.shape[-3] != value.shape[-3]:
            return f"num_kv_heads of key and value differ, {got}"
        if key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]:
            return f"num_heads is not a multiple of num_kv_heads, {got}"
        leads = [x.shape[:-3] for x in (query, key, value)]
    else:
        leads = [x.shape[:-2] for x in (query, key, value)]
    try:
        lead = torch.broadcast_shapes(*leads)
    except RuntimeError:
        return f"leading axes do not broadcast, {got}"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask and is_causal exclude each other"
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            return f"attn_mask must be bool, float or {query.dtype}, got {attn_mask.dtype}"
        scores = (*lead, *(heads[-1:] if enable_gqa else ()), query.shape[-2], key.shape[-2])
        shape = attn_mask.shape
        if len(shape) > len(scores) or any(a not in (1, b) for a, b in zip(shape[::-1], scores[::-1])):
            return f"attn_mask does not broadcast over the scores, got {list(shape)} and {list(scores)}"
    return None


def _four_axes(query, key, value, attn_mask, enable_gqa):
    """[batch, heads, tokens, dim] views; lead: the leading axes of the result, None if they are these."""
    heads = 3 if enable_gqa else 2  # axes that do not broadcast, counted from the end
    leads = [x.shape[:-heads] for x in (query, key, value)]
    lead = torch.broadcast_shapes(*leads)
    mask = attn_mask
    if query.dim() == 4 and all(x == lead for x in leads):
        if mask is not None and mask.dim() not in (2, 4):
            mask = mask[(None,) * (4 - mask.dim())]
        return query, key, value, mask, None
    full_lead = (*lead, query.shape[-3]) if enable_gqa else lead
    if mask is not None and mask.dim() < len(full_lead) + 2:
        mask = mask[(None,) * (len(full_lead) + 2 - mask.dim())]
    if len(full_lead) > 2 and mask is not None and mask.dim() > 4:
        mask = mask.expand(*full_lead[:-1], *mask.shape[-3:])
    four = []
    for x in (query, key, value):
        x = x.expand(*lead, *x.shape[-heads:])
        # One axis is the heads; several are [batch..., heads].
        x = x[None] if x.dim() == 3 else x[None, None] if x.dim() == 2 else x.flatten(0, -4) if x.dim() > 4 else x
        four.append(x)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask.flatten(0, -4) if mask.dim() > 4 else mask
    return *four, mask, full_lead


def attend(q, k, v, *, mask=None, bias=None, sinks=None, causal=False, scale=None, softcap=0.0, dropout=0.0):
    """(out, lse) of 4-axis tensors, differentiable; mask is a boolean tensor or (eager only) a qkv.Mask."""
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0
    tensors = [x for x in (q, k, v, bias, sinks) if x is not None]
    seed = torch.randint(0, 2**63 - 1, ()) if dropout else None
    if not _is_compiling():
        if _has_transforms() or forward_ad._current_level >= 0:
            return _ops.EagerAttention.apply(q, k, v, bias, sinks, mask, causal, scale, softcap, dropout, seed)
        if all(type(x) in _PLAIN for x in tensors) and not (_num_dispatch_modes() or _is_tracing()):
            if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
                return _ops.PlainAttention.apply(q, k, v, bias, sinks, mask, causal, scale, softcap, dropout, seed)
            seed = 0 if seed is None else int(seed)
            return _ops.forward(q, k, v, mask, bias, sinks, causal, scale, softcap, dropout, seed)
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise TypeError("qkv: a qkv.Mask cannot be part of a graph; give a boolean tensor")
    return _ops.attention_op(q, k, v, mask, bias, sinks, seed, causal, float(scale), float(softcap), float(dropout))


_override_lock = threading.Lock()
_override_depth = 0


@contextlib.contextmanager
def sdpa_override():
    """Inside, torch.nn.functional.scaled_dot_product_attention is qkv's, for every thread.

    Callers that look the function up at each call (torch.nn, transformers, most code) change;
    a reference taken before stays torch's. Nests.

    >>> with qkv.torch.sdpa_override():
    ...     y = model(x)
    """
    global _override_depth
    with _override_lock:
        _override_depth += 1
        F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        with _override_lock:
            _override_depth -= 1
            if _override_depth == 0:
                F.scaled_dot_product_attention = _torch_sdpa

# SPDX-License-Identifier: Apache-2.0
"""qkv for Hugging Face transformers (5.x) on CPUs.

    qkv.hf.register()
    model = AutoModel.from_pretrained(name, attn_implementation="qkv")    # or model.set_attn_implementation("qkv")

Causal and sliding-window masks, chunks, packed sequences, left and right padding, static and dynamic
caches reach the kernels as ranges; a mask that is none of these stays a boolean tensor. Grouped-query
attention, softcap, sinks, position bias, cross attention, dropout and training work, and
output_attentions=True too, whose weights are float arrays without gradient. Inside torch.compile and
for tensors off the CPU masks are boolean tensors, and tensors off the CPU go to transformers' sdpa.
"""

import torch
from torch.utils._pytree import tree_map

from . import _core
from . import torch as _qkv_torch

__all__ = ["attention_forward", "make_mask", "register"]

_Mask = _core.Mask


class RangeMask(torch.Tensor):
    """A boolean mask [batch, 1, n_q, n_kv] held as a qkv.Mask. Any torch operation on it makes it dense."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, mask, n_used, shape):
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device="cpu")
        self.mask = mask  # over the first n_used keys; keys behind are hidden
        self.n_used = n_used
        return self

    def dense(self):
        batch, _, n_q, n_kv = self.shape
        shown = torch.from_numpy(self.mask.to_dense(n_q, self.n_used, batch=batch, num_heads=1))
        return torch.nn.functional.pad(shown, (0, n_kv - self.n_used))

    def __repr__(self):
        return f"RangeMask({self.mask!r}, n_used={self.n_used}, shape={list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


def _closure(function):
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ())))


def _terms(function):
    """What a mask function of transformers.masking_utils is made of: [(kind, value)], or None if unknown."""
    name = getattr(function, "__qualname__", "")
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return None
    if name == "causal_mask_function":
        return [("causal", None)]
    if name == "bidirectional_mask_function":
        return []
    inside = _closure(function)
    kind = name.split(".")[0]
    if kind == "and_masks":
        terms = []
        for part in inside["mask_functions"]:
            more = _terms(part)
            if more is None:
                return None
            terms += more
        return terms
    if kind == "sliding_window_overlay":
        return [("left", inside["sliding_window"] - 1)]
    if kind == "sliding_window_bidirectional_overlay":
        return [("both", inside["sliding_window"])]
    if kind == "chunked_overlay" and not bool(inside["left_padding"].any()):
        return [("chunk", inside["chunk_size"])]
    if kind == "packed_sequence_mask_function":
        return [("documents", inside["packed_sequence_mask"])]
    if kind == "remap_positions_for_packed_sequence":
        # Positions count from the start of each packed sequence. Inside one sequence that moves
        # query and key alike, and the term "documents" that always comes along hides the rest.
        terms = _terms(inside["mask_function"])
        return None if terms is None or any(k == "chunk" for k, _ in terms) else terms
    return None


def _range_mask(batch, n_q, n_kv, q_offset, kv_offset, function, padding):
    terms = _terms(function)
    if terms is None:
        return None
    first = q_offset - kv_offset  # key index at which query 0 stands
    n_used = n_kv
    if any(kind == "causal" for kind, _ in terms):
        # Keys behind the last query (a static cache) are hidden; without them it is bottom-right.
        n_used = first + n_q
        if not 0 < n_used <= n_kv:
            return None
    elif terms and any(kind in ("left", "both", "chunk") for kind, _ in terms) and first + n_q != n_kv:
        return None
    mask = _Mask.full()
    for kind, value in terms:
        if kind == "causal":
            mask = mask & _Mask.causal_bottom_right()
        elif kind == "left":
            mask = mask & _Mask.window(value, None)
        elif kind == "both":
            mask = mask & _Mask.window(value, value)
        elif kind == "chunk":
            if kv_offset % value:
                return None
            mask = mask & _Mask.chunk(value)
        else:
            ids = value[:, :n_used].contiguous()
            mask = mask & _Mask.documents(ids, ids)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + n_used]
        if padding.shape[1] < n_used:
            padding = torch.nn.functional.pad(padding, (0, n_used - padding.shape[1]))
        if not padding.all():
            # Queries belong to document 1, as real keys do; padding is document 0.
            ids = torch.ones(n_q, dtype=torch.int32)
            mask = mask & _Mask.documents(ids, padding.to(torch.int32))
    return RangeMask(mask, n_used, (batch, 1, n_q, n_kv))


def make_mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, use_vmap=False,
    device="cpu", **kwargs,
):  # fmt: skip
    """The mask function of attn_implementation="qkv": ranges where the mask is one, else a boolean tensor."""
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function
    is_plain = attention_mask is None or type(attention_mask) is torch.Tensor
    if torch.device(device).type == "cpu" and is_plain and not torch.compiler.is_compiling():
        mask = _range_mask(
            batch_size, int(q_length), int(kv_length), int(q_offset), int(kv_offset), mask_function, attention_mask
        )
        if mask is not None:
            return mask
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    return masking_utils.sdpa_mask(
        batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, use_vmap=use_vmap, device=device, **kwargs,
    )  # fmt: skip


def _wants_weights(kwargs):
    if kwargs.get("output_attentions"):
        return True
    from transformers.utils.output_capturing import _active_collector

    collected = _active_collector.get()
    return bool(collected) and any("attentions" in key for key in collected)


def attention_forward(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, position_bias=None,
    softcap=None, s_aux=None, **kwargs,
):  # fmt: skip
    """The attention function of attn_implementation="qkv".

      query [batch, num_heads, n_q, head_dim], key and value [batch, num_kv_heads, n_kv, head_dim]
      attention_mask  None, a RangeMask, boolean (True = attend) or additive, [batch, 1, n_q, n_kv]

    Returns (output [batch, n_q, num_heads, head_dim], weights [batch, num_heads, n_q, n_kv] or None).
    """
    if query.device.type != "cpu":
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if isinstance(attention_mask, RangeMask):
            attention_mask = attention_mask.dense().to(query.device)
        if softcap is not None or s_aux is not None:
            raise ValueError("qkv: softcap and sinks off the CPU are not supported; use another attn_implementation")
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias, **kwargs,
        )  # fmt: skip
    n_q, n_kv = query.shape[2], key.shape[2]
    causal, mask, bias = False, None, position_bias
    if attention_mask is None:
        causal = n_q > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    elif isinstance(attention_mask, RangeMask):
        n_used = attention_mask.n_used
        mask = None if attention_mask.mask.is_full else attention_mask.mask
        if n_used < n_kv:
            key, value = key[:, :, :n_used], value[:, :, :n_used]
            bias = None if bias is None else bias[..., :n_used]
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask[..., :n_kv]
    else:
        additive = attention_mask[..., :n_kv]
        bias = additive if bias is None else bias + additive
    if query.shape[0] != key.shape[0]:  # learned queries shared by the batch
        query = query.expand(key.shape[0], -1, -1, -1)
    if bias is not None and bias.dim() == 3:
        bias = bias.unsqueeze(0)
    dropout = dropout if module.training else 0.0
    out, weights = _attend(query, key, value, mask, bias, s_aux, causal, scaling, softcap or 0.0, dropout, kwargs)
    if weights is not None:
        weights = torch.nn.functional.pad(weights, (0, n_kv - weights.shape[-1])).to(query.dtype)
    return out, weights


def _attend(query, key, value, mask, bias, sinks, causal, scaling, softcap, dropout, kwargs):
    wants_weights = _wants_weights(kwargs)
    is_graph = torch.compiler.is_compiling()
    tensors = [x for x in (query, key, value, bias, sinks) if x is not None]
    if not is_graph and dropout == 0 and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        # [batch, n_q, num_heads, head_dim] in memory, so that the transposed result needs no copy
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        if causal:
            mask = _qkv_torch._CAUSAL
        result = _core.attention(
            query, key, value, mask=mask, bias=bias, sinks=sinks, scale=scaling, softcap=softcap,
            return_weights=wants_weights, out=out.transpose(1, 2),
        )  # fmt: skip
        return out, result[1] if wants_weights else None
    out, _ = _qkv_torch.attend(
        query, key, value, mask=mask, bias=bias, sinks=sinks, causal=causal, scale=scaling, softcap=softcap,
        dropout=dropout,
    )  # fmt: skip
    weights = None
    if wants_weights:
        if is_graph:
            raise NotImplementedError("qkv: output_attentions inside torch.compile is not supported")
        q, k, v, b, s = (None if x is None else x.detach() for x in (query, key, value, bias, sinks))
        weights = _core.attention(
            q, k, v, mask=_qkv_torch._CAUSAL if causal else mask, bias=b, sinks=s, scale=scaling, softcap=softcap,
            return_weights=True,
        )[1]  # fmt: skip
    return out.transpose(1, 2).contiguous(), weights


def register():
    """Make "qkv" an attn_implementation of transformers: the attention function and the mask function.

    >>> qkv.hf.register()
    >>> model.set_attn_implementation("qkv")
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("qkv", attention_forward)
    AttentionMaskInterface.register("qkv", make_mask)

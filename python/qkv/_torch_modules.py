# SPDX-License-Identifier: Apache-2.0
"""torch modules of the lesson: MHA, MQA and GQA, and the importer of nn.MultiheadAttention."""

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _module

from . import _core

_PLAIN = (torch.Tensor, nn.Parameter)
_Tensor, _Linear, _float32 = torch.Tensor, nn.Linear, torch.float32
_is_grad_enabled = torch.is_grad_enabled
_global_forward_hooks, _global_forward_pre_hooks = _module._global_forward_hooks, _module._global_forward_pre_hooks


def _is_watched():
    """Something must see each torch operation: graphs, transforms, modes, tracing, autocast, forward AD."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state()
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cpu")
    )


class GQA(nn.Module):
    """Grouped-query attention with its projections; MHA and MQA are its two ends.

      GQA(num_heads, num_kv_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, *, dim_q=None, bias=True)

      fc_q.weight [num_heads * head_dim_qk, dim_q]        fc_q.bias    dim_q defaults to dim_k
      fc_k.weight [num_kv_heads * head_dim_qk, dim_k]     fc_k.bias
      fc_v.weight [num_kv_heads * head_dim_v, dim_v]      fc_v.bias
      fc_o.weight [dim_out, num_heads * head_dim_v]       fc_o.bias

    module(q, k, v, mask=None, need_weights=True) -> (weights, output), or output alone.

      q [batch, n_q, dim_q], k [batch, n_kv, dim_k], v [batch, n_kv, dim_v]
      mask     additive [batch, n_q, n_kv] (or [n_q, n_kv]), -inf hides; a boolean tensor (True = attend)
      weights  [num_heads * batch, n_q, n_kv], head-major: index h * batch + b
      output   [batch, n_q, dim_out]

    A row that sees no key has weights 0 and the output fc_o.bias (the lesson's own text gives NaN).
    Trainable; .to(dtype), deepcopy, pickle and load_state_dict of the lesson's modules work.
    """

    def __init__(
        self, num_heads, num_kv_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, *, dim_q=None, bias=True,
        device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"GQA: num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim_qk, self.head_dim_v = head_dim_qk, head_dim_v
        self.dropout = 0.0  # of the weights, in training; the lesson has none
        options = {"bias": bias, "device": device, "dtype": dtype}
        self.fc_q = nn.Linear(dim_k if dim_q is None else dim_q, num_heads * head_dim_qk, **options)
        self.fc_k = nn.Linear(dim_k, num_kv_heads * head_dim_qk, **options)
        self.fc_v = nn.Linear(dim_v, num_kv_heads * head_dim_v, **options)
        self.fc_o = nn.Linear(num_heads * head_dim_v, dim_out, **options)

    def extra_repr(self):
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim_qk={self.head_dim_qk}, head_dim_v={self.head_dim_v}"
        )

    def forward(self, q, k, v, mask=None, need_weights=True):
        if (
            not _is_grad_enabled()
            and type(q) is type(k) is type(v) is _Tensor
            and (mask is None or type(mask) is _Tensor)
            and q.dtype is _float32
            and q.is_cpu
            and not _is_watched()
            and not (self.training and self.dropout)
        ):
            result = self._in_place(q, k, v, mask, need_weights)
            if result is not None:
                return result
        return self._attend(q, k, v, mask, need_weights, None)

    def _in_place(self, q, k, v, mask, need_weights):
        """The whole call on the parameters where they are, or None where a product is more than x w^T + b
        in float32. Nothing is kept between calls: whoever writes to a parameter, and however, is seen.
        """
        modules = self._modules
        q_, k_, v_, o_ = modules["fc_q"], modules["fc_k"], modules["fc_v"], modules["fc_o"]
        if (
            not (type(q_) is type(k_) is type(v_) is type(o_) is _Linear)
            or q_._forward_hooks or q_._forward_pre_hooks or k_._forward_hooks or k_._forward_pre_hooks
            or v_._forward_hooks or v_._forward_pre_hooks or o_._forward_hooks or o_._forward_pre_hooks
            or _global_forward_hooks or _global_forward_pre_hooks
        ):  # fmt: skip
            return None
        sizes = (
            self.num_heads, self.num_kv_heads, q_.in_features, k_.in_features, v_.in_features,
            self.head_dim_qk, self.head_dim_v, o_.out_features,
        )  # fmt: skip
        parameters = (q_._parameters, k_._parameters, v_._parameters, o_._parameters)
        return _core.layer_on_parameters(sizes, parameters, _PLAIN, q, k, v, mask, need_weights)

    def _attend(self, q, k, v, mask, need_weights, sinks):
        from .torch import attend

        batch, n_q, _ = q.shape
        n_kv = k.shape[1]
        # [batch, heads, tokens, dim] views of the projections
        q = self.fc_q(q).view(batch, n_q, self.num_heads, self.head_dim_qk).transpose(1, 2)
        k = self.fc_k(k).view(batch, n_kv, self.num_kv_heads, self.head_dim_qk).transpose(1, 2)
        v = self.fc_v(v).view(batch, n_kv, self.num_kv_heads, self.head_dim_v).transpose(1, 2)
        visible = bias = None
        if mask is not None:
            mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
            visible, bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
        options = {"mask": visible, "bias": bias, "sinks": sinks}
        dropout = self.dropout if self.training else 0.0
        out, lse = attend(q, k, v, dropout=dropout, **options)
        output = self.fc_o(out.transpose(1, 2).flatten(2))
        if not need_weights:
            return output
        weights = self._weights(q, k, lse, visible, bias)
        return weights.transpose(0, 1).reshape(self.num_heads * batch, n_q, n_kv), output

    def _weights(self, q, k, lse, visible, bias):
        """exp(s - lse), [batch, num_heads, n_q, n_kv]: differentiable, through lse too."""
        batch, _, n_q, _ = q.shape
        n_kv = k.shape[2]
        rows = self.num_heads // self.num_kv_heads * n_q  # of one KV head; not -1, the batch may be empty
        q = q.reshape(batch, self.num_kv_heads, rows, self.head_dim_qk)
        s = (q @ k.transpose(-2, -1)).view(batch, self.num_heads, n_q, n_kv) * self.head_dim_qk**-0.5
        if bias is not None:
            s = s + bias.to(s.dtype)
            hidden = torch.isneginf(bias)
            visible = ~hidden if visible is None else visible & ~hidden
        lse = lse.to(s.dtype).unsqueeze(-1)
        if visible is None:
            return torch.exp(s - lse)
        # where() keeps the infinities of hidden scores out of the gradient.
        seen = visible & ~torch.isneginf(lse)
        lse = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
        return torch.exp(torch.where(seen, s - lse, s.new_full((), float("-inf"))))


class MHA(GQA):
    """Multi-head attention: every query head has its own KV head. See GQA."""

    def __init__(self, num_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, **options):
        super().__init__(num_heads, num_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, **options)


class MQA(GQA):
    """Multi-query attention: all query heads share one KV head. See GQA."""

    def __init__(self, num_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, **options):
        super().__init__(num_heads, 1, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, **options)


class ImportedMHA(MHA):
    """An nn.MultiheadAttention as MHA: same numbers, the lesson's outputs.

    module(q, k, v, mask=None, need_weights=True, *, key_padding_mask=None, attn_mask=None)
      -> (weights [num_heads * batch, n_q, n_kv], output), or output alone

    mask is the lesson's (additive, or boolean with True = attend). key_padding_mask [batch, n_kv]
    and attn_mask ([n_q, n_kv] or [batch * num_heads, n_q, n_kv], index b * num_heads + h) are
    torch's: in a boolean one True = do NOT attend, in a float one values are added. All given
    masks apply. Inputs and output have the layout of the imported module (batch_first).
    """

    def __init__(self, *args, batch_first=True, zero_key=False, **options):
        super().__init__(*args, **options)
        self.batch_first, self.zero_key = batch_first, zero_key

    def forward(self, q, k, v, mask=None, need_weights=True, *, key_padding_mask=None, attn_mask=None):
        if not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.reshape(q.shape[0], self.num_heads, q.shape[1], k.shape[1])
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask[:, None, None, :]
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        hidden = bias = None
        for x in (mask, key_padding_mask, attn_mask):
            if x is None:
                continue
            if x.dtype == torch.bool:
                hidden = x if hidden is None else hidden | x
            else:
                bias = x if bias is None else bias + x
        if bias is not None and hidden is not None:
            combined = bias.masked_fill(hidden, float("-inf"))
        else:
            combined = bias if hidden is None else ~hidden
        sinks = torch.zeros(self.num_heads, dtype=q.dtype) if self.zero_key else None
        result = self._attend(q, k, v, combined, need_weights, sinks)
        if self.batch_first:
            return result
        if not need_weights:
            return result.transpose(0, 1)
        return result[0], result[1].transpose(0, 1)


def from_multihead_attention(module):
    """The qkv module with the weights of an nn.MultiheadAttention (copied). See ImportedMHA.

    kdim, vdim, bias=False, dropout and batch_first are kept. add_zero_attn becomes a sink of logit 0,
    which is what a zero key with a zero value is; its column is not part of the weights. A module
    with add_bias_kv is refused: a learned extra key and value have no counterpart here.
    """
    if module.bias_k is not None or module.bias_v is not None:
        raise ValueError(
            "from_multihead_attention: the module has bias_k and bias_v (add_bias_kv=True), a learned key and value "
            f"behind every sequence, got bias_k {list(module.bias_k.shape)}; MHA has no such parameters. Append them "
            "to k and v after the projections instead"
        )
    embed, heads = module.embed_dim, module.num_heads
    like = module.out_proj.weight
    result = ImportedMHA(
        heads, module.kdim, module.vdim, embed // heads, embed // heads, embed, dim_q=embed,
        bias=module.in_proj_bias is not None, batch_first=module.batch_first, zero_key=module.add_zero_attn,
        device=like.device, dtype=like.dtype,
    )  # fmt: skip
    if module._qkv_same_embed_dim:
        parts = module.in_proj_weight.chunk(3)
    else:
        parts = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    with torch.no_grad():
        for linear, weight in zip((result.fc_q, result.fc_k, result.fc_v, result.fc_o), (*parts, like)):
            linear.weight.copy_(weight)
        if module.in_proj_bias is not None:
            biases = (*module.in_proj_bias.chunk(3), module.out_proj.bias)
            for linear, bias in zip((result.fc_q, result.fc_k, result.fc_v, result.fc_o), biases):
                linear.bias.copy_(bias)
    result.dropout = module.dropout
    return result.train(module.training)

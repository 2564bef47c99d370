# SPDX-License-Identifier: Apache-2.0
"""torch operators over the kernels: forward, backward, backward of the backward.

qkv::attention and qkv::attention_backward are registered with torch.library (fake kernels,
autograd, vmap), for torch.compile, torch.export and torch.func. Outside of
graphs EagerAttention does the same with less machinery, and for torch.func.

All functions here take q, k, v with 4 axes; see qkv.torch for the public ones.
"""

from typing import Optional

import torch

from . import _core, _math

_CAUSAL = _core.Mask.causal_top_left()


def _mask(mask, causal):
    if not causal:
        return mask
    return _CAUSAL if mask is None else _CAUSAL & mask


def forward(q, k, v, mask, bias, sinks, causal, scale, softcap, dropout, seed):
    """(out, lse); mask is a boolean tensor, a qkv.Mask or None; causal means top-left."""
    return _core.attention(
        q,
        k,
        v,
        mask=_mask(mask, causal),
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        seed=seed,
        return_lse=True,
    )


def _keep_factors(q, k, dropout, seed):
    """The factors of dropout, [batch, num_heads, n_q, n_kv]: read off equal weights times identity."""
    n_kv = k.shape[2]
    zeros = torch.zeros((), dtype=torch.float64)
    out = _core.attention(
        zeros.expand(*q.shape[:3], 1),
        zeros.expand(*k.shape[:3], 1),
        torch.eye(n_kv, dtype=torch.float64).expand(*k.shape[:2], n_kv, n_kv),
        dropout=dropout,
        seed=seed,
    )
    return (out != 0).to(q.dtype) / (1 - dropout) if dropout < 1 else torch.zeros_like(out, dtype=q.dtype)


def _differentiable(q, k, mask, causal, scale, softcap, dropout, seed):
    """The forward pass as a function of (q, k, v, bias, sinks) in torch operations."""
    shape = (*q.shape[:3], k.shape[2])
    visible = _math.visible_pairs(mask, causal, shape, q.device)
    keep = _keep_factors(q, k, dropout, seed) if dropout else None

    def function(q, k, v, bias, sinks):
        return _math.attention(q, k, v, bias, sinks, visible, keep, scale, softcap)

    return function


def _gradients_by_definition(function, q, k, v, bias, sinks, dout, dlse):
    """Gradients of (out, lse) = function(q, k, v, bias, sinks); differentiable again."""
    given = [x for x in (q, k, v, bias, sinks) if x is not None]

    def of_given(*tensors):
        rest = iter(tensors)
        return function(*(None if x is None else next(rest) for x in (q, k, v, bias, sinks)))

    (out, lse), pull = torch.func.vjp(of_given, *given)
    dout = torch.zeros_like(out) if dout is None else dout
    grads = iter(pull((dout, torch.zeros_like(lse) if dlse is None else dlse)))
    return tuple(None if x is None else next(grads) for x in (q, k, v, bias, sinks))


def backward(q, k, v, out, lse, dout, dlse, mask, bias, sinks, causal, scale, softcap, dropout, seed, wants):
    """(dq, dk, dv, dbias, dsinks); wants: (bias, sinks)."""
    dq, dk, dv, dbias, dsinks = _core._attention_backward(
        q, k, v, out, lse, dout, dlse, _mask(mask, causal), bias, scale, softcap, sinks, dropout, seed, wants
    )  # fmt: skip
    # Sums come in the precision of the arithmetic.
    dbias = dbias if dbias is None or dbias.dtype == bias.dtype else dbias.to(bias.dtype)
    dsinks = dsinks if dsinks is None or dsinks.dtype == sinks.dtype else dsinks.to(sinks.dtype)
    return dq, dk, dv, dbias, dsinks


def second_backward(q, k, v, bias, sinks, dout, dlse, fixed, cotangents):
    """Pulls cotangents of (dq, dk, dv, dbias, dsinks) back to (q, k, v, bias, sinks, dout, dlse)."""
    function = _differentiable(q, k, *fixed)
    inputs = (q, k, v, bias, sinks, dout, dlse)
    given = [x for x in inputs if x is not None]
    wanted = [i for i, g in enumerate(cotangents) if g is not None]

    def first_gradients(*tensors):
        rest = iter(tensors)
        grads = _gradients_by_definition(function, *(None if x is None else next(rest) for x in inputs))
        return tuple(grads[i] for i in wanted)

    _, pull = torch.func.vjp(first_gradients, *given)
    grads = iter(pull(tuple(cotangents[i] for i in wanted)))
    return tuple(None if x is None else next(grads) for x in inputs)


def _run_forward(q, k, v, mask, bias, sinks, causal, scale, softcap, dropout, seed):
    if type(q) in (torch.Tensor, torch.nn.Parameter):
        return forward(q, k, v, mask, bias, sinks, causal, scale, softcap, dropout, _int_seed(seed))
    return attention_op(q, k, v, mask, bias, sinks, seed, causal, scale, softcap, dropout)


class EagerAttention(torch.autograd.Function):
    """attention with gradients outside of graphs, torch.func transforms included; mask may be a qkv.Mask."""

    @staticmethod
    def forward(q, k, v, bias, sinks, mask, causal, scale, softcap, dropout, seed):
        return _run_forward(q, k, v, mask, bias, sinks, causal, scale, softcap, dropout, seed)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, bias, sinks, mask, *rest = inputs
        is_tensor = isinstance(mask, torch.Tensor)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, sinks, mask if is_tensor else None, *output)
        ctx.mask = None if is_tensor else mask
        ctx.fixed = rest

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, bias, sinks, mask, out, lse = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 11
        mask = ctx.mask if mask is None else mask
        wants = (bias is not None and ctx.needs_input_grad[3], sinks is not None and ctx.needs_input_grad[4])
        if dout is None:
            dout = torch.zeros_like(out)
        arguments = (q, k, v, bias, sinks, dout, dlse, mask, out.detach(), lse.detach(), *ctx.fixed, wants)
        needs_graph = torch.is_grad_enabled() or torch._C._are_functorch_transforms_active()
        grads = EagerBackward.apply(*arguments) if needs_graph else EagerBackward.forward(*arguments)
        return (*grads, None, None, None, None, None, None)

    @staticmethod
    def vmap(info, in_dims, q, k, v, bias, sinks, mask, *rest):
        batch = _batch_of(q, in_dims[0])
        q, k, v = (_fold(info, x, d, 4) for x, d in zip((q, k, v), in_dims[:3]))
        bias, mask = (_fold_scores(info, x, d, batch) for x, d in ((bias, in_dims[3]), (mask, in_dims[5])))
        if in_dims[4] is not None:
            raise NotImplementedError("qkv: vmap over sinks is not supported")
        out, lse = EagerAttention.apply(q, k, v, bias, sinks, mask, *rest)
        return (out.unflatten(0, (info.batch_size, batch)), lse.unflatten(0, (info.batch_size, batch))), (0, 0)


class PlainAttention(torch.autograd.Function):
    """EagerAttention for plain tensors outside of transforms: a context argument instead of setup_context(),
    whose binding of arguments costs more than a small attention.
    """

    @staticmethod
    def forward(ctx, *inputs):
        output = EagerAttention.forward(*inputs)
        EagerAttention.setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(EagerAttention.backward)


class EagerBackward(torch.autograd.Function):
    """The gradients as a function of the inputs, so that they can be differentiated again."""

    @staticmethod
    def forward(q, k, v, bias, sinks, dout, dlse, mask, out, lse, causal, scale, softcap, dropout, seed, wants):
        fixed = (causal, scale, softcap, dropout)
        if type(q) in (torch.Tensor, torch.nn.Parameter):
            return backward(q, k, v, out, lse, dout, dlse, mask, bias, sinks, *fixed, _int_seed(seed), wants)
        grads = backward_op(q, k, v, mask, bias, sinks, seed, dout, dlse, out, lse, *fixed)
        return (*grads[:3], grads[3] if wants[0] else None, grads[4] if wants[1] else None)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, bias, sinks, dout, dlse, mask, _, _, *rest, _ = inputs
        is_tensor = isinstance(mask, torch.Tensor)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, sinks, dout, dlse, mask if is_tensor else None)
        ctx.mask = None if is_tensor else mask
        ctx.fixed = rest

    @staticmethod
    def backward(ctx, *cotangents):
        q, k, v, bias, sinks, dout, dlse, mask = ctx.saved_tensors
        if all(g is None for g in cotangents):
            return (None,) * 16
        fixed = (ctx.mask if mask is None else mask, *ctx.fixed)
        grads = second_backward(q, k, v, bias, sinks, dout, dlse, fixed, cotangents)
        return (*grads, *(None,) * 9)

    @staticmethod
    def vmap(info, in_dims, q, k, v, bias, sinks, dout, dlse, mask, out, lse, *rest):
        batch = _batch_of(q, in_dims[0])
        if in_dims[4] is not None or sinks is not None:
            raise NotImplementedError("qkv: vmap over the gradient of sinks is not supported")
        bias_shape = None
        if bias is not None:
            bias_shape = bias.shape if in_dims[3] is None else bias.movedim(in_dims[3], 0).shape[1:]
        q, k, v = (_fold(info, x, d, 4) for x, d in zip((q, k, v), in_dims[:3]))
        dout, out = (_fold(info, x, d, 4) for x, d in ((dout, in_dims[5]), (out, in_dims[8])))
        dlse, lse = (_fold(info, x, d, 3) for x, d in ((dlse, in_dims[6]), (lse, in_dims[9])))
        bias, mask = (_fold_scores(info, x, d, batch) for x, d in ((bias, in_dims[3]), (mask, in_dims[7])))
        grads = EagerBackward.apply(q, k, v, bias, sinks, dout, dlse, mask, out, lse, *rest)
        unfolded = [g.unflatten(0, (info.batch_size, batch)) for g in grads[:3]]
        dbias = None
        if grads[3] is not None:
            dbias = grads[3].unflatten(0, (info.batch_size, batch))
            lost = dbias.dim() - 1 - len(bias_shape)  # axes that the bias of one sample does not have
            axes = [*range(1, 1 + lost)]
            axes += [1 + lost + a for a, n in enumerate(bias_shape) if n == 1 and dbias.shape[1 + lost + a] != 1]
            dbias = dbias.sum(axes, keepdim=True) if axes else dbias
            dbias = dbias.reshape(info.batch_size, *bias_shape)
        return (*unfolded, dbias, None), (0, 0, 0, None if dbias is None else 0, None)


# vmap: the mapped axis joins the batch.


def _fold(info, x, dim, axes):
    """[..., mapped, ...] -> [mapped * batch, ...]; x without the mapped axis is repeated by stride."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
    while x.dim() < axes + 1:
        x = x.unsqueeze(1)
    return x.flatten(0, 1)


def _fold_scores(info, x, dim, batch):
    """A mask or bias, [mapped * batch, heads, n_q, n_kv]."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise NotImplementedError("qkv: vmap over a qkv.Mask is not supported; give a boolean tensor")
    x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
    while x.dim() < 5:
        x = x.unsqueeze(1)
    return x.expand(-1, batch, -1, -1, -1).flatten(0, 1)


def _batch_of(q, dim):
    return q.shape[0 if dim is None or dim > 0 else 1]


# The registered operators. seed is a tensor, so that graphs draw a new one in every run.


def _int_seed(seed):
    return 0 if seed is None else int(seed)


@torch.library.custom_op("qkv::attention", mutates_args=(), device_types="cpu")
def attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    seed: Optional[torch.Tensor],
    causal: bool,
    scale: float,
    softcap: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(q, k, v, mask, bias, sinks, causal, scale, softcap, dropout, _int_seed(seed))


@attention_op.register_fake
def _(q, k, v, mask, bias, sinks, seed, causal, scale, softcap, dropout):
    batch, num_heads, n_q, _ = q.shape
    arithmetic = torch.float64 if q.dtype == torch.float64 else torch.float32
    return (
        q.new_empty(batch, num_heads, n_q, v.shape[3]),
        q.new_empty(batch, num_heads, n_q, dtype=arithmetic),
    )


@torch.library.custom_op("qkv::attention_backward", mutates_args=(), device_types="cpu")
def backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    sinks: Optional[torch.Tensor],
    seed: Optional[torch.Tensor],
    dout: torch.Tensor,
    dlse: Optional[torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = backward(
        q, k, v, out, lse, dout, dlse, mask, bias, sinks, causal, scale, softcap, dropout, _int_seed(seed),
        (bias is not None, sinks is not None),
    )  # fmt: skip
    dq, dk, dv, dbias, dsinks = (q.new_empty(0) if g is None else g.contiguous() for g in grads)
    return dq, dk, dv, dbias, dsinks


@backward_op.register_fake
def _(q, k, v, mask, bias, sinks, seed, dout, dlse, out, lse, causal, scale, softcap, dropout):
    return tuple(
        q.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, bias, sinks)
    )


def _attention_context(ctx, inputs, output):
    q, k, v, mask, bias, sinks, seed, *ctx.fixed = inputs
    ctx.save_for_backward(q, k, v, mask, bias, sinks, seed, *output)


def _attention_backward(ctx, dout, dlse):
    q, k, v, mask, bias, sinks, seed, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    grads = backward_op(q, k, v, mask, bias, sinks, seed, dout, dlse, out.detach(), lse.detach(), *ctx.fixed)
    dq, dk, dv, dbias, dsinks = grads
    return (
        dq, dk, dv, None, None if bias is None else dbias, None if sinks is None else dsinks, None,
        None, None, None, None,
    )  # fmt: skip


attention_op.register_autograd(_attention_backward, setup_context=_attention_context)


def _backward_context(ctx, inputs, output):
    q, k, v, mask, bias, sinks, seed, dout, dlse, _, _, *ctx.fixed = inputs
    ctx.save_for_backward(q, k, v, mask, bias, sinks, seed, dout, dlse)


def _backward_backward(ctx, *cotangents):
    q, k, v, mask, bias, sinks, seed, dout, dlse = ctx.saved_tensors
    causal, scale, softcap, dropout = ctx.fixed
    fixed = (mask, causal, scale, softcap, dropout, _int_seed(seed) if dropout else 0)
    cotangents = list(cotangents)
    cotangents[3] = cotangents[3] if bias is not None else None
    cotangents[4] = cotangents[4] if sinks is not None else None
    gq, gk, gv, gbias, gsinks, gdout, gdlse = second_backward(
        q, k, v, bias, sinks, dout, dlse, fixed, cotangents
    )
    return (gq, gk, gv, None, gbias, gsinks, None, gdout, gdlse, None, None, None, None, None, None)


backward_op.register_autograd(_backward_backward, setup_context=_backward_context)


@attention_op.register_vmap
def _(info, in_dims, q, k, v, mask, bias, sinks, seed, *rest):
    dims = (*in_dims[:3], in_dims[4], in_dims[5], in_dims[3])
    return EagerAttention.vmap(info, dims, q, k, v, bias, sinks, mask, *rest, seed)

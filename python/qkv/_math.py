# SPDX-License-Identifier: Apache-2.0
"""Attention in differentiable torch operations: the second derivative, where no kernel exists.

It builds n_q x n_kv arrays. Only a backward pass through a backward pass comes here.
"""

import torch


def visible_pairs(mask, causal, shape, device):
    """Boolean array that broadcasts over [batch, num_heads, n_q, n_kv], or None if all is visible."""
    batch, num_heads, n_q, n_kv = shape
    visible = None
    if mask is not None and not isinstance(mask, torch.Tensor):
        mask = torch.from_numpy(mask.to_dense(n_q, n_kv, batch=batch, num_heads=num_heads))
    if mask is not None:
        visible = mask
    if causal:
        below = torch.ones(n_q, n_kv, dtype=torch.bool, device=device).tril()
        visible = below if visible is None else visible & below
    return visible


def attention(q, k, v, bias, sinks, visible, keep, scale, softcap):
    """(out, lse) by the definition; differentiable any number of times.

    visible: as visible_pairs(); keep: factors of the weights from dropout, or None.
    """
    group = q.shape[1] // max(k.shape[1], 1)
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_, k_, v_ = q.to(work), k.to(work), v.to(work)
    if group > 1:
        k_, v_ = k_.repeat_interleave(group, 1), v_.repeat_interleave(group, 1)
    s = scale * (q_ @ k_.transpose(-2, -1))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(work)
        unseen = bias.detach() == float("-inf")
        visible = ~unseen if visible is None else visible & ~unseen
    if visible is None:
        visible = torch.ones((), dtype=torch.bool, device=q.device)
    # The largest score of a row is taken off; rows without one count from 0. Both where() keep
    # infinities and NaN of hidden scores out of the derivative.
    if s.shape[-1]:
        m = s.detach().masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    else:
        m = s.new_full((*s.shape[:-1], 1), float("-inf"))
    if sinks is not None:
        sink = sinks.to(work).view(1, -1, 1, 1)
        m = torch.maximum(m, sink.detach())
    m = torch.where(torch.isinf(m) & (m < 0), torch.zeros_like(m), m)
    e = torch.where(visible, torch.exp(torch.where(visible, s, m) - m), torch.zeros_like(s))
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - m)
    is_empty = total == 0
    total = torch.where(is_empty, torch.ones_like(total), total)
    p = e / total
    lse = torch.where(is_empty, torch.full_like(total, float("-inf")), m + torch.log(total))
    if keep is not None:
        p = p * keep
    return (p @ v_).to(q.dtype), lse.squeeze(-1)

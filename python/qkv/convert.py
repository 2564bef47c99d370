# SPDX-License-Identifier: Apache-2.0
"""Weights between layouts, and layers between MHA, GQA and MQA. Arrays are NumPy; rows are outputs."""

import numpy as np

from ._layers import layer_from_state

__all__ = ["from_conv1d", "permute_rope_rows", "split_fused_qkv", "to_gqa"]


def split_fused_qkv(w, layout="flat", num_heads=1, num_kv_heads=None):
    """(w_q, w_k, w_v) of a fused projection; head_dim is the same for all three.

      w  [(num_heads + 2 * num_kv_heads) * head_dim, dim], or a bias without the second axis
      layout  "flat"      all q rows, then k, then v                    (Llama fused, GPT-2, torch in_proj)
              "per_head"  q, k, v of head 0, then of head 1 ...         (GPT-NeoX, Bloom); MHA only
              "grouped"   the q rows of a group, its k, its v, then on  (Falcon)

    num_kv_heads defaults to num_heads. The parts are views of w where the layout allows it.
    """
    w = np.asarray(w)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"split_fused_qkv: num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}")
    rows = w.shape[0]
    parts = num_heads + 2 * num_kv_heads
    if rows % parts:
        raise ValueError(f"split_fused_qkv: {parts} heads do not divide the rows, got {list(w.shape)}")
    head_dim, rest = rows // parts, w.shape[1:]
    if layout == "flat":
        q_rows, kv_rows = num_heads * head_dim, num_kv_heads * head_dim
        return w[:q_rows], w[q_rows : q_rows + kv_rows], w[q_rows + kv_rows :]
    if layout == "per_head":
        if num_heads != num_kv_heads:
            raise ValueError(f"split_fused_qkv: per_head needs num_kv_heads = num_heads, got {num_kv_heads} and {num_heads}")
        x = w.reshape(num_heads, 3, head_dim, *rest)
        return tuple(x[:, i].reshape(num_heads * head_dim, *rest) for i in range(3))
    if layout == "grouped":
        group = num_heads // num_kv_heads
        x = w.reshape(num_kv_heads, group + 2, head_dim, *rest)
        return (
            x[:, :group].reshape(num_heads * head_dim, *rest),
            x[:, group].reshape(num_kv_heads * head_dim, *rest),
            x[:, group + 1].reshape(num_kv_heads * head_dim, *rest),
        )
    raise ValueError(f'split_fused_qkv: layout must be "flat", "per_head" or "grouped", got "{layout}"')


def permute_rope_rows(w, heads, inverse=False):
    """Rows of a q or k projection from interleaved rotary pairs (0 1)(2 3)... to half-split (0 d/2)(1 d/2+1)...

    inverse=True goes the other way. w is [heads * head_dim, dim] or a bias. After it, rope() with
    style="half_split" gives the numbers that style="interleaved" gave before, in permuted order.
    """
    w = np.asarray(w)
    if heads < 1 or w.shape[0] % (2 * heads):
        raise ValueError(f"permute_rope_rows: {heads} heads of even width do not divide the rows, got {list(w.shape)}")
    half, rest = w.shape[0] // (2 * heads), w.shape[1:]
    inner = (2, half) if inverse else (half, 2)
    return np.ascontiguousarray(w.reshape(heads, *inner, *rest).swapaxes(1, 2)).reshape(w.shape)


def from_conv1d(w):
    """A weight stored [in, out] (GPT-2's Conv1D) as [out, in]."""
    w = np.asarray(w)
    if w.ndim != 2:
        raise ValueError(f"from_conv1d: a weight has 2 axes, got {list(w.shape)}")
    return np.ascontiguousarray(w.T)


def to_gqa(layer, num_kv_heads, *, k=None, v=None, ridge=1e-6):
    """The layer with fewer KV heads: MHA to GQA or MQA.

    Each new KV head stands for the old ones of its group. Without activations it is their mean
    (Ainslie et al., GQA, arXiv:2305.13245). With activations k [..., dim_k] the query rows, and with
    v [..., dim_v] the columns of fc_o, are fitted by least squares so that scores and output stay as
    near as they can on these activations; ridge (relative) keeps the fit stable.

    Returns a new layer; layer is left alone. Raises ValueError if num_kv_heads does not divide the
    old number.
    """
    old = layer.num_kv_heads
    if num_kv_heads < 1 or old % num_kv_heads:
        raise ValueError(f"to_gqa: num_kv_heads {num_kv_heads} does not divide {old}")
    state = layer.state_dict()
    pooled = old // num_kv_heads
    new = dict(state)
    for name, width in (("fc_k", layer.head_dim_qk), ("fc_v", layer.head_dim_v)):
        for part in ("weight", "bias"):
            key = f"{name}.{part}"
            if key in state:
                x = state[key].reshape(num_kv_heads, pooled, width, *state[key].shape[1:])
                new[key] = x.mean(1).reshape(num_kv_heads * width, *state[key].shape[1:]).astype(np.float32)
    if k is not None:
        _fit(new, state, layer, "k", np.asarray(k), pooled, ridge)
    if v is not None:
        _fit(new, state, layer, "v", np.asarray(v), pooled, ridge)
    return layer_from_state(new, layer.num_heads, num_kv_heads)


def _project(x, state, name):
    y = x.reshape(-1, x.shape[-1]).astype(np.float64) @ state[f"{name}.weight"].T.astype(np.float64)
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def _fit(new, state, layer, side, x, pooled, ridge):
    """Where old head vectors were y and the pooled ones are z, takes M with z M ~ y into the query rows
    (scores q . y ~ (M q) . z) or into the columns of fc_o (y W ~ z M W)."""
    width = layer.head_dim_qk if side == "k" else layer.head_dim_v
    group = layer.num_heads // layer.num_kv_heads
    y, z = _project(x, state, f"fc_{side}"), _project(x, new, f"fc_{side}")
    for h in range(layer.num_heads):
        old = h // group
        target = y[:, old * width : (old + 1) * width]
        base = z[:, old // pooled * width : (old // pooled + 1) * width]
        gram = base.T @ base
        gram += ridge * np.trace(gram) / max(width, 1) * np.eye(width)
        m = np.linalg.solve(gram, base.T @ target)  # base @ m ~ target
        rows = slice(h * width, (h + 1) * width)
        if side == "k":
            for part in ("weight", "bias"):
                key = f"fc_q.{part}"
                if key in new:
                    new[key] = new[key].copy()
                    new[key][rows] = m @ state[key][rows].astype(np.float64)
        else:
            new["fc_o.weight"] = new["fc_o.weight"].copy()
            new["fc_o.weight"][:, rows] = state["fc_o.weight"][:, rows].astype(np.float64) @ m.T

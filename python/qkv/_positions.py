# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and ALiBi slopes."""

import math

import numpy as np


def _library(x):
    """The array functions for x: torch's for torch tensors, so that gradients pass, else NumPy's."""
    if type(x).__module__.split(".")[0] == "torch":
        import torch

        return torch, x
    return np, x if isinstance(x, np.ndarray) else np.from_dlpack(x) if hasattr(x, "__dlpack__") else np.asarray(x)


def rope(x, positions, *, base=10000.0, style="half_split", rot_dim=None):
    """Rotary position embedding: turns pairs of features by position * base^(-2 i / rot_dim).

      x          [batch, heads, tokens, dim]   floating point; NumPy, torch or DLPack
      positions  [tokens], or [batch, tokens]  integers
      style      "half_split"   pair i is (i, i + rot_dim / 2)   (Llama as stored by transformers, NeoX)
                 "interleaved"  pair i is (2 i, 2 i + 1)         (GPT-J, Llama's own files)
      rot_dim    the first rot_dim features turn, the rest pass through; default dim

    Returns a new array like x. Angles are computed in float64. Raises ValueError for an odd rot_dim, an
    unknown style or positions that do not fit. Source: RoFormer, arXiv:2104.09864.
    """
    xp, x = _library(x)
    if x.ndim != 4:
        raise ValueError(f"rope: x needs 4 axes [batch, heads, tokens, dim], got {list(x.shape)}")
    dim = x.shape[3]
    rot_dim = dim if rot_dim is None else rot_dim
    if rot_dim % 2 or not 0 <= rot_dim <= dim:
        raise ValueError(f"rope: rot_dim must be even and at most dim, got {rot_dim} and x {list(x.shape)}")
    if style not in ("half_split", "interleaved"):
        raise ValueError(f'rope: style must be "half_split" or "interleaved", got "{style}"')
    positions = np.asarray(positions)
    if positions.ndim not in (1, 2) or positions.shape[-1] != x.shape[2] or (
        positions.ndim == 2 and positions.shape[0] not in (1, x.shape[0])
    ):
        raise ValueError(
            f"rope: positions need shape [tokens] or [batch, tokens], got {list(positions.shape)} and x {list(x.shape)}"
        )
    half = rot_dim // 2
    angles = positions.astype(np.float64)[..., None] * float(base) ** (-np.arange(half) * 2.0 / max(rot_dim, 1))
    if positions.ndim == 2:
        angles = angles[:, None]  # [batch, 1, tokens, half]
    work = xp.float64 if x.dtype == xp.float64 else xp.float32
    if xp is np:
        cos, sin = np.cos(angles).astype(work), np.sin(angles).astype(work)
        wide = x[..., :rot_dim].astype(work)
    else:
        cos, sin = (xp.from_numpy(f(angles)).to(work) for f in (np.cos, np.sin))
        wide = x[..., :rot_dim].to(work)
    if style == "half_split":
        a, b = wide[..., :half], wide[..., half:]
        turned = xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    else:
        a, b = wide[..., ::2], wide[..., 1::2]
        turned = xp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(*wide.shape)
    turned = turned.astype(x.dtype) if xp is np else turned.to(x.dtype)
    return turned if rot_dim == dim else xp.concatenate([turned, x[..., rot_dim:]], -1)


def alibi_slopes(num_heads):
    """The slopes of ALiBi, float32 [num_heads]: 2^(-8 i / n) for the power of two n below num_heads, then
    every second slope of 2 n. Source: Train Short, Test Long, arXiv:2108.12409.
    """
    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads must be positive, got {num_heads}")
    n = 2 ** int(math.floor(math.log2(num_heads)))
    slopes = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    slopes += [2.0 ** (-8.0 * i / (2 * n)) for i in range(1, 2 * (num_heads - n), 2)]
    return np.array(slopes[:num_heads], np.float32)

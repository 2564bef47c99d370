# SPDX-License-Identifier: Apache-2.0
"""qkv for onnx.reference: the operator Attention of ai.onnx, opsets 23 to 25.

    from onnx.reference import ReferenceEvaluator
    session = ReferenceEvaluator(model, new_ops=[qkv.onnx.Attention])
"""

import numpy as np
from onnx.reference.op_run import OpRun

from . import _core

__all__ = ["Attention"]

_Mask = _core.Mask


def _heads(x, num_heads):
    """[batch, tokens, heads * dim] -> [batch, heads, tokens, dim], a view."""
    batch, tokens, width = x.shape
    if not num_heads or width % num_heads:
        raise ValueError(f"Attention: 3-D inputs need a number of heads that divides their width, got {num_heads} and {list(x.shape)}")
    return x.reshape(batch, tokens, num_heads, width // num_heads).transpose(0, 2, 1, 3)


def _positions(n_q, offset):
    """Absolute positions of the queries, [batch or 1, 1, n_q, 1]."""
    return np.arange(n_q).reshape(1, 1, -1, 1) + np.asarray(offset).reshape(-1, 1, 1, 1)


def _mask(n_q, n_kv, offset, nonpad, is_causal, left, right):
    """The visible keys as a qkv.Mask: ranges wherever ranges can say it."""
    mask = _Mask.full() if nonpad is None else _Mask.lengths(np.minimum(nonpad, n_kv).astype(np.int64))
    has_window = left >= 0 or right >= 0
    if not is_causal and not has_window:
        return mask
    bounds = (left if left >= 0 else None, right if right >= 0 else None)
    if nonpad is None and offset in (0, n_kv - n_q):
        is_bottom = offset == n_kv - n_q
        if is_causal:
            mask = mask & (_Mask.causal_bottom_right() if is_bottom else _Mask.causal_top_left())
        return mask & _Mask.window(*bounds, "bottom_right" if is_bottom else "top_left") if has_window else mask
    if nonpad is not None and is_causal:
        # Each entry is aligned by its own length, the window too.
        mask = mask & _Mask.causal_bottom_right()
        return mask & _Mask.window(*bounds) if has_window else mask
    p, j = _positions(n_q, offset), np.arange(n_kv)
    visible = np.ones((1, 1, n_q, n_kv), bool)
    if is_causal:
        visible = visible & (j <= p)
    if left >= 0:
        visible = visible & (j >= p - left)
    if right >= 0:
        visible = visible & (j <= p + right)
    return mask & visible


class Attention(OpRun):
    """ai.onnx Attention, opsets 23 to 25, on the kernels of qkv.

      Q, K, V           [batch, heads, tokens, dim], or [batch, tokens, heads * dim] with q_num_heads, kv_num_heads
      attn_mask         boolean (True = attend) or additive; right-aligned broadcast; a short last axis is padded as hidden
      past_key/value    joined in front of K and V; nonpad_kv_seqlen [batch]: valid keys of an external cache
      is_causal         j <= i + offset; offset: past length, nonpad_kv_seqlen - n_q, or 0
      left/right_window_size (opset 25)  p - left <= j <= p + right, p = offset + i; -1 = unbounded

    Outputs: Y, present_key, present_value, qk_matmul_output (mode 0: scaled product, 1: after softcap,
    2: with mask and bias, 3: softmax). A row that sees no key gives 0. softmax_precision is at least met:
    sums are float32, or float64 for float64. The n_q x n_kv output is built only if the node has it.
    """

    op_domain = ""

    def _run(
        self, Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, scale=None, is_causal=0,
        q_num_heads=None, kv_num_heads=None, softmax_precision=None, softcap=None, qk_matmul_output_mode=None,
        left_window_size=None, right_window_size=None,
    ):  # fmt: skip
        left = -1 if left_window_size is None else left_window_size
        right = -1 if right_window_size is None else right_window_size
        if left < -1 or right < -1:
            raise ValueError(f"Attention: window sizes must be -1 or nonnegative, got {left} and {right}")
        if (past_key is None) != (past_value is None):
            raise ValueError("Attention: past_key and past_value must be provided together")
        if nonpad_kv_seqlen is not None and past_key is not None:
            raise ValueError("Attention: nonpad_kv_seqlen cannot be combined with past_key and past_value")
        if not Q.ndim == K.ndim == V.ndim or Q.ndim not in (3, 4):
            raise ValueError(f"Attention: Q, K, V need 3 or 4 axes alike, got {list(Q.shape)}, {list(K.shape)} and {list(V.shape)}")
        is_3d = Q.ndim == 3
        if is_3d:
            Q, K, V = _heads(Q, q_num_heads), _heads(K, kv_num_heads), _heads(V, kv_num_heads)
        elif (q_num_heads is not None or kv_num_heads is not None) and self._opset() >= 25:
            raise ValueError("Attention: q_num_heads and kv_num_heads must not be specified for 4-D inputs")
        if past_key is not None:
            K, V = np.concatenate((past_key, K), 2), np.concatenate((past_value, V), 2)
        n_q, n_kv = Q.shape[2], K.shape[2]
        offset = 0 if past_key is None else past_key.shape[2]
        nonpad = None
        if nonpad_kv_seqlen is not None:
            nonpad = np.asarray(nonpad_kv_seqlen).reshape(-1)
            offset = nonpad - n_q
        mask = _mask(n_q, n_kv, offset, nonpad, bool(is_causal), left, right)
        bias = None
        if attn_mask is not None:
            missing = n_kv - attn_mask.shape[-1]
            if missing > 0:
                hidden = False if attn_mask.dtype == np.bool_ else -np.inf
                attn_mask = np.pad(attn_mask, [(0, 0)] * (attn_mask.ndim - 1) + [(0, missing)], constant_values=hidden)
            attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
            if attn_mask.dtype == np.bool_:
                mask = mask & attn_mask
            else:
                bias = attn_mask.astype(Q.dtype, copy=False)
        num_outputs = len(self.onnx_node.output)
        mode = qk_matmul_output_mode or 0
        wants_product = num_outputs > 3 and self.onnx_node.output[3] != ""
        result = _core.attention(
            Q, K, V, mask=mask, bias=bias, scale=scale, softcap=softcap, return_weights=wants_product and mode == 3
        )
        out, weights = result if isinstance(result, tuple) else (result, None)
        if is_3d:
            out = out.transpose(0, 2, 1, 3).reshape(out.shape[0], n_q, out.shape[1] * out.shape[3])
        product = None
        if wants_product:
            product = weights if mode == 3 else self._product(Q, K, mask, bias, scale, softcap, mode)
            product = product.astype(Q.dtype)
        return (out, K, V, product)[:num_outputs]

    @staticmethod
    def _product(Q, K, mask, bias, scale, softcap, mode):
        """The scores, [batch, num_heads, n_q, n_kv]."""
        work = np.float64 if Q.dtype == np.float64 else np.float32
        batch, num_heads, n_q, dim = Q.shape
        group_rows = num_heads // K.shape[1] * n_q  # queries of one KV head
        rows = Q.astype(work).reshape(batch, K.shape[1], group_rows, dim)
        s = (rows @ K.astype(work).swapaxes(2, 3)).reshape(batch, num_heads, n_q, K.shape[2])
        s *= 1 / np.sqrt(dim) if scale is None else scale
        if mode >= 1 and softcap:
            s = softcap * np.tanh(s / softcap)
        if mode == 2:
            if bias is not None:
                s = s + bias.astype(work)
            if not mask.is_full:
                s = np.where(mask.to_dense(n_q, K.shape[2], batch=batch, num_heads=num_heads), s, -np.inf)
        return s

    def _opset(self):
        opsets = self.run_params.get("opsets", {})
        return opsets.get("", 25)

# SPDX-License-Identifier: Apache-2.0
"""Keys and values kept between calls, and attention over the pages of a caller."""

import numpy as np

from . import _core

_DTYPES = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16", "i8": "int8"}


def _integers(x, what):
    """A C-order int64 array from a sequence or an array of integers."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().numpy()
    x = np.asarray(x)
    if x.size and x.dtype.kind not in "iu":
        raise ValueError(f"{what} must be integers, got {x.dtype}")
    return np.ascontiguousarray(x, np.int64)


def _counts(counts, what):
    return None if counts is None else _integers(counts, what).reshape(-1).tolist()


class KVCache:
    """Keys and values of the tokens seen so far.

      KVCache(batch, num_kv_heads, head_dim_qk, head_dim_v, capacity, dtype="float32",
              kind="contiguous" | "ring" | "paged", page_size=64, window=None, *,
              num_sink_tokens=0, rope=None)

      append(k, v)   k [batch, num_kv_heads, n, head_dim_qk], v [batch, num_kv_heads, n, head_dim_v]; NumPy, torch, DLPack
      attend(q)      q [batch, num_heads, n_q, head_dim_qk]: the last n_q tokens; causal by position unless a mask is given
      truncate(n)    keep the first n tokens
      fork()         an independent cache with the same tokens; memory is shared until one of the two writes to it
      length         tokens seen; an array [batch] where entries differ

    contiguous holds `capacity` tokens and refuses more, without a change. paged takes its memory in pages of
    page_size tokens as it grows, up to capacity. ring, with window=W (W counts the token itself), holds what the
    queries of the last append may see: W - 1 older tokens plus that append; there is no end to it. All kinds give
    the same bits, those of attention() on the tokens of an entry alone; nothing is copied or gathered.
    num_sink_tokens: with a window, the first tokens stay visible (arXiv:2309.17453).
    rope: True, or a dict of base, style and rot_dim as in qkv.rope(): append turns k, attend turns q.
    dtype is that of the memory (float32, float64, float16, bfloat16, int8); k and v are converted. int8 keeps one
    scale per token and head; quant_error tells what rounding did. Mistakes raise ValueError.

    >>> cache = qkv.KVCache(1, 2, 64, 64, capacity=1000)
    >>> cache.append(k, v)
    >>> out = cache.attend(q)
    """

    def __init__(
        self, batch, num_kv_heads, head_dim_qk, head_dim_v, capacity, dtype="float32", kind="contiguous",
        page_size=64, window=None, *, num_sink_tokens=0, rope=None,
    ):  # fmt: skip
        if window is not None and window < 1:
            raise ValueError(f"KVCache: window must be positive, got {window}")
        if kind == "ring" and window is not None:
            # The ring has no page: what it holds beyond the window allows to go back that far.
            page_size = max(1, min(capacity, 2 * window) - window + 1)
        if rope is not None and rope is not False:
            options = {"base": 10000.0, "style": "half_split", "rot_dim": None}
            given = {} if rope is True else dict(rope)
            if unknown := given.keys() - options.keys():
                raise ValueError(f"KVCache: rope knows base, style and rot_dim, got {sorted(unknown)}")
            options.update(given)
            rot_dim = -1 if options["rot_dim"] is None else options["rot_dim"]
            rope = (float(options["base"]), options["style"], rot_dim)
        sizes = (batch, num_kv_heads, head_dim_qk, head_dim_v, capacity, page_size, window or 0, num_sink_tokens)
        self._core = _core.Cache(sizes, dtype, kind, rope or None)
        self._empty = capacity == 0 and kind != "ring"

    @classmethod
    def _of(cls, core):
        self = object.__new__(cls)
        self._core, self._empty = core, False
        return self

    @classmethod
    def from_buffers(cls, k_buffer, v_buffer, lengths):
        """A contiguous cache on the caller's memory: [batch, num_kv_heads, capacity, dim] each, any strides with a
        contiguous last axis, lengths [batch] tokens in use. append writes there; nothing is copied. fork copies.
        """
        return cls._of(_core.Cache.from_buffers(k_buffer, v_buffer, _counts(lengths, "KVCache: lengths")))

    @classmethod
    def load(cls, path):
        """A cache that save() wrote."""
        return cls._of(_core.Cache.load(str(path)))

    def save(self, path):
        """Writes the tokens that are held and the configuration as safetensors; the file appears whole or not at all."""
        self._core.save(str(path))

    @property
    def kind(self):
        return self._core.kind()

    @property
    def capacity(self):
        return self._core.sizes()[4]

    @property
    def page_size(self):
        return self._core.sizes()[5]

    @property
    def window(self):
        return self._core.sizes()[6] or None

    @property
    def dtype(self):
        """The element type of the memory: "float32", "int8" ..."""
        return _DTYPES[self._core.dtype()]

    @property
    def nbytes(self):
        """Bytes of memory for keys, values and scales; what forks share is counted in each."""
        return self._core.bytes()

    @property
    def quant_error(self):
        """What rounding to int8 did to everything appended so far, as a dict: max_abs_k, max_abs_v, rms_k, rms_v,
        max_relative_k, max_relative_v (of the largest element of a row) and num_rows.
        """
        return self._core.quant_error()

    @property
    def length(self):
        """Tokens seen: an int, or an array [batch] where entries differ."""
        lengths = self._core.lengths()
        if any(n != lengths[0] for n in lengths):
            return np.array(lengths, np.int64)
        return lengths[0] if lengths else 0

    def append(self, k, v, *, counts=None, positions=None, num_threads=None):
        """Adds n tokens. counts [batch]: entry b gets the first counts[b] of them, the others are padding.
        positions [n] or [batch, n]: for rope; default the token's index. All entries get their tokens, or none does
        and an error is raised. Long prompts are shared among num_threads; None = all usable cores.
        """
        if self._empty and k.shape[2] > 0:
            raise ValueError(f"KVCache.append: {k.shape[2]} tokens do not fit, capacity 0, got k {list(k.shape)}")
        if positions is not None:
            positions = _integers(positions, "KVCache.append: positions")
        self._core.append(k, v, _counts(counts, "KVCache.append: counts"), positions, num_threads or 0)

    def attend(
        self, q, *, mask=None, bias=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, return_lse=False,
        return_weights=False, return_mean_weights=False, weight_rows=None, top_k=None, return_column_sums=False,
        return_entropy=False, num_threads=None, counts=None, positions=None, parents=None,
    ):  # fmt: skip
        """attention() of the last n_q tokens over the cache; the same arguments and results.

        Where lengths differ, n_kv of weights and their forms is the longest: keys that an entry lacks, and rows that are
        padding, have weight 0 (top_keys -1). Refused where num_sink_tokens are kept.

        counts [batch]: the first counts[b] rows of q are the last counts[b] tokens of entry b, the others padding (0).
        positions [n_q] or [batch, n_q]: for rope. parents [n_q]: the tokens are nodes of a tree of guesses, node i
        sees all tokens before the tree, its ancestors and itself; -1 for a child of the last token before it.
        """
        if positions is not None:
            positions = _integers(positions, "KVCache.attend: positions")
        return self._core.attend(
            q, _counts(parents, "KVCache.attend: parents"), mask, bias, scale, softcap, sinks, alibi_slopes,
            _counts(counts, "KVCache.attend: counts"), positions,
            (return_lse, return_weights, return_mean_weights, weight_rows, top_k, return_column_sums, return_entropy),
            num_threads,
        )  # fmt: skip

    def truncate(self, n):
        """Keep the first n tokens (of each batch entry); a larger n changes nothing."""
        self._core.truncate(n)

    def keep_of_last(self, n, places):
        """Of the last n tokens keep those at these ascending places: the accepted path of a tree of n guesses."""
        self._core.keep_of_last(n, _counts(places, "KVCache.keep_of_last: places"))

    def reserve(self, tokens):
        """Takes the memory for entries of that many tokens."""
        self._core.reserve(tokens)

    def fork(self):
        """An independent cache with the same tokens."""
        twin = KVCache._of(self._core.fork())
        twin._empty = self._empty
        return twin

    def __repr__(self):
        batch, heads, d_qk, d_v, capacity, *_ = self._core.sizes()
        return (
            f"KVCache(batch={batch}, num_kv_heads={heads}, head_dim_qk={d_qk}, head_dim_v={d_v}, "
            f'capacity={capacity}, dtype="{self.dtype}", kind="{self.kind}", length={self.length})'
        )


def attention_paged(
    q, k_pages, v_pages, block_table, lengths, *, mask=None, bias=None, scale=None, softcap=None, sinks=None,
    alibi_slopes=None, return_lse=False, return_weights=False, return_mean_weights=False, weight_rows=None, top_k=None,
    return_column_sums=False, return_entropy=False, num_threads=None,
):  # fmt: skip
    """attention() over keys and values in pages of the caller.

      q            [batch, num_heads, n_q, head_dim_qk]: the last n_q tokens of each entry
      k_pages      [num_pages, page_size, num_kv_heads, head_dim_qk]
      v_pages      [num_pages, page_size, num_kv_heads, head_dim_v]
      block_table  [batch, max_pages]: token t of entry b is in page block_table[b, t // page_size]
      lengths      [batch]: tokens in use; slots behind them are never read

    Causal by position unless a mask is given (each entry aligned by its own length). Pages may lie in any
    order and be shared; they are read in place, nothing is copied. The same bits as attention() on the tokens
    of each entry alone. n_kv of weights and their forms is the longest length. Otherwise as attention(). Source: arXiv:2309.06180.
    """
    return _core.attention_paged(
        q, k_pages, v_pages, _integers(block_table, "attention_paged: block_table"),
        _integers(lengths, "attention_paged: lengths"), mask, bias, scale, softcap, sinks, alibi_slopes,
        (return_lse, return_weights, return_mean_weights, weight_rows, top_k, return_column_sums, return_entropy),
        num_threads,
    )  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
"""Keys and values kept between calls, and attention over the pages of a caller."""

import numpy as np

from . import _core

_Mask = _core.Mask


def _storage_dtype(dtype):
    name = str(getattr(dtype, "__name__", dtype)).split(".")[-1]
    name = {"f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "i8": "int8"}.get(name, name)
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ValueError("KVCache: bfloat16 on NumPy needs the package ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    if name not in ("float32", "float64", "float16", "int8"):
        raise ValueError(f"KVCache: dtype must be float32, float64, float16, bfloat16 or int8, got {dtype}")
    return np.dtype(name)


def _to_numpy(x, what):
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach"):
        x = x.detach()
        return (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()
    if hasattr(x, "__dlpack__"):
        return np.from_dlpack(x)
    raise TypeError(f"KVCache: {what} must be an array, got {type(x).__name__}")


class _Store:
    """One of k and v: [batch, num_kv_heads, capacity, dim]; int8 keeps a scale per token and head."""

    def __init__(self, buffer, scales=None):
        self.buffer, self.scales = buffer, scales

    @classmethod
    def make(cls, batch, heads, capacity, dim, dtype):
        scales = np.zeros((batch, heads, capacity, 1), np.float32) if dtype == np.int8 else None
        return cls(np.zeros((batch, heads, capacity, dim), dtype), scales)

    def write(self, entry, begin, values):
        """values [heads, n, dim] into one batch entry (or all: slice(None))."""
        where = (entry, slice(None), slice(begin, begin + values.shape[-2]))
        if self.scales is not None:
            largest = np.abs(values).max(-1, keepdims=True) if values.shape[-1] else np.zeros((*values.shape[:-1], 1))
            scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
            self.scales[where] = scale
            self.buffer[where] = np.rint(values / scale).astype(np.int8)
        else:
            self.buffer[where] = values

    def read(self, begin, end):
        x = self.buffer[:, :, begin:end]
        return x if self.scales is None else x.astype(np.float32) * self.scales[:, :, begin:end]

    def resized(self, begin, end, capacity):
        """The slots [begin, end) at the front of a store of another capacity."""
        batch, heads, _, dim = self.buffer.shape
        new = _Store.make(batch, heads, capacity, dim, self.buffer.dtype)
        new.buffer[:, :, : end - begin] = self.buffer[:, :, begin:end]
        if self.scales is not None:
            new.scales[:, :, : end - begin] = self.scales[:, :, begin:end]
        return new

    def copy(self):
        return _Store(self.buffer.copy(), None if self.scales is None else self.scales.copy())


class KVCache:
    """Keys and values of the tokens seen so far.

      KVCache(batch, num_kv_heads, head_dim_qk, head_dim_v, capacity, dtype="float32",
              kind="contiguous" | "ring" | "paged", page_size=64, window=None)

      append(k, v)   k [batch, num_kv_heads, n, head_dim_qk], v [batch, num_kv_heads, n, head_dim_v]; NumPy, torch, DLPack
      attend(q)      q [batch, num_heads, n_q, head_dim_qk]: the last n_q tokens; causal by position unless a mask is given
      truncate(n)    keep the first n tokens
      fork()         an independent cache with the same tokens
      length         tokens seen; an array [batch] where entries differ

    contiguous holds `capacity` tokens and refuses more, without a change. paged takes its memory in pages of
    page_size tokens as it grows, up to capacity. ring, with window=W (W counts the token itself), holds what the
    queries of the last append may see: W - 1 older tokens plus that append; there is no end to it.
    dtype int8 keeps one scale per token and head and is read as float32. Mistakes raise ValueError.

    >>> cache = qkv.KVCache(1, 2, 64, 64, capacity=1000)
    >>> cache.append(k, v)
    >>> out = cache.attend(q)
    """

    def __init__(
        self, batch, num_kv_heads, head_dim_qk, head_dim_v, capacity, dtype="float32", kind="contiguous",
        page_size=64, window=None,
    ):  # fmt: skip
        if kind not in ("contiguous", "ring", "paged"):
            raise ValueError(f'KVCache: kind must be "contiguous", "ring" or "paged", got "{kind}"')
        sizes = dict(
            batch=batch, num_kv_heads=num_kv_heads, head_dim_qk=head_dim_qk, head_dim_v=head_dim_v, capacity=capacity
        )
        if min(sizes.values()) < 0 or page_size < 1 or (window is not None and window < 1):
            raise ValueError(f"KVCache: sizes must not be negative, page_size and window positive, got {sizes}, page_size {page_size} and window {window}")
        if kind == "ring" and window is None:
            raise ValueError("KVCache: a ring needs a window")
        self.kind, self.capacity, self.page_size, self.window = kind, capacity, page_size, window
        dtype = _storage_dtype(dtype)
        slots = capacity if kind == "contiguous" else 0 if kind == "paged" else min(capacity, 2 * window)
        self._k = _Store.make(batch, num_kv_heads, slots, head_dim_qk, dtype)
        self._v = _Store.make(batch, num_kv_heads, slots, head_dim_v, dtype)
        self._lengths = np.zeros(batch, np.int64)
        self._first = 0  # ring: the token in slot 0
        self._last_append = 0

    @classmethod
    def from_buffers(cls, k_buffer, v_buffer, lengths):
        """A contiguous cache on the caller's memory: [batch, num_kv_heads, capacity, dim] each, any strides with a
        contiguous last axis, lengths [batch] tokens in use. append writes there; nothing is copied.
        """
        k, v = _to_numpy(k_buffer, "k_buffer"), _to_numpy(v_buffer, "v_buffer")
        lengths = np.array(lengths, np.int64).reshape(-1)
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or lengths.shape != k.shape[:1]:
            raise ValueError(
                "KVCache: from_buffers needs [batch, num_kv_heads, capacity, dim] twice and one length per batch entry, "
                f"got {list(k.shape)}, {list(v.shape)} and {list(lengths.shape)}"
            )
        if lengths.size and (lengths.min() < 0 or lengths.max() > k.shape[2]):
            raise ValueError(f"KVCache: lengths must lie in [0, {k.shape[2]}], got {lengths.tolist()}")
        self = cls(k.shape[0], k.shape[1], k.shape[3], v.shape[3], 0)
        self.capacity = k.shape[2]
        self._k, self._v, self._lengths = _Store(k), _Store(v), lengths
        return self

    @property
    def length(self):
        """Tokens seen: an int, or an array [batch] where entries differ."""
        if self._lengths.size and (self._lengths != self._lengths[0]).any():
            return self._lengths.copy()
        return int(self._lengths[0]) if self._lengths.size else 0

    def append(self, k, v):
        k, v = _to_numpy(k, "k"), _to_numpy(v, "v")
        for name, x, store in (("k", k, self._k), ("v", v, self._v)):
            batch, heads, _, dim = store.buffer.shape
            if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, dim):
                raise ValueError(f"KVCache.append: {name} needs shape [{batch}, {heads}, n, {dim}], got {list(x.shape)}")
        n = k.shape[2]
        if v.shape[2] != n:
            raise ValueError(f"KVCache.append: k and v differ in tokens, got {list(k.shape)} and {list(v.shape)}")
        most = int(self._lengths.max(initial=0))
        if self.kind == "ring":
            self._make_room(n)
        elif most + n > self.capacity:
            raise ValueError(f"KVCache.append: {n} tokens do not fit, length {most} of capacity {self.capacity}, got k {list(k.shape)}")
        elif self.kind == "paged" and most + n > self._k.buffer.shape[2]:
            pages = -(-(most + n) // self.page_size)
            slots = max(pages, 2 * (self._k.buffer.shape[2] // self.page_size)) * self.page_size
            self._k, self._v = (s.resized(0, most, slots) for s in (self._k, self._v))
        if (self._lengths == most).all():
            self._k.write(slice(None), most - self._first, k)
            self._v.write(slice(None), most - self._first, v)
        else:
            for b, length in enumerate(self._lengths):
                self._k.write(b, int(length), k[b])
                self._v.write(b, int(length), v[b])
        self._lengths += n
        self._last_append = n

    def _make_room(self, n):
        """Ring: keeps the window - 1 newest tokens and finds n slots behind them."""
        length = self.length
        keep = min(self.window - 1, length - self._first)
        slots = self._k.buffer.shape[2]
        if length - self._first + n <= slots:
            return
        begin = length - keep - self._first
        if keep + n > slots or begin < keep:
            slots = max(slots, 2 * (keep + n))
            self._k, self._v = (s.resized(begin, begin + keep, slots) for s in (self._k, self._v))
        else:
            for store in (self._k, self._v):
                for x in (store.buffer, store.scales):
                    if x is not None:
                        x[:, :, :keep] = x[:, :, begin : begin + keep]
        self._first = length - keep

    def attend(
        self, q, *, mask=None, bias=None, scale=None, softcap=None, sinks=None, alibi_slopes=None, return_lse=False,
        return_weights=False, num_threads=None,
    ):  # fmt: skip
        """attention() of the last n_q tokens over the cache; the same arguments and results."""
        n_q = q.shape[2]
        length = self.length
        if np.ndim(length) == 0 and n_q > length:
            raise ValueError(f"KVCache.attend: the queries are the last {n_q} tokens, but length is {length}, got q {list(q.shape)}")
        if self.kind == "ring" and n_q > max(self._last_append, 1):
            raise ValueError(f"KVCache.attend: a ring keeps what its last append may see: {self._last_append} tokens, got q {list(q.shape)}")
        most = int(self._lengths.max(initial=0))
        k, v = self._k.read(0, most - self._first), self._v.read(0, most - self._first)
        if mask is None:
            mask = _Mask.causal_bottom_right()
        if self.window is not None:
            mask = _Mask.window(self.window - 1, None) & mask
        if np.ndim(length):
            mask = _Mask.lengths(self._lengths) & mask
        return _core.attention(
            q, k, v, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            return_lse=return_lse, return_weights=return_weights, num_threads=num_threads,
        )  # fmt: skip

    def truncate(self, n):
        """Keep the first n tokens (of each batch entry); a larger n changes nothing."""
        if n < 0:
            raise ValueError(f"KVCache.truncate: n must not be negative, got {n}")
        if self.kind == "ring" and n < self.length:
            kept = n - self._first
            if kept < min(self.window - 1, n):
                raise ValueError(f"KVCache.truncate: the ring has lost what token {n} may see, it holds {self._first} to {self.length}")
            self._last_append = min(self._last_append, 1)
        self._lengths = np.minimum(self._lengths, n)
        self._first = min(self._first, n)

    def fork(self):
        """An independent cache with the same tokens."""
        twin = object.__new__(KVCache)
        twin.__dict__.update(self.__dict__)
        twin._k, twin._v, twin._lengths = self._k.copy(), self._v.copy(), self._lengths.copy()
        return twin

    def __repr__(self):
        batch, heads, _, dim = self._k.buffer.shape
        return (
            f"KVCache(batch={batch}, num_kv_heads={heads}, head_dim_qk={dim}, head_dim_v={self._v.buffer.shape[3]}, "
            f'capacity={self.capacity}, dtype="{self._k.buffer.dtype}", kind="{self.kind}", length={self.length})'
        )


def attention_paged(
    q, k_pages, v_pages, block_table, lengths, *, mask=None, bias=None, scale=None, softcap=None, sinks=None,
    alibi_slopes=None, return_lse=False, return_weights=False, num_threads=None,
):  # fmt: skip
    """attention() over keys and values in pages of the caller.

      q            [batch, num_heads, n_q, head_dim_qk]: the last n_q tokens of each entry
      k_pages      [num_pages, page_size, num_kv_heads, head_dim_qk]
      v_pages      [num_pages, page_size, num_kv_heads, head_dim_v]
      block_table  [batch, max_pages]: token t of entry b is in page block_table[b, t // page_size]
      lengths      [batch]: tokens in use; slots behind them are never read into a result

    Causal by position unless a mask is given (each entry aligned by its own length). Pages may lie in any
    order and be shared. The pages in use are gathered once per call. Otherwise as attention().
    """
    is_torch = hasattr(k_pages, "detach")
    kp, vp = (k_pages, v_pages) if is_torch else (_to_numpy(k_pages, "k_pages"), _to_numpy(v_pages, "v_pages"))
    table, lengths = (_to_numpy(x, n) if not isinstance(x, (list, tuple)) else np.asarray(x) for x, n in ((block_table, "block_table"), (lengths, "lengths")))
    lengths = lengths.astype(np.int64)
    if kp.ndim != 4 or vp.ndim != 4 or tuple(kp.shape[:3]) != tuple(vp.shape[:3]):
        raise ValueError(f"attention_paged: pages need [num_pages, page_size, num_kv_heads, dim], got {list(kp.shape)} and {list(vp.shape)}")
    if table.ndim != 2 or lengths.shape != table.shape[:1] or q.shape[0] != table.shape[0]:
        raise ValueError(f"attention_paged: block_table and lengths need one row per batch entry, got q {list(q.shape)}, {list(table.shape)} and {list(lengths.shape)}")
    num_pages, page_size, heads, _ = kp.shape
    if lengths.size and (lengths.min() < 0 or lengths.max() > table.shape[1] * page_size):
        raise ValueError(f"attention_paged: lengths must lie in [0, {table.shape[1] * page_size}], got {lengths.tolist()}")
    most = -(-int(lengths.max(initial=0)) // page_size)
    is_used = np.arange(most) * page_size < lengths[:, None]
    used = np.where(is_used, table[:, :most], 0)
    if used.size and (used.min() < 0 or used.max() >= num_pages):
        raise ValueError(f"attention_paged: block_table names pages outside [0, {num_pages}), got {table.tolist()}")
    if is_torch:
        import torch

        used = torch.from_numpy(used.astype(np.int64))

    def gathered(pages):
        """[batch, num_kv_heads, tokens, dim]"""
        x = pages[used].reshape(used.shape[0], most * page_size, heads, pages.shape[3])
        return x.swapaxes(1, 2)

    if mask is None:
        mask = _Mask.causal_bottom_right()
    return _core.attention(
        q, gathered(kp), gathered(vp), mask=_Mask.lengths(lengths) & mask, bias=bias, scale=scale, softcap=softcap,
        sinks=sinks, alibi_slopes=alibi_slopes, return_lse=return_lse, return_weights=return_weights,
        num_threads=num_threads,
    )  # fmt: skip

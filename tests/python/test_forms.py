# SPDX-License-Identifier: Apache-2.0
"""The forms of the weights from packed sequences, caches and pages: those of attention() on each sequence alone."""

import inspect

import numpy as np
import pytest
from support import needs_torch, torch

import qkv

FORMS = "return_lse return_weights return_mean_weights weight_rows top_k return_column_sums return_entropy".split()
BOTTOM = qkv.Mask.causal_bottom_right()


def asked(rows, k=3):
    return {name: {"weight_rows": rows, "top_k": k}.get(name, True) for name in FORMS}


def heads_first(x):
    """Rows of a packed array as [1, heads, tokens, dim]."""
    return np.ascontiguousarray(x.transpose(1, 0, 2))[None]


def same(got, want):
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("call", [qkv.attention_varlen, qkv.attention_paged, qkv.KVCache.attend])
def test_names_and_order_are_those_of_attention(call):
    names = [name for name in inspect.signature(call).parameters if name in FORMS]
    assert names == [name for name in inspect.signature(qkv.attention).parameters if name in FORMS]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_packed_sequences(dtype):
    rng = np.random.default_rng(1)
    cu_q, cu_kv, longest = [0, 3, 3, 8, 9, 11], [0, 5, 7, 7, 15, 15], 8
    q = rng.standard_normal((11, 4, 8)).astype(dtype)
    k, v = rng.standard_normal((2, 15, 2, 8)).astype(dtype)
    rows = [8, 0, 3, 4, 10, 0]
    results = qkv.attention_varlen(q, k, v, np.array(cu_q), np.array(cu_kv), mask=BOTTOM, **asked(rows))
    out, lse, weights, mean, row_weights, top, top_keys, sums, entropy = results
    shapes = [(11, 4, 8), (4, 11), (4, 11, 8), (11, 8), (4, 6, 8), (4, 11, 3), (4, 11, 3), (4, 15), (4, 11)]
    assert [x.shape for x in results] == shapes and top_keys.dtype == np.int64
    for s in range(5):
        i, j = slice(cu_q[s], cu_q[s + 1]), slice(cu_kv[s], cu_kv[s + 1])
        own = [r for r, row in enumerate(rows) if cu_q[s] <= row < cu_q[s + 1]]
        one = [heads_first(x) for x in (q[i], k[j], v[j])]
        want = [x[0] for x in qkv.attention(*one, mask=BOTTOM, **asked([rows[r] - cu_q[s] for r in own]))]

        def padded(x):
            return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, longest - x.shape[-1])])

        same(out[i].transpose(1, 0, 2), want[0])
        same(lse[:, i], want[1])
        same(weights[:, i], padded(want[2]))
        same(mean[i], padded(want[3]))
        same(row_weights[:, own], padded(want[4]))
        same(top[:, i], want[5])
        same(top_keys[:, i], want[6])
        same(sums[:, j], want[7])
        same(entropy[:, i], want[8])
    same(qkv.attention_varlen(q, k, v, np.array(cu_q), np.array(cu_kv), mask=BOTTOM), out)
    with pytest.raises(ValueError, match="n_q 11"):
        qkv.attention_varlen(q, k, v, np.array(cu_q), np.array(cu_kv), weight_rows=[11])
    with pytest.raises(ValueError, match="attention_varlen: top_k"):
        qkv.attention_varlen(q, k, v, np.array(cu_q), np.array(cu_kv), top_k=-1)
    with pytest.raises(ValueError, match="must not fall"):
        qkv.attention_varlen(q, k, v, np.array(cu_q), np.array([0, 5, 3, 7, 15, 15]), return_weights=True)
    with pytest.raises(ValueError, match="attention_varlen: out must not overlap q"):
        qkv.attention_varlen(q, k, v, np.array(cu_q), np.array(cu_kv), out=q)


def expect_entries(results, one, lengths, rows):
    """Rows of entry b are those of attention() on its own tokens; one(b) gives them and the first query row."""
    longest = max(lengths)
    for b, n in enumerate(lengths):
        q, k, v, first = one(b)
        own = [r for r, row in enumerate(rows) if row >= first]
        want = [x[0] for x in qkv.attention(q, k, v, mask=BOTTOM, **asked([rows[r] - first for r in own]))]
        out, lse, weights, mean, row_weights, top, top_keys, sums, entropy = (x[b] for x in results)
        same(out[:, first:], want[0])
        same(lse[:, first:], want[1])
        for got, want_keys in ((weights[:, first:], want[2]), (mean[first:], want[3]), (row_weights[:, own], want[4]), (sums, want[7])):
            same(got[..., :n], want_keys)
            assert got.shape[-1] == longest and (got[..., n:] == 0).all()
        same(top[:, first:], want[5])
        same(top_keys[:, first:], want[6])
        same(entropy[:, first:], want[8])
        assert (weights[:, :first] == 0).all() and (top_keys[:, :first] == -1).all()
        assert all((row_weights[:, r] == 0).all() for r in range(len(rows)) if r not in own)


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
def test_caches(kind):
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 2, 9, 8)).astype(np.float32)
    lengths = [9, 2]
    cache = qkv.KVCache(2, 2, 8, 8, capacity=20, kind=kind, page_size=4, window=50 if kind == "ring" else None)
    cache.append(k, v, counts=lengths, num_threads=2)
    rows = [2, 0, 1]

    def one(b):
        n = lengths[b]
        first = 3 - min(3, n)
        return q[b : b + 1, :, first:], k[b : b + 1, :, :n], v[b : b + 1, :, :n], first

    expect_entries(cache.attend(q, **asked(rows)), one, lengths, rows)
    if kind != "ring":
        tree = cache.fork()
        tree.truncate(2)
        branches = tree.attend(q[:, :, :2], parents=[-1, -1], return_weights=True, weight_rows=[1])
        same(branches[2][:, :, 0], branches[1][:, :, 1])
        assert (branches[2][:, :, 0, 0] == 0).all()
    with pytest.raises(ValueError, match=r"KvCache::attend: outputs.weight_rows must lie in \[0, n_q 3\)"):
        cache.attend(q, weight_rows=[3])
    with pytest.raises(ValueError, match="KVCache.attend: top_k"):
        cache.attend(q, top_k=-1)
    with pytest.raises(TypeError):
        cache.attend(q, weight_rows=5)
    with pytest.raises(ValueError, match="num_threads must not be negative"):
        cache.append(k, v, num_threads=-1)
    kept = qkv.KVCache(2, 2, 8, 8, capacity=20, window=4, num_sink_tokens=1)
    kept.append(k, v)
    with pytest.raises(ValueError, match="forms of the weights"):
        kept.attend(q, return_entropy=True)


def test_pages():
    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 4, 3, 8)).astype(np.float32)
    k_pages, v_pages = rng.standard_normal((2, 6, 4, 2, 8)).astype(np.float32)
    table, lengths, rows = np.array([[5, 0, 3], [1, -1, -1]]), [10, 2], [1, 2, 0]

    def one(b):
        n = lengths[b]
        pages = table[b][: -(-n // 4)]
        first = 3 - min(3, n)
        k, v = (heads_first(x[pages].reshape(-1, 2, 8)[:n]) for x in (k_pages, v_pages))
        return q[b : b + 1, :, first:], k, v, first

    expect_entries(qkv.attention_paged(q, k_pages, v_pages, table, lengths, **asked(rows)), one, lengths, rows)
    with pytest.raises(ValueError, match="a length must lie in"):
        qkv.attention_paged(q, k_pages, v_pages, table, [1 << 40, 2], return_weights=True)


@needs_torch
def test_torch_tensors():
    q, k, v = torch.randn(5, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    cu = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 6])
    results = qkv.attention_varlen(q, k, v, *cu, top_k=2, return_entropy=True)
    assert all(type(x) is torch.Tensor for x in results)
    assert results[2].dtype == torch.int64

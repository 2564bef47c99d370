# SPDX-License-Identifier: Apache-2.0
"""KVCache, pages of the caller, rotary positions."""

import numpy as np
import pytest
from support import needs_torch, torch

import qkv


def tokens(n, batch=2, heads=2, d=8, dv=6, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, 2 * heads, n, d)).astype(np.float32)
    k = rng.standard_normal((batch, heads, n, d)).astype(np.float32)
    v = rng.standard_normal((batch, heads, n, dv)).astype(np.float32)
    return q, k, v


@pytest.mark.parametrize("window", [None, 1, 5, 9])
@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
def test_chunks_of_any_size_equal_one_pass(kind, window):
    if kind == "ring" and window is None:
        pytest.skip("a ring needs a window")
    q, k, v = tokens(60)
    mask = qkv.Mask.causal_top_left()
    if window:
        mask = mask & qkv.Mask.window(window - 1, None, "top_left")
    want, want_lse = qkv.attention(q, k, v, mask=mask, return_lse=True)
    cache = qkv.KVCache(2, 2, 8, 6, capacity=60, kind=kind, page_size=7, window=window)
    begin = 0
    for n in (1, 1, 3, 16, 1, 2, 30, 1, 5):
        part = slice(begin, begin + n)
        cache.append(k[:, :, part], v[:, :, part])
        begin += n
        assert cache.length == begin
        for last in {1, n}:
            rows = slice(begin - last, begin)
            out, lse = cache.attend(q[:, :, rows], return_lse=True)
            np.testing.assert_allclose(out, want[:, :, rows], atol=2e-6)
            np.testing.assert_allclose(lse, want_lse[:, :, rows], atol=2e-6)


@pytest.mark.parametrize("kind", ["contiguous", "ring", "paged"])
def test_fork_and_truncate(kind):
    q, k, v = tokens(20, seed=1)
    cache = qkv.KVCache(2, 2, 8, 6, capacity=40, kind=kind, page_size=4, window=64 if kind == "ring" else None)
    cache.append(k[:, :, :12], v[:, :, :12])
    twin = cache.fork()
    twin.append(k[:, :, 12:], v[:, :, 12:])
    cache.append(-k[:, :, 12:13], v[:, :, 12:13])
    assert (cache.length, twin.length) == (13, 20)
    want = qkv.attention(q[:, :, -1:], k, v)
    np.testing.assert_allclose(twin.attend(q[:, :, -1:]), want, atol=2e-6)
    cache.truncate(12)
    cache.append(k[:, :, 12:], v[:, :, 12:])
    np.testing.assert_allclose(cache.attend(q[:, :, -1:]), want, atol=2e-6)
    cache.truncate(100)
    assert cache.length == 20


def test_cache_mistakes_are_value_errors():
    q, k, v = tokens(5)
    cache = qkv.KVCache(2, 2, 8, 6, capacity=4)
    with pytest.raises(ValueError, match=r"capacity 4.*\[2, 2, 5, 8\]"):
        cache.append(k, v)
    assert cache.length == 0
    cache.append(k[:, :, :3], v[:, :, :3])
    for call in (
        lambda: cache.append(k[:1], v[:1]),
        lambda: cache.append(k[:, :, :1], v[:, :, :1, :3]),
        lambda: cache.append(k[:, :, :1], v[:, :, :0]),
        lambda: cache.attend(q),
        lambda: cache.truncate(-1),
        lambda: qkv.KVCache(1, 1, 2, 2, 4, kind="ring"),
        lambda: qkv.KVCache(1, 1, 2, 2, 4, kind="tree"),
        lambda: qkv.KVCache(1, 1, 2, 2, 4, dtype="int4"),
        lambda: qkv.KVCache(-1, 1, 2, 2, 4),
    ):
        with pytest.raises(ValueError):
            call()
    assert cache.length == 3
    ring = qkv.KVCache(2, 2, 8, 6, capacity=4, kind="ring", window=2)
    for _ in range(3):
        ring.append(k, v)
    with pytest.raises(ValueError, match="ring"):
        ring.truncate(4)
    with pytest.raises(ValueError, match="ring"):
        ring.attend(np.concatenate([q, q], 2))


@pytest.mark.parametrize("dtype, bound", [("float64", 2e-6), ("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 3e-2)])
def test_element_types_of_the_cache(dtype, bound):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    q, k, v = tokens(30)
    want = qkv.attention(q[:, :, -1:], k, v)
    cache = qkv.KVCache(2, 2, 8, 6, capacity=30, dtype=dtype)
    cache.append(k, v)
    q = q.astype(np.float64) if dtype == "float64" else q
    np.testing.assert_allclose(cache.attend(q[:, :, -1:]), want, atol=bound)


def test_from_buffers_works_on_the_callers_memory():
    q, k, v = tokens(9)
    k_buffer, v_buffer = np.full((2, 9, 2, 8), np.nan, np.float32), np.full((2, 9, 2, 6), np.nan, np.float32)
    k_view, v_view = k_buffer.transpose(0, 2, 1, 3), v_buffer.transpose(0, 2, 1, 3)
    lengths = [3, 5]
    for b, n in enumerate(lengths):
        k_view[b, :, :n], v_view[b, :, :n] = k[b, :, :n], v[b, :, :n]
    cache = qkv.KVCache.from_buffers(k_view, v_view, lengths)
    assert cache.length.tolist() == lengths
    cache.append(k[:, :, 5:7], v[:, :, 5:7])
    np.testing.assert_array_equal(k_buffer[0, 3:5], k[0, :, 5:7].swapaxes(0, 1))
    out = cache.attend(q[:, :, :2])
    for b, n in enumerate(lengths):
        keys = np.r_[0:n, 5:7]
        want = qkv.attention(q[b : b + 1, :, :2], k[b : b + 1][:, :, keys], v[b : b + 1][:, :, keys], mask=qkv.Mask.causal_bottom_right())
        np.testing.assert_allclose(out[b : b + 1], want, atol=2e-6)
    with pytest.raises(ValueError, match="capacity 9"):
        cache.append(k[:, :, :3], v[:, :, :3])


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8"])
def test_kinds_give_the_same_bits(dtype):
    q, k, v = tokens(90, seed=2)
    q = q.astype(np.float64) if dtype == "float64" else q
    outs = []
    for kind in ("contiguous", "ring", "paged"):
        cache = qkv.KVCache(2, 2, 8, 6, capacity=90, dtype=dtype, kind=kind, page_size=16, window=20)
        cache.append(k[:, :, :50], v[:, :, :50])
        for t in range(50, 90):
            cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        outs.append(cache.attend(q[:, :, -1:]))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def test_int8_reports_its_error():
    q, k, v = tokens(30)
    cache = qkv.KVCache(2, 2, 8, 6, capacity=30, dtype="int8")
    cache.append(k, v)
    error = cache.quant_error
    assert error["num_rows"] == 2 * 2 * 30
    assert 0.4 / 127 < error["max_relative_k"] <= 0.5001 / 127
    assert 0 < error["rms_v"] < error["max_abs_v"]


def test_counts_saved_and_loaded(tmp_path):
    q, k, v = tokens(6)
    cache = qkv.KVCache(2, 2, 8, 6, capacity=10, kind="paged", page_size=4)
    cache.append(k, v, counts=[6, 2])
    assert cache.length.tolist() == [6, 2]
    cache.save(tmp_path / "cache.safetensors")
    loaded = qkv.KVCache.load(tmp_path / "cache.safetensors")
    assert (loaded.kind, loaded.capacity, loaded.page_size, loaded.dtype) == ("paged", 10, 4, "float32")
    out = loaded.attend(q[:, :, :3], counts=[3, 1])
    np.testing.assert_array_equal(out, cache.attend(q[:, :, :3], counts=[3, 1]))
    assert (out[1, :, 1:] == 0).all()
    want = qkv.attention(q[1:, :, :1], k[1:, :, :2], v[1:, :, :2])
    np.testing.assert_array_equal(out[1:, :, :1], want)
    everything = loaded.attend(q[:, :, :2], mask=qkv.Mask.full())
    np.testing.assert_array_equal(everything[:1], qkv.attention(q[:1, :, :2], k[:1], v[:1]))


def test_rope_and_a_tree_of_guesses():
    q, k, v = tokens(12, batch=1, seed=7)
    parents, depth = [-1, 0, 0, 1], np.array([0, 1, 1, 2])
    cache = qkv.KVCache(1, 2, 8, 6, capacity=20, rope={"base": 100.0})
    cache.append(k[:, :, :8], v[:, :, :8])
    line = cache.fork()
    cache.append(k[:, :, 8:], v[:, :, 8:], positions=8 + depth)
    out = cache.attend(q[:, :, 8:], parents=parents, positions=8 + depth)
    path = [8, 9, 11]
    line.append(k[:, :, path], v[:, :, path])
    np.testing.assert_allclose(out[:, :, 3:], line.attend(q[:, :, 11:]), atol=2e-6)
    cache.keep_of_last(4, [0, 1, 3])
    np.testing.assert_array_equal(cache.attend(q[:, :, 11:]), line.attend(q[:, :, 11:]))
    turned = qkv.rope(k[:, :, :8], np.arange(8), base=100.0)
    plain = qkv.KVCache(1, 2, 8, 6, capacity=20)
    plain.append(turned, v[:, :, :8])
    cache.truncate(8)
    want = plain.attend(qkv.rope(q[:, :, 7:8], np.array([7]), base=100.0))
    np.testing.assert_allclose(cache.attend(q[:, :, 7:8]), want, atol=2e-6)
    with pytest.raises(ValueError, match="base, style and rot_dim"):
        qkv.KVCache(1, 1, 2, 2, 4, rope={"theta": 1})


@needs_torch
def test_cache_takes_torch_tensors():
    q, k, v = (torch.from_numpy(x) for x in tokens(6))
    cache = qkv.KVCache(2, 2, 8, 6, capacity=6)
    cache.append(k, v)
    out = cache.attend(q)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, qkv.attention(q, k, v, mask=qkv.Mask.causal_top_left()))


def test_pages_in_any_order_equal_contiguous():
    q, k, v = tokens(11, batch=3, seed=4)
    lengths, size = np.array([11, 5, 8]), 4
    table = np.array([[7, 2, 5], [0, 3, -1], [6, 1, 999]])
    k_pages, v_pages = np.full((8, size, 2, 8), np.nan, np.float32), np.full((8, size, 2, 6), np.nan, np.float32)
    for b, n in enumerate(lengths):
        for t in range(n):
            k_pages[table[b, t // size], t % size] = k[b, :, t]
            v_pages[table[b, t // size], t % size] = v[b, :, t]
    out, lse = qkv.attention_paged(q[:, :, :3], k_pages, v_pages, table, lengths, return_lse=True)
    for b, n in enumerate(lengths):
        want = qkv.attention(
            q[b : b + 1, :, :3], k[b : b + 1, :, :n], v[b : b + 1, :, :n], mask=qkv.Mask.causal_bottom_right(), return_lse=True
        )
        np.testing.assert_allclose(out[b : b + 1], want[0], atol=2e-6)
        np.testing.assert_allclose(lse[b : b + 1], want[1], atol=2e-6)
    for broken in (lambda: (table, [13, 5, 8]), lambda: (table[:2], lengths), lambda: (np.where(table == 7, 8, table), lengths)):
        with pytest.raises(ValueError):
            qkv.attention_paged(q[:, :, :3], k_pages, v_pages, *broken())


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_rope_turns_by_relative_positions(style):
    rng = np.random.default_rng(5)
    q, k = rng.standard_normal((2, 1, 2, 1, 8))
    scores = []
    for shift in (0, 1000):
        a, b = (qkv.rope(x, np.array([p + shift]), style=style) for x, p in ((q, 7), (k, 3)))
        scores.append((a * b).sum(-1))
    np.testing.assert_allclose(*scores, rtol=1e-9)
    x = rng.standard_normal((2, 3, 5, 8)).astype(np.float32)
    np.testing.assert_array_equal(qkv.rope(x, np.zeros(5, int), style=style), x)
    part = qkv.rope(x, np.arange(5), style=style, rot_dim=4)
    np.testing.assert_array_equal(part[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(part[..., :4], qkv.rope(x[..., :4], np.arange(5), style=style))
    rows = qkv.rope(x, np.stack([np.arange(5), np.arange(5) + 2]), style=style)
    np.testing.assert_array_equal(rows[1], qkv.rope(x[1:], np.arange(5) + 2, style=style)[0])


def test_rope_styles_agree_after_the_permutation():
    rng = np.random.default_rng(6)
    w, x = rng.standard_normal((2 * 8, 6)), rng.standard_normal((1, 5, 6))

    def heads(w):
        return (x @ w.T).reshape(1, 5, 2, 8).transpose(0, 2, 1, 3)

    a = qkv.rope(heads(w), np.arange(5), style="interleaved")
    b = qkv.rope(heads(qkv.convert.permute_rope_rows(w, 2)), np.arange(5), style="half_split")
    order = np.r_[0:8:2, 1:8:2]
    np.testing.assert_allclose(a[..., order], b, atol=1e-12)


@needs_torch
def test_rope_of_torch_tensors_passes_gradients():
    x = torch.randn(1, 2, 3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: qkv.rope(x, [0, 5, 9]), (x,))
    np.testing.assert_array_equal(qkv.rope(x.detach(), [0, 5, 9]).numpy(), qkv.rope(x.detach().numpy(), [0, 5, 9]))


def test_rope_mistakes_are_value_errors():
    x = np.zeros((1, 1, 3, 4))
    for options in ({"style": "both"}, {"rot_dim": 3}, {"rot_dim": 6}):
        with pytest.raises(ValueError):
            qkv.rope(x, np.arange(3), **options)
    for positions in (np.arange(4), np.zeros((2, 3))):
        with pytest.raises(ValueError, match="positions"):
            qkv.rope(x, positions)
    with pytest.raises(ValueError):
        qkv.alibi_slopes(0)

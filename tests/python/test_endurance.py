# SPDX-License-Identifier: Apache-2.0
"""Many calls and many threads: what a call costs, what it leaves behind, what it gives beside others.

QKV_CALLS=1000000 python -m pytest tests/python/test_endurance.py   a million calls (minutes)
"""

import ctypes
import gc
import os
import random
import sys
import threading

import numpy as np
import pytest
from support import ROOT, OnlyDlpack, needs_torch, torch

import qkv

sys.path.append(str(ROOT / "bench"))

CALLS = int(os.environ.get("QKV_CALLS", "150000"))  # in all
ROUNDS = CALLS // 44  # a round of all families makes 44 calls


def arrays(batch=1, heads=2, kv_heads=1, n_q=2, n_kv=3, d=4, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, d))
    return tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)


def refused(call, error=ValueError):
    try:
        call()
    except error:
        return
    raise AssertionError("not refused")


# Families of calls. Each function returns one round: calls that end, and mistakes that are refused.


def family_attention():
    q, k, v = arrays()
    mask, bias = np.ones((2, 3), bool), np.zeros((2, 3), np.float32)
    bad, strided = k[..., :2], np.asfortranarray(k)
    out = np.empty_like(q)
    only = OnlyDlpack(q)

    def calls():
        qkv.attention(q, k, v, return_lse=True, return_weights=True)
        qkv.attention(q, strided, v, mask=mask, bias=bias, sinks=np.zeros(2, np.float32), out=out)
        qkv.attention(q, k, v, return_mean_weights=True, weight_rows=[1], top_k=2, return_column_sums=True, return_entropy=True)
        qkv.attention(only, k, v, dropout=0.5, seed=3)
        refused(lambda: qkv.attention(q, bad, v))
        refused(lambda: qkv.attention(q, k, v, mask=bias))
        refused(lambda: qkv.attention(q, k, v, weight_rows=[7]))
        refused(lambda: qkv.attention(q, k, [1.0]), TypeError)
        refused(lambda: qkv.attention(q, k, v, wrong=1), TypeError)

    return calls


def family_gradients_and_variants():
    q, k, v = arrays()
    out, lse = qkv.attention(q, k, v, return_lse=True)
    packed = [x[0].transpose(1, 0, 2).copy() for x in (q, k, v)]
    pages = np.zeros((4, 2, 1, 4), np.float32)
    table, lengths = np.array([[0, 1]], np.int32), np.array([3], np.int64)

    def calls():
        qkv.attention_backward(q, k, v, out, lse, out)
        qkv.attention_varlen(*packed, np.array([0, 2]), np.array([0, 3]))
        qkv.attention_paged(q, pages, pages, table, lengths)
        qkv.merge_states(out, lse, out, lse)
        refused(lambda: qkv.attention_backward(q, k, v, out, lse, k))
        refused(lambda: qkv.attention_varlen(*packed, np.array([0, 9]), np.array([0, 3])))
        refused(lambda: qkv.attention_paged(q, pages, pages, table + 9, lengths))

    return calls


def family_masks_and_positions():
    x = np.ones((1, 1, 3, 4), np.float32)

    def calls():
        mask = qkv.Mask.window(2, None) & qkv.Mask.lengths([2]) & np.ones((3, 3), bool)
        mask.to_dense(3, 3)
        repr(mask & qkv.Mask.documents([0, 1, 1], [0, 1, 1]))
        qkv.plan(x, x, x, mask=mask)
        qkv.rope(x, np.arange(3))
        qkv.alibi_slopes(3)
        refused(lambda: qkv.Mask.chunk(0))
        refused(lambda: qkv.plan(num_heads=3, num_kv_heads=2))

    return calls


def family_cache():
    q, k, v = arrays(n_q=1)

    def calls():
        cache = qkv.KVCache(1, 1, 4, 4, 8, kind=random.choice(["contiguous", "paged"]))
        cache.append(k, v)
        cache.attend(q, return_lse=True)
        other = cache.fork()
        cache.truncate(1)
        other.append(k, v)
        refused(lambda: other.append(k, v))
        refused(lambda: cache.attend(q[..., :2]))

    return calls


def family_layers():
    layer = qkv.GQA(2, 1, 4, 4, 2, 2, 3)
    x = np.ones((1, 3, 4), np.float32)
    mask = np.zeros((1, 3, 3), np.float32)
    state = layer.state_dict()

    def calls():
        layer(x, x, x, mask)
        layer(x, x, x, need_weights=False)
        layer.load_state_dict(state)
        refused(lambda: layer(x, x[..., :2], x))

    return calls


def family_torch():
    import qkv.torch

    q, k, v = (torch.from_numpy(x) for x in arrays())
    wants = q.clone().requires_grad_()
    mask, bias = torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3)
    sdpa = qkv.torch.scaled_dot_product_attention

    def calls():
        qkv.attention(q, k, v, return_lse=True)
        sdpa(q, k, v, mask, enable_gqa=True)
        sdpa(q[0], k[0], v[0], bias, enable_gqa=True)
        torch.autograd.grad(sdpa(wants, k, v, bias, enable_gqa=True).sum(), wants)
        refused(lambda: sdpa(q, k[..., :2], v, enable_gqa=True), RuntimeError)
        refused(lambda: qkv.attention(wants, k, v))

    return calls


def family_torch_modules():
    import qkv.torch

    module = qkv.torch.GQA(2, 1, 4, 4, 2, 2, 3)
    x, mask = torch.ones(1, 3, 4), torch.zeros(1, 3, 3)

    def calls():
        with torch.no_grad():
            module(x, x, x, mask)
            refused(lambda: module(x, x[..., :2], x))
        module(x, x, x, mask)[1].sum().backward()
        module.zero_grad()

    return calls


FAMILIES = [
    family_attention, family_gradients_and_variants, family_masks_and_positions, family_cache, family_layers,
    pytest.param(family_torch, marks=needs_torch), pytest.param(family_torch_modules, marks=needs_torch),
]  # fmt: skip


class Mallinfo(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]


def heap_bytes():
    """What malloc has given out, in all arenas; None without glibc 2.33."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype = Mallinfo
    found = mallinfo2()
    return found.uordblks + found.hblkhd


def resident_bytes():
    with open("/proc/self/statm", encoding="ascii") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_leave_nothing_behind(family):
    calls = family()
    warm = max(ROUNDS // 10, 300)  # caches of the interpreter, of torch and of ours
    for _ in range(warm):
        calls()
    counted = []
    for rounds in (0, ROUNDS):
        for _ in range(rounds):
            calls()
        gc.collect()
        counted.append((sys.getallocatedblocks(), len(gc.get_objects()), heap_bytes() or 0, resident_bytes()))
    blocks, objects, heap, resident = (b - a for a, b in zip(*counted))
    few = 200 + ROUNDS // 100  # a leak is at least one object per round
    assert blocks < few and objects < few, (blocks, objects)
    assert heap < 65536 + 4 * ROUNDS, f"{heap} bytes of the heap after {ROUNDS} rounds"
    assert resident < 4 << 20, f"{resident} bytes more resident after {ROUNDS} rounds"


def bits(result):
    parts = result if isinstance(result, tuple) else (result,)
    return tuple(np.asarray(x).tobytes() for x in parts)


class CallsInside(OnlyDlpack):
    """Its values are asked for inside a call of qkv, and make another one there."""

    def __dlpack__(self, **kwargs):
        small = np.ones((1, 1, 2, 2), np.float32)
        assert np.array_equal(qkv.attention(small, small, small, mask=np.tri(2, dtype=bool)), small)
        return super().__dlpack__(**kwargs)


def jobs():
    """{name: call}: different shapes, paths, mistakes and nested calls, each with one right result."""
    causal = qkv.Mask.causal_bottom_right()
    found = {}
    for i, (heads, kv_heads, n_q, n_kv, d) in enumerate(
        [(8, 2, 200, 300, 32), (4, 4, 1, 900, 64), (2, 1, 33, 70, 5), (1, 1, 1, 1, 1), (16, 1, 3, 500, 16), (3, 3, 129, 65, 72)]
    ):
        q, k, v = arrays(2, heads, kv_heads, n_q, n_kv, d, seed=i)
        mask = np.random.default_rng(i).random((n_q, n_kv)) < 0.7
        for threads in (1, 2):
            found[f"causal {i} {threads}"] = lambda q=q, k=k, v=v, t=threads: bits(
                qkv.attention(q, k, v, mask=causal, return_lse=True, num_threads=t)
            )
        found[f"dense {i}"] = lambda q=q, k=k, v=v, m=mask: bits(qkv.attention(q, k, v, mask=m, return_weights=True))
        found[f"nested {i}"] = lambda q=q, k=k, v=v: bits(qkv.attention(q, CallsInside(k), CallsInside(v)))

        def mistake(q=q, k=k, v=v):
            try:
                return qkv.attention(q, k[..., :-1], v)
            except ValueError as error:
                return str(error)

        found[f"mistake {i}"] = mistake

    def cached(kind):
        q, k, v = arrays(2, 4, 2, 1, 1, 16, seed=9)
        cache = qkv.KVCache(2, 2, 16, 16, 40, kind=kind, page_size=8)
        results = []
        for step in range(30):
            cache.append(k + step, v - step)
            results.append(cache.attend(q))
        fork = cache.fork()
        cache.truncate(7)
        return bits((np.stack(results), fork.attend(q), cache.attend(q)))

    found["contiguous cache"] = lambda: cached("contiguous")
    found["paged cache"] = lambda: cached("paged")
    layer = qkv.GQA(4, 2, 24, 20, 8, 8, 12)  # packed by whoever is first
    x = np.random.default_rng(5).standard_normal((3, 9, 24)).astype(np.float32)
    found["layer"] = lambda: bits(layer(x, x, x[..., :20]))
    q, k, v = arrays(1, 4, 2, 20, 30, 8)
    out, lse = qkv.attention(q, k, v, return_lse=True)
    found["backward"] = lambda: bits(qkv.attention_backward(q, k, v, out, lse, out))
    if torch is not None:
        import qkv.torch as qkv_torch

        tensors = [torch.from_numpy(a) for a in (q, k, v)]
        module = qkv_torch.GQA(4, 2, 24, 20, 8, 8, 12)
        tx = torch.from_numpy(x)

        def no_grad():
            with torch.no_grad():
                return bits(module(tx, tx, tx[..., :20]))

        def gradients():
            leaves = [t.clone().requires_grad_() for t in tensors]
            result = qkv_torch.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
            return bits(torch.autograd.grad(result.sum(), leaves))

        found |= {"torch module": no_grad, "torch gradients": gradients}
    return found


def test_free_threads_get_the_bits_of_one_thread():
    calls = jobs()
    want = {name: call() for name, call in calls.items()}
    assert all("head_dim_qk" in want[n] for n in want if n.startswith("mistake"))
    wrong, done = [], []
    start = threading.Barrier(8)

    def work(seed):
        order = random.Random(seed)
        start.wait()
        for _ in range(3):
            names = list(calls)
            order.shuffle(names)
            for name in names:
                try:
                    if calls[name]() != want[name]:
                        wrong.append(name)
                except Exception as error:
                    wrong.append(f"{name}: {error!r}")
        done.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(done) == 8 and not wrong, sorted(set(wrong))


def test_tiny_calls_cost_less_than_5_us_above_cpp():
    import tiny_calls

    missed = {}
    for name, call in tiny_calls.cases().items():
        for _ in range(5):  # another program may have had the core
            whole, inside = tiny_calls.costs(call)
            if whole - inside < tiny_calls.LIMIT_US:
                break
        else:
            missed[name] = (whole, inside)
    assert not missed

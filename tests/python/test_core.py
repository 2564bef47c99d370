# SPDX-License-Identifier: Apache-2.0
"""qkv.attention, qkv.Mask, qkv.plan: arrays in and out, arguments, errors, threads, cost."""

import gc
import inspect
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support import OnlyDlpack, needs_torch, torch

import qkv


def arrays(batch=2, heads=4, kv_heads=2, n_q=5, n_kv=9, d=8, dv=3, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        rng.standard_normal(s).astype(dtype)
        for s in ((batch, heads, n_q, d), (batch, kv_heads, n_kv, d), (batch, kv_heads, n_kv, dv))
    )


def naive(q, k, v, visible=None):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ np.repeat(k, group, 1).swapaxes(2, 3) / np.sqrt(q.shape[3])
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(np.isinf(m), 0, m))
    total = p.sum(-1, keepdims=True)
    p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
    with np.errstate(divide="ignore"):
        return p @ np.repeat(v, group, 1), (m + np.log(total))[..., 0], p


def test_attention_outputs_in_order_and_close_to_naive():
    q, k, v = arrays(dtype=np.float64)
    want = naive(q, k, v)
    assert type(qkv.attention(q, k, v)) is np.ndarray
    np.testing.assert_allclose(qkv.attention(q, k, v), want[0], atol=1e-14)
    out, lse = qkv.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(lse, want[1], atol=1e-14)
    out, weights = qkv.attention(q, k, v, return_weights=True)
    np.testing.assert_allclose(weights, want[2], atol=1e-14)
    got = qkv.attention(q, k, v, return_lse=True, return_weights=True)
    assert [x.shape for x in got] == [(2, 4, 5, 3), (2, 4, 5), (2, 4, 5, 9)]
    np.testing.assert_array_equal(got[0], out)


def test_attention_forms_of_the_weights_follow_in_order():
    q, k, v = arrays(dtype=np.float64)
    mask = np.random.default_rng(3).random((5, 9)) < 0.6
    mask[2] = False
    mask[3, 1:] = False
    out, weights = qkv.attention(q, k, v, mask=mask, return_weights=True)
    got = qkv.attention(
        q, k, v, mask=mask, return_lse=True, return_weights=True, return_mean_weights=True, weight_rows=[4, 0],
        top_k=3, return_column_sums=True, return_entropy=True,
    )  # fmt: skip
    assert len(got) == 9
    np.testing.assert_array_equal(got[0], out)
    np.testing.assert_array_equal(got[2], weights)
    mean, rows, top, keys, sums, entropy = got[3:]
    np.testing.assert_allclose(mean, weights.mean(1), atol=1e-15)
    np.testing.assert_array_equal(rows, weights[:, :, [4, 0]])
    np.testing.assert_allclose(sums, weights.sum(2), atol=1e-14)
    p = np.where(weights > 0, weights, 1)
    np.testing.assert_allclose(entropy, -(weights * np.log(p)).sum(-1), atol=1e-14)
    order = np.argsort(-np.where(mask, weights, -1), axis=-1, kind="stable")[..., :3]
    want = np.where(np.take_along_axis(np.broadcast_to(mask, weights.shape), order, -1), order, -1)
    assert keys.dtype == np.int64
    np.testing.assert_array_equal(keys, want)
    np.testing.assert_array_equal(top, np.where(want < 0, 0, np.take_along_axis(weights, order, -1)))
    assert (keys[:, :, 2] == -1).all() and (entropy[:, :, 3] == 0).all()

    alone = qkv.attention(q, k, v, mask=mask, return_entropy=True)
    np.testing.assert_array_equal(alone[1], entropy)
    for given in (range(2), np.array([0, 1]), (0, 1)):
        np.testing.assert_array_equal(qkv.attention(q, k, v, mask=mask, weight_rows=given)[1], weights[:, :, :2])
    assert qkv.attention(q, k, v, weight_rows=[])[1].shape == (2, 4, 0, 9)
    assert qkv.attention(q, k, v, top_k=0)[2].shape == (2, 4, 5, 0)
    for bad, words in (({"weight_rows": [5]}, "n_q 5"), ({"weight_rows": [-1]}, "got -1"), ({"top_k": -1}, "top_k")):
        with pytest.raises(ValueError, match=words):
            qkv.attention(q, k, v, **bad)
    for bad in ({"weight_rows": 3}, {"weight_rows": [0.5]}, {"top_k": 1.5}):
        with pytest.raises(TypeError):
            qkv.attention(q, k, v, **bad)


def test_attention_out_is_written_and_returned():
    q, k, v = arrays()
    buffer = np.full((2, 5, 4, 3), 7, np.float32).transpose(0, 2, 1, 3)
    assert qkv.attention(q, k, v, out=buffer) is buffer
    np.testing.assert_array_equal(buffer, qkv.attention(q, k, v))


def test_attention_result_is_the_kind_of_q():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        q, k, v = arrays(dtype=dtype)
        out, lse = qkv.attention(q, k, v, return_lse=True)
        assert out.dtype == np.dtype(dtype)
        assert lse.dtype == (np.float64 if dtype is np.float64 else np.float32)


@needs_torch
def test_attention_reads_and_makes_torch_tensors():
    q, k, v = arrays()
    want = qkv.attention(q, k, v)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    out = qkv.attention(*tensors)
    assert type(out) is torch.Tensor
    np.testing.assert_array_equal(out.numpy(), want)
    assert qkv.attention(q, *tensors[1:]).tobytes() == want.tobytes()  # mixed kinds: that of q
    for dtype in (torch.bfloat16, torch.float16):
        assert qkv.attention(*(t.to(dtype) for t in tensors)).dtype is dtype
    mask = torch.ones(5, 9, dtype=torch.bool).tril()
    np.testing.assert_array_equal(
        qkv.attention(*tensors, mask=mask).numpy(), qkv.attention(q, k, v, mask=mask.numpy())
    )


@needs_torch
def test_attention_refuses_to_lose_a_gradient():
    q, k, v = (torch.from_numpy(x) for x in arrays())
    q.requires_grad_()
    with pytest.raises(ValueError, match="q requires a gradient"):
        qkv.attention(q, k, v)
    with torch.no_grad():
        assert qkv.attention(q, k, v).shape == (2, 4, 5, 3)


def test_attention_takes_any_dlpack_producer_and_answers_in_kind():
    q, k, v = arrays()
    out = qkv.attention(*(OnlyDlpack(x) for x in (q, k, v)))
    assert isinstance(out, OnlyDlpack)
    np.testing.assert_array_equal(out.array, qkv.attention(q, k, v))


def test_attention_does_not_copy_what_it_can_read():
    # 64 MiB of keys seen through a broadcast: a copy would show in the peak of memory.
    q = np.zeros((64, 4, 1, 64), np.float32)
    k = np.broadcast_to(np.zeros((1, 4, 4096, 64), np.float32), (64, 4, 4096, 64))
    qkv.attention(q[:1], k[:1], k[:1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    qkv.attention(q, k, k)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(k=lambda k: k[..., :4]), r"head_dim_qk .*\[2, 4, 5, 8\].*\[2, 2, 9, 4\]"),
        (dict(v=lambda v: v[:, :, :4]), r"n_kv .*\[2, 2, 9, 8\].*\[2, 2, 4, 3\]"),
        (dict(k=lambda k: k[:1]), r"batch .*\[2, 4, 5, 8\].*\[1, 2, 9, 8\]"),
        (dict(q=lambda q: q[:, :3]), r"num_heads 3 is not a multiple of num_kv_heads 2"),
        (dict(q=lambda q: q[0]), r"4 axes .*\[4, 5, 8\]"),
        (dict(k=lambda k: k.astype(np.float64)), "element type"),
        (dict(q=lambda q: q.astype(np.int32)), "element type"),
        (dict(q=lambda q: q.astype(np.complex64)), "element type"),
        (dict(q=lambda q: q.astype(">f4")), "element type"),
        (dict(mask=np.ones((4, 9), bool)), r"mask .*\[4, 9\].*\[2, 4, 5, 9\]"),
        (dict(mask=np.zeros((5, 9), np.float32)), "mask must be boolean"),
        (dict(mask=np.zeros((5, 9), np.int64)), "mask must be boolean"),
        (dict(bias=np.ones((5, 9), bool)), "bias must be floating point"),
        (dict(bias=np.ones((5, 8), np.float32)), r"bias .*\[5, 8\].*\[2, 4, 5, 9\]"),
        (dict(sinks=np.ones(3, np.float32)), r"sinks .*\[3\]"),
        (dict(alibi_slopes=np.ones(5, np.float32)), r"alibi_slopes .*\[5\]"),
        (dict(scale=float("nan")), "scale"),
        (dict(softcap=-1.0), "softcap"),
        (dict(dropout=1.5), "dropout"),
        (dict(num_threads=-1), "num_threads"),
        (dict(out=np.zeros((2, 4, 5, 4), np.float32)), r"\[2, 4, 5, 3\].*\[2, 4, 5, 4\]"),
        (dict(mask=qkv.Mask.lengths([3, 10])), "10"),
        (dict(mask=qkv.Mask.lengths([3, 4, 5])), "3"),
    ],
)
def test_attention_mistakes_are_value_errors(change, text):
    q, k, v = arrays()
    given = {"q": q, "k": k, "v": v}
    for name, value in change.items():
        given[name] = value(given[name]) if callable(value) else value
    with pytest.raises(ValueError, match=text) as error:
        qkv.attention(**given)
    assert str(error.value).startswith("attention: ")


def test_attention_refuses_bad_outputs():
    q, k, v = arrays(dv=8)
    frozen = np.zeros((2, 4, 5, 8), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        qkv.attention(q, k, v, out=frozen)
    with pytest.raises(ValueError, match="overlap q"):
        qkv.attention(q, k, v, out=q)


def test_attention_arguments_are_checked_by_python_rules():
    q, k, v = arrays()
    for call in (
        lambda: qkv.attention(q, k),
        lambda: qkv.attention(q, k, v, None),
        lambda: qkv.attention(q, k, v, q=q),
        lambda: qkv.attention(q, k, v, causal=True),
        lambda: qkv.attention(q, k, [[1.0]]),
        lambda: qkv.attention(q, k, None),
        lambda: qkv.attention(q, k, v, scale="1"),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()


def test_attention_signature_and_docstring_teach():
    signature = inspect.signature(qkv.attention)
    assert list(signature.parameters) == (
        "q k v mask bias scale softcap sinks alibi_slopes dropout seed return_lse return_weights"
        " return_mean_weights weight_rows top_k return_column_sums return_entropy out num_threads".split()
    )
    assert signature.parameters["mask"].kind is inspect.Parameter.KEYWORD_ONLY
    for word in ("[batch, num_kv_heads, n_kv, head_dim_qk]", "natural log", "ValueError", "arXiv", "flop", "-inf"):
        assert word in qkv.attention.__doc__


def test_mask_kinds_show_their_pictures():
    m = qkv.Mask
    assert m.causal_top_left().to_text(4, 6).split() == ["x.....", "xx....", "xxx...", "xxxx.."]
    assert m.causal_bottom_right().to_text(4, 6).split() == ["xxx...", "xxxx..", "xxxxx.", "xxxxxx"]
    assert m.window(1, 0).to_text(4, 6).split() == [".xx...", "..xx..", "...xx.", "....xx"]
    assert m.window(1, 0, "top_left").to_text(4, 6).split() == ["x.....", "xx....", ".xx...", "..xx.."]
    assert m.window(None, None).is_full or m.window(None, None).to_dense(3, 3).all()
    assert m.prefix(4).to_text(4, 6).split() == ["xxxx..", "xxxx..", "xxxxx.", "xxxxxx"]
    assert m.chunk(3).to_text(4, 6).split() == ["xxx...", "...xxx", "...xxx", "...xxx"]
    assert m.full().to_dense(2, 3).tolist() == [[True] * 3] * 2
    lengths = m.lengths(np.array([1, 3])).to_dense(2, 3)
    assert lengths.shape == (2, 1, 2, 3)
    assert lengths[:, 0, 0].tolist() == [[True, False, False], [True, True, True]]
    documents = m.documents([0, 0, 1], [0, 1, 1, 0])
    assert documents.to_text(3, 4).split() == ["x..x", "x..x", ".xx."]
    assert "svg" in m.full().to_svg(2, 2)
    assert repr(m.causal_top_left() & m.lengths([2])) == "Mask(causal_top_left & lengths(2))"


def test_mask_and_combines_masks_and_arrays_on_both_sides():
    array = np.array([[True, False, True], [True, True, False]])
    causal = qkv.Mask.causal_top_left()
    want = array & causal.to_dense(2, 3)
    for mask in (causal & array, array & causal):
        assert isinstance(mask, qkv.Mask)
        np.testing.assert_array_equal(mask.to_dense(2, 3), want)
    assert causal.count_visible(2, 3, batch=2, num_heads=5) == 30


def test_mask_keeps_its_array_alive():
    q, k, v = arrays()
    visible = np.tri(5, 9, dtype=bool)
    want = qkv.attention(q, k, v, mask=visible)
    mask = qkv.Mask.dense(visible.copy())
    gc.collect()
    junk = [np.zeros((5, 9), bool) for _ in range(100)]
    np.testing.assert_array_equal(qkv.attention(q, k, v, mask=mask), want)
    assert len(junk) == 100


def test_mask_mistakes_are_value_errors():
    for call in (
        lambda: qkv.Mask.window(-2, 0),
        lambda: qkv.Mask.window(1, 0, "left"),
        lambda: qkv.Mask.lengths([1.5]),
        lambda: qkv.Mask.lengths(np.array([0.5])),
        lambda: qkv.Mask.chunk(0),
        lambda: qkv.Mask.dense(np.zeros((2, 2), np.int32)),
    ):
        with pytest.raises(ValueError):
            call()


def test_plan_says_what_runs():
    q, k, v = arrays()
    plan = qkv.plan(q, k, v, mask=qkv.Mask.causal_bottom_right())
    visible = qkv.Mask.causal_bottom_right().count_visible(5, 9) * 2 * 4
    assert plan["visible_pairs"] == visible and plan["flop"] == 2 * visible * (8 + 3)
    decode = qkv.plan(batch=1, num_heads=32, num_kv_heads=8, n_q=1, n_kv=4096, head_dim_qk=128)
    assert decode["path"] == "decode" and decode["reason"] and decode["scratch_bytes"] > 0
    assert qkv.plan(batch=0)["path"] == "empty"
    with pytest.raises(ValueError, match="64 bits"):
        qkv.plan(batch=2**40, n_q=2**40)
    with pytest.raises(ValueError, match="multiple"):
        qkv.plan(num_heads=3, num_kv_heads=2)


def test_info_and_set_isa():
    first = qkv.info()
    assert first["version"] == qkv.__version__ and first["isa"] in first["isa_available"]
    q, k, v = arrays(n_q=40, n_kv=50)
    want = naive(q, k, v)[0]
    try:
        for isa in first["isa_available"]:
            qkv.set_isa(isa)
            assert (qkv.info()["isa"], qkv.info()["isa_reason"]) == (isa, "set_isa")
            np.testing.assert_allclose(qkv.attention(q, k, v), want, atol=2e-6)
        with pytest.raises(ValueError):
            qkv.set_isa("no such set")
    finally:
        qkv.set_isa("auto")


def test_the_gil_is_released_during_a_call():
    q = np.zeros((1, 1, 3000, 64), np.float32)
    steps, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            steps[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        before = steps[0]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # without a release the counter could not run at all
        qkv.attention(q, q, q, num_threads=1)
        assert steps[0] > before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        counter.join()


def test_ctrl_c_interrupts_a_long_call():
    program = (
        "import signal, numpy as np, qkv\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background starts with SIGINT ignored
        "x = np.zeros((1, 64, 16384, 128), np.float32)\n"
        "print('ready', flush=True)\n"
        "try:\n    qkv.attention(x, x, x)\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
    )
    for threads in ("1", "2"):
        child = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**__import__("os").environ, "QKV_NUM_THREADS": threads}
        )
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
        assert out == b"interrupted\n"

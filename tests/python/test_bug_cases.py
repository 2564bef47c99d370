# SPDX-License-Identifier: Apache-2.0
"""Mistakes that attention code in the wild made, through the Python package: every run of the file."""

import mmap
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from support import assert_close, bug_cases, from_dtype, mask_of, needs_shared, needs_torch, to_dtype, torch

import qkv

RUNS = [(c["id"], i, run) for c in bug_cases() for i, run in enumerate(c["runs"])]
# Default tolerance per element type: absolute, relative.
TOLERANCE = {"f64": (2e-11, 0.0), "f32": (2e-6, 1e-5), "f16": (2e-3, 0.0), "bf16": (1.6e-2, 0.0)}


def runs_of(op):
    chosen = [pytest.param(run, id=f"{case}-{i}") for case, i, run in RUNS if run["op"] == op]
    return pytest.mark.parametrize("run", chosen or [pytest.param(None, marks=needs_shared)])


def tensor(x):
    import bugspec

    return bugspec.tensor(x)


def compare(name, got, want, dtype, run):
    got, want = from_dtype(got), np.asarray(want, np.float64)
    if got.shape != want.shape:
        got = got.reshape(want.shape)
    absolute, relative = TOLERANCE[dtype]
    if "rel" in run and dtype in ("f32", "f64"):
        absolute, relative = max(absolute, run["rel"]), max(relative, run["rel"])
    absolute *= max(1.0, float(np.max(np.abs(want[np.isfinite(want)]), initial=0)))
    absolute = run.get(f"tol_{dtype}", run.get("tol", {})).get(name, absolute)
    if name in run.get("exact", []):
        absolute = relative = 0.0
    assert_close(name, got, want, absolute, relative)


def layouts_of(run, q, k, v, dtype):
    import bugspec

    for name in run.get("layouts", ["contiguous"]):
        yield [bugspec.layout(to_dtype(x, dtype), name) for x in (q, k, v)]


@runs_of("attention")
def test_attention(run):
    q, k, v = (tensor(run[n]) for n in "qkv")
    if run.get("expand_kv_heads"):
        heads = run["expand_kv_heads"]
        k, v = (np.broadcast_to(x[:, :1], (x.shape[0], heads, *x.shape[2:])) for x in (k, v))
    expect = run["expect"]
    for dtype in run.get("dtypes", ["f32", "f64"]):
        options = {"softcap": run.get("softcap")}
        if "scale" in run:
            options["scale"] = float(run["scale"])
        if "bias" in run:
            options["bias"] = to_dtype(tensor(run["bias"]), run.get("bias_dtype", "f64" if dtype == "f64" else "f32"))
        if "sinks" in run:
            options["sinks"] = to_dtype(tensor(run["sinks"]), "f64" if dtype == "f64" else "f32")
        if "raw_mask" in run:
            options["mask"] = np.asarray(tensor(run["raw_mask"])).astype(run.get("raw_mask_dtype", "float32"))
        elif "mask" in run:
            mask = mask_of(run["mask"])
            if run.get("mask_layout") == "strided":
                wide = np.zeros((*mask.shape[:-1], 2 * mask.shape[-1]), bool)
                wide[..., ::2] = mask
                mask = wide[..., ::2]
            options["mask"] = mask
        if expect.get("error"):
            with pytest.raises(ValueError):
                qkv.attention(*(to_dtype(x, dtype) for x in (q, k, v)), **options)
            continue
        for arrays in layouts_of(run, q, k, v, dtype):
            try:
                out, lse, weights = qkv.attention(*arrays, return_lse=True, return_weights=True, **options)
            except ValueError:
                assert expect.get("or_error") or expect.get("error_or_nan") or run.get("or_error_layouts")
                continue
            if expect.get("error_or_nan"):
                assert np.isnan(from_dtype(out)).all()
                continue
            assert qkv.attention(*arrays, **options).tobytes() == out.tobytes()
            got = {"out": out, "lse": lse, "weights": weights}
            if "dout" in run:
                dout = to_dtype(tensor(run["dout"]), dtype)
                names = ["dq", "dk", "dv"] + ["dbias"] * ("bias" in run) + ["dsinks"] * ("sinks" in run)
                got.update(
                    zip(names, qkv.attention_backward(*arrays, out, lse, dout, **options), strict=True)
                )
            for name in ("out", "lse", "weights", "dq", "dk", "dv", "dbias", "dsinks"):
                if name in expect:
                    compare(name, got[name], tensor(expect[name]), dtype, run)
            for b, h, i, values in expect.get("rows", []):
                compare("out", from_dtype(out)[b, h, i], tensor(values), dtype, run)
            for name, key in (("out", "finite"), ("dq", "dq_finite")):
                if expect.get(key):
                    assert np.isfinite(from_dtype(got[name])).all()
            if run.get("same_bits_without_mask"):
                options.pop("mask")
                assert qkv.attention(*arrays, **options).tobytes() == out.tobytes()
            if run.get("same_bits_over_threads"):
                for threads in run["threads"]:
                    for _ in range(run.get("repeats", 1)):
                        assert qkv.attention(*arrays, num_threads=threads, **options).tobytes() == out.tobytes()


@runs_of("threads")
def test_threads(run):
    batch, heads, n_q, n_kv, d = run["shape"]
    rng = np.random.default_rng(3)
    q = rng.standard_normal((batch, heads, n_q, d)).astype(np.float32)
    k, v = rng.standard_normal((2, batch, heads, n_kv, d)).astype(np.float32)
    bits = {
        qkv.attention(q, k, v, num_threads=t).tobytes() for t in run["threads"] for _ in range(run["repeats"])
    }
    assert len(bits) == 1


@runs_of("misaligned")
def test_misaligned(run):
    batch, heads, n_q, n_kv, d = run["shape"]
    rng = np.random.default_rng(5)
    shapes = [(batch, heads, n_q, d), (batch, heads, n_kv, d), (batch, heads, n_kv, d)]
    values = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    want = qkv.attention(*values)
    for offset in run["offsets"]:
        moved = []
        for x in values:
            raw = np.zeros(x.nbytes + 128, np.uint8)
            start = -raw.ctypes.data % 64 + offset
            y = raw[start : start + x.nbytes].view(np.float32).reshape(x.shape)
            y[...] = x
            moved.append(y)
        assert qkv.attention(*moved).tobytes() == want.tobytes()


@runs_of("isa")
def test_isa(run):
    if run["level"] not in qkv.info()["isa_available"]:
        pytest.skip(f"this machine cannot run {run['level']}")
    program = (
        "import numpy as np, qkv; x = np.ones((1, 2, 70, 43), np.float32);"
        "assert np.allclose(qkv.attention(x, x, x), 1); print(qkv.info()['isa'])"
    )
    env = {**os.environ, "QKV_ISA": run["level"]}
    out = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == run["level"]


@runs_of("dropout")
def test_dropout(run):
    rng = np.random.default_rng(7)
    q = rng.standard_normal((2, 2, 3, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 2, run["n_kv"], 8)).astype(np.float32)
    out, weights = qkv.attention(q, k, v, dropout=run["p"], seed=1, return_weights=True)
    np.testing.assert_allclose(weights.sum(-1), run["expect"]["row_sum"], rtol=1e-6)
    if run["expect"].get("output_zero"):
        assert not out.any()
    elif run["p"] == 0:
        np.testing.assert_array_equal(out, qkv.attention(q, k, v))


@runs_of("workspace")
def test_workspace(run):
    batch, heads, n, d = run["args"]
    try:
        plan = qkv.plan(batch=batch, num_heads=heads, n_q=n, n_kv=n, head_dim_qk=d)
    except ValueError:
        return
    assert 0 < plan["scratch_bytes"] <= run["expect"]["max_bytes_or_error"]


@runs_of("huge_stride")
def test_huge_stride(run):
    assert run["what"] == "mask"
    q, k, v = (tensor(run[n]).astype(np.float32) for n in "qkv")
    rows = np.asarray(run["rows"], bool)
    memory = mmap.mmap(-1, run["stride"] * (rows.shape[0] - 1) + 4096)  # sparse: few pages are touched
    base = np.frombuffer(memory, np.bool_)
    mask = np.lib.stride_tricks.as_strided(base, rows.shape, (run["stride"], 1))
    mask[...] = rows
    compare("out", qkv.attention(q, k, v, mask=mask), tensor(run["expect"]["out"]), "f32", run)


@needs_torch
@runs_of("torch_dropout0")
def test_torch_dropout0(run):
    import qkv.torch

    q, k, v = (torch.from_numpy(tensor(run[n])) for n in "qkv")
    out = qkv.torch.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
    assert_close("out", out.numpy(), tensor(run["expect"]["out"]), 1e-6)


@runs_of("varlen")
def test_varlen(run):
    q, k, v = (tensor(run[n]).astype(np.float32) for n in "qkv")
    cu_q, cu_kv = (np.asarray(run[n], np.int32) for n in ("cu_q", "cu_kv"))
    out = qkv.attention_varlen(q, k, v, cu_q, cu_kv, mask=mask_of(run["mask"]))
    compare("out", out, tensor(run["expect"]["out"]), "f32", run)


@runs_of("merge")
def test_merge(run):
    parts = [(tensor(p["out"]), tensor(p["lse"])) for p in run["parts"]]
    for dtype in ("f32", "f64"):
        out, lse = (to_dtype(x, dtype) for x in parts[0])
        for next_out, next_lse in parts[1:]:
            out, lse = qkv.merge_states(out, lse, to_dtype(next_out, dtype), to_dtype(next_lse, dtype))
        for name, got in (("out", out), ("lse", lse)):
            if name in run["expect"]:
                want = tensor(run["expect"][name])
                assert_close(name, got, want, 1e-9 if dtype == "f64" else 2e-6, 1e-5 if dtype == "f32" else 1e-9)


@runs_of("paged")
def test_paged(run):
    size, table = run["block_size"], np.asarray(run["table"], np.int32)
    num_pages = 1 + max(f[0] for f in run["fill"])
    v_pages = np.zeros((num_pages, size, 1, 1), np.float32)
    for page, kind, start in run["fill"]:
        v_pages[page, :, 0, 0] = start + np.arange(size) if kind == "ramp" else start
    lengths = np.asarray(run["lengths"], np.int64)
    if "poison_behind" in run:
        for row, length in zip(table, lengths, strict=True):
            for slot in range(length, len(row) * size):
                v_pages[row[slot // size], slot % size] = run["poison_behind"]
    k_pages = v_pages if run.get("k_is_v") else np.zeros_like(v_pages)
    q = np.full((len(lengths), 1, 1, 1), run.get("q", 0), np.float32)
    out = qkv.attention_paged(q, k_pages, v_pages, table, lengths, scale=run.get("scale"))
    compare("out", out, tensor(run["expect"]["out"]), "f32", run)


@runs_of("cache")
def test_cache(run):
    c = run["config"]
    names = {"d_qk": "head_dim_qk", "d_v": "head_dim_v"}
    cache = qkv.KVCache(**{names.get(k, k): v for k, v in c.items()})
    for step in run["steps"]:
        if "append" in step:
            k, v = (tensor(step["append"][n]).astype(np.float32) for n in "kv")
            if step.get("expect", {}).get("error"):
                length = cache.length
                with pytest.raises(ValueError):
                    cache.append(k, v)
                assert cache.length == length
            else:
                cache.append(k, v)
        elif "attend" in step:
            a = step["attend"]
            out, lse = cache.attend(
                tensor(a["q"]).astype(np.float32), mask=mask_of(a.get("mask")), return_lse=True
            )
            for name, got in (("out", out), ("lse", lse)):
                if name in a["expect"]:
                    compare(name, got, tensor(a["expect"][name]), "f32", run)
        elif "truncate" in step:
            cache.truncate(step["truncate"])
        else:
            assert cache.length == step["length"]


@runs_of("cache_view")
def test_cache_view(run):
    batch, stride = run["batch"], run["stride"]
    lengths = np.zeros(batch, np.int64)
    memory = mmap.mmap(-1, 4 * (stride * (batch - 1) + 64))  # sparse: few pages are touched
    base = np.frombuffer(memory, np.float32)
    v = np.lib.stride_tricks.as_strided(base, (batch, 1, 8, 1), (4 * stride, 32, 4, 4))
    k = np.zeros((batch, 1, 8, 1), np.float32)
    for step in run["appends"]:
        for b in step["batch"]:
            for _ in range(step["tokens"]):
                v[b, 0, lengths[b], 0] = 100 * b + lengths[b]
                lengths[b] += 1
    cache = qkv.KVCache.from_buffers(k, v, lengths)
    out = cache.attend(np.zeros((batch, 1, 1, 1), np.float32))
    assert_close("decode", out[:, 0, 0, 0], run["expect"]["decode"], 1e-4)


@runs_of("layer")
def test_layer(run):
    weights = {n: tensor(w).astype(np.float32) for n, w in run["weights"].items()}
    q, k, v = (tensor(run[n]).astype(np.float32) for n in "qkv")
    heads, kv_heads = run["num_heads"], run["num_kv_heads"]
    layer = qkv.GQA(
        heads,
        kv_heads,
        weights["fc_k.weight"].shape[1],
        weights["fc_v.weight"].shape[1],
        weights["fc_q.weight"].shape[0] // heads,
        weights["fc_v.weight"].shape[0] // kv_heads,
        weights["fc_o.weight"].shape[0],
        dim_q=weights["fc_q.weight"].shape[1],
        bias=any(n.endswith("bias") for n in weights),
    )
    layer.load_state_dict(weights)
    mask = tensor(run["mask"]).astype(np.float32) if "mask" in run else None
    attention, output = layer(q, k, v, mask)
    for name, got in (("attention", attention), ("output", output)):
        want = tensor(run["expect"][name])
        assert_close(name, got.reshape(want.shape), want, 1e-5, 1e-5)


@runs_of("open_safetensors")
def test_open_safetensors(run, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes.fromhex(run["hex"]))
    if run["expect"].get("reject"):
        with pytest.raises(ValueError, match="x.safetensors"):
            qkv.load_safetensors(path)
        return
    tensors = qkv.load_safetensors(path)
    for name, want in run["expect"].get("tensors", {}).items():
        np.testing.assert_array_equal(tensors[name].astype(np.float64), want)
    for name, shape in run["expect"].get("shapes", {}).items():
        assert list(tensors[name].shape) == shape


@runs_of("read_npy")
def test_read_npy(run, tmp_path):
    path = tmp_path / "x.npy"
    path.write_bytes(bytes.fromhex(run["hex"]))
    want = np.asarray(run["expect"]["array"])
    try:
        got = qkv.load_npy(path)
    except ValueError:
        assert run["expect"].get("or_error")
        return
    np.testing.assert_array_equal(got.reshape(want.shape) if want.size == 0 else got, want)


@runs_of("alibi_slopes")
def test_alibi_slopes(run):
    want = run.get("expect", run.get("expect_first"))
    np.testing.assert_allclose(qkv.alibi_slopes(run["n"])[: len(want)], want, rtol=1e-6)
    assert len(qkv.alibi_slopes(run["n"])) == run["n"]


@runs_of("rope")
def test_rope(run):
    x = np.asarray(run["x"], np.float32)
    if "permute" in run:
        x = x[run["permute"]]
    out = qkv.rope(x.reshape(1, 1, 1, -1), np.array([run["position"]]), base=run["base"], style=run["style"])
    np.testing.assert_allclose(out.reshape(-1), run["expect"], rtol=1e-5)


@runs_of("conv1d")
def test_conv1d(run):
    x = np.asarray(run["x"], np.float32)
    fused = qkv.convert.from_conv1d(np.asarray(run["c_attn"], np.float32))
    q, k, v = qkv.convert.split_fused_qkv(fused, layout="flat", num_heads=1, num_kv_heads=1)
    proj = qkv.convert.from_conv1d(np.asarray(run["c_proj"], np.float32))
    for name, w in (("q", q), ("k", k), ("v", v), ("proj", proj)):
        np.testing.assert_allclose(w @ x, run["expect"][name])


@needs_shared
def test_every_kind_of_run_has_a_test():
    tested = {
        mark.args[1][0].values[0]["op"]
        for name, f in globals().items()
        if name.startswith("test_")
        for mark in getattr(f, "pytestmark", [])
        if mark.name == "parametrize" and mark.args[1][0].values[0]
    }
    assert {run["op"] for _, _, run in RUNS} == tested
    assert struct.calcsize("P") == 8

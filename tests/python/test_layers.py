# SPDX-License-Identifier: Apache-2.0
"""qkv.MHA, MQA, GQA on arrays, weight files, packed sequences and merging."""

import json

import numpy as np
import pytest
from support import ROOT, SHARED, assert_close, needs_torch, torch

import qkv

FOLDER = SHARED / "layers" if (SHARED / "layers").is_dir() else ROOT / "tests" / "data" / "layers"
CASES = json.loads((ROOT / "tests" / "data" / "layers" / "index.json").read_text())["cases"]
CASES = [c for c in CASES if (FOLDER / c["name"]).is_dir()]


def build(case):
    sizes = "dim_k dim_v head_dim_qk head_dim_v dim_out".split()
    layer = qkv.GQA(case["num_heads"], case["num_kv_heads"], *(case[n] for n in sizes), bias=case["bias"])
    layer.load(FOLDER / case["name"] / "weights.safetensors")
    return layer


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_golden_layers(case):
    layer = build(case)
    folder = FOLDER / case["name"]
    for run in case["runs"]:
        x = qkv.load_safetensors(folder / run["input"])
        want = qkv.load_safetensors(folder / run["expected"])
        if run["mask_flag"] and "mask" in x:
            kind = run["mask_flag"].replace("-", "_")
            shape = x["mask"].shape[1:]
            mask = np.where(getattr(qkv.Mask, kind)().to_dense(*shape), x["mask"], -np.inf).astype(np.float32)
        elif run["mask_flag"]:
            mask = getattr(qkv.Mask, run["mask_flag"].replace("-", "_"))()
        else:
            mask = x.get("mask")
        weights, output = layer(x["q"], x["k"], x["v"], mask)
        assert_close("attention", weights, want["attention"], 2e-6, 1e-5)
        assert_close("output", output, want["output"], 5e-6, 1e-5)
        np.testing.assert_array_equal(layer(x["q"], x["k"], x["v"], mask, need_weights=False), output)


def test_save_and_load_give_the_same_layer(tmp_path):
    from safetensors import safe_open

    layer = qkv.MQA(4, 6, 5, 3, 2, 7, dim_q=8, seed=3)
    layer.save(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "np") as f:
        assert f.metadata() == {"num_heads": "4", "num_kv_heads": "1"}
        for name, value in layer.state_dict().items():
            np.testing.assert_array_equal(f.get_tensor(name), value)
    twin = qkv.MQA(4, 6, 5, 3, 2, 7, dim_q=8, seed=4)
    twin.load(tmp_path / "x.safetensors")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 8), (2, 4, 6), (2, 4, 5)))
    for a, b in zip(layer(q, k, v), twin(q, k, v), strict=True):
        np.testing.assert_array_equal(a, b)
    assert layer.num_parameters == 4 * 3 * 9 + 3 * 7 + 2 * 6 + 7 * 9


@needs_torch
def test_layer_takes_torch_tensors_and_agrees_with_the_module():
    import qkv.torch

    module = qkv.torch.GQA(6, 2, 10, 12, 4, 5, 9)
    layer = qkv.GQA(6, 2, 10, 12, 4, 5, 9)
    layer.load_state_dict(module.state_dict())
    q, k, v = torch.randn(2, 3, 10), torch.randn(2, 5, 10), torch.randn(2, 5, 12)
    visible = torch.rand(2, 3, 5) < 0.6
    with torch.no_grad():
        for got, want in zip(layer(q, k, v, visible), module(q, k, v, visible), strict=True):
            assert type(got) is torch.Tensor
            torch.testing.assert_close(got, want)


def test_layer_mistakes_are_value_errors():
    layer = qkv.MHA(2, 4, 4, 3, 3, 5)
    x = np.zeros((1, 2, 4), np.float32)
    for call, text in (
        (lambda: layer(x, x[..., :3], x), r"\[1, 2, 3\]"),
        (lambda: layer(x[0], x, x), "3 axes"),
        (lambda: layer(x, x, x, np.zeros((1, 2, 3), np.float32)), r"\[1, 2, 3\]"),
        (lambda: layer(x.astype(np.float64), x, x), "f64|float|f32"),
        (lambda: qkv.GQA(3, 2, 4, 4, 3, 3, 5), "multiple"),
        (lambda: qkv.MHA(0, 4, 4, 3, 3, 5), "positive"),
        (lambda: layer.load_state_dict({}), "fc_q.weight is missing"),
        (lambda: layer.load_state_dict(layer.state_dict() | {"fc_o.bias": np.zeros(4)}), r"fc_o.bias .*\[5\].*\[4\]"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_safetensors_agree_with_the_safetensors_package(tmp_path):
    from safetensors.numpy import load_file, save_file

    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(1)
    tensors = {
        "a": rng.standard_normal((2, 3, 4)).astype(np.float32),
        "fortran": np.asfortranarray(rng.standard_normal((3, 4))),
        "empty": np.zeros((0, 3), np.float16),
        "scalar": np.array(2.5, np.float32),
        "flags": rng.random(7) < 0.5,
        "ids": rng.integers(0, 100, (2, 2)),
        "half": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
    }
    qkv.save_safetensors(tmp_path / "ours.safetensors", tensors, {"note": "x"})
    assert qkv.load_safetensors_metadata(tmp_path / "ours.safetensors") == {"note": "x"}
    theirs = {n: x for n, x in tensors.items() if n != "half"}
    save_file({n: np.array(x, order="C") for n, x in theirs.items()}, tmp_path / "theirs.safetensors")
    five = rng.standard_normal((1, 2, 1, 3, 2))
    save_file({"five": five}, tmp_path / "five.safetensors")
    np.testing.assert_array_equal(qkv.load_safetensors(tmp_path / "five.safetensors")["five"], five)
    for path, want in (("ours", tensors), ("theirs", theirs)):
        got = qkv.load_safetensors(tmp_path / f"{path}.safetensors")
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name].dtype == value.dtype and got[name].shape == value.shape
            np.testing.assert_array_equal(got[name], value)
            got[name][...] = 0  # writable
    back = load_file(tmp_path / "ours.safetensors")
    np.testing.assert_array_equal(back["fortran"], tensors["fortran"])
    with pytest.raises(ValueError, match="nowhere"):
        qkv.load_safetensors(tmp_path / "nowhere.safetensors")


def test_npy_agrees_with_numpy(tmp_path):
    rng = np.random.default_rng(2)
    for array in (
        rng.standard_normal((3, 4)).astype(np.float32),
        np.asfortranarray(rng.standard_normal((2, 3, 4))),
        np.arange(6, dtype=np.int64).reshape(1, 6),
        np.array(1.5),
        np.zeros((0, 4)),
        rng.random((2, 2)) < 0.5,
    ):
        np.save(tmp_path / "x.npy", array)
        got = qkv.load_npy(tmp_path / "x.npy")
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


def test_varlen_equals_one_call_per_sequence():
    rng = np.random.default_rng(3)
    cu_q, cu_kv = np.array([0, 3, 3, 8, 9]), np.array([0, 5, 7, 12, 12], np.int32)
    q = rng.standard_normal((9, 4, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 12, 2, 8)).astype(np.float32)
    mask = qkv.Mask.causal_bottom_right()
    out, lse = qkv.attention_varlen(q, k, v, cu_q, cu_kv.astype(np.int64), mask=mask, return_lse=True)
    assert out.shape == (9, 4, 8) and lse.shape == (4, 9)
    for s in range(4):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_kv[s], cu_kv[s + 1])
        one = [x[part].transpose(1, 0, 2)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
        want, want_lse = qkv.attention(*one, mask=mask, return_lse=True)
        np.testing.assert_array_equal(out[rows].transpose(1, 0, 2), want[0])
        np.testing.assert_array_equal(lse[:, rows], want_lse[0])
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        qkv.attention_varlen(q, k, v, cu_q[::-1].copy(), cu_kv)
    with pytest.raises(ValueError, match="3 axes"):
        qkv.attention_varlen(q[None], k, v, cu_q, cu_kv)


def test_merged_halves_equal_the_whole():
    rng = np.random.default_rng(4)
    q = rng.standard_normal((1, 4, 3, 8))
    k, v = rng.standard_normal((2, 1, 2, 10, 8))
    want, want_lse = qkv.attention(q, k, v, return_lse=True)
    halves = [qkv.attention(q, k[:, :, part], v[:, :, part], return_lse=True) for part in (slice(0, 4), slice(4, 10))]
    out, lse = qkv.merge_states(*halves[0], *halves[1])
    np.testing.assert_allclose(out, want, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, atol=1e-14)
    with pytest.raises(ValueError):
        qkv.merge_states(out, lse, out[:, :2], lse)

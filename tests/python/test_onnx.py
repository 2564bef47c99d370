# SPDX-License-Identifier: Apache-2.0
"""qkv.onnx.Attention against onnx.reference's own Attention."""

import itertools

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import qkv.onnx  # noqa: E402

TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float64): TensorProto.DOUBLE,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(bool): TensorProto.BOOL,
    np.dtype(np.int64): TensorProto.INT64,
}
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


def evaluate(ops, opset, inputs, num_outputs=4, **attributes):
    """The outputs of one Attention node."""
    names = [n if n in inputs else "" for n in INPUTS]
    while names[-1] == "":
        names.pop()
    outputs = ["Y", "present_key", "present_value", "qk"][:num_outputs]
    node = helper.make_node("Attention", names, outputs, **attributes)
    values = [helper.make_tensor_value_info(n, TYPES[x.dtype], x.shape) for n, x in inputs.items()]
    results = [helper.make_tensor_value_info(n, TYPES[inputs["Q"].dtype], None) for n in outputs]
    graph = helper.make_graph([node], "g", values, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model, new_ops=ops).run(None, inputs)


def run(*arguments, **attributes):
    """(ours, theirs)"""
    return [evaluate(ops, *arguments, **attributes) for ops in ([qkv.onnx.Attention], None)]


def compare(pair, dtype=np.float32):
    tolerance = {np.float32: 3e-6, np.float64: 1e-13, np.float16: 4e-3}[dtype]
    ours, theirs = pair
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        np.testing.assert_allclose(a[finite].astype(np.float64), b[finite].astype(np.float64), atol=tolerance, rtol=tolerance)


def tensors(n_q=4, n_kv=6, heads=6, kv_heads=2, dim=8, dim_v=5, batch=2, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"Q": (batch, heads, n_q, dim), "K": (batch, kv_heads, n_kv, dim), "V": (batch, kv_heads, n_kv, dim_v)}
    return {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}


def test_the_evaluator_runs_ours():
    assert qkv.onnx.Attention.op_domain == "" and qkv.onnx.Attention.__name__ == "Attention"
    x = tensors()
    x["V"][...] = np.nan
    x["V"][:, :, 0] = 1
    mask = np.zeros((4, 6), bool)
    mask[:, 0] = True
    ours, theirs = run(23, x | {"attn_mask": mask}, 1)
    assert np.isfinite(ours[0]).all() and np.isnan(theirs[0]).any()  # NaN in a hidden value


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("opset", [23, 24, 25])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_modes_masks_and_softcap(opset, dtype, mode):
    x = tensors(dtype=dtype)
    rng = np.random.default_rng(1)
    masks = [
        None,
        rng.random((4, 6)) < 0.7,
        rng.random((6, 4, 6)) < 0.7,
        rng.random((2, 1, 4, 6)) < 0.5,
        rng.standard_normal((2, 6, 4, 6)).astype(dtype),
        rng.standard_normal((1, 6)).astype(dtype),
    ]
    for mask, is_causal, softcap in itertools.product(masks, (0, 1), (0.0, 2.0)):
        inputs = x if mask is None else x | {"attn_mask": mask}
        if is_causal and mask is not None and mask.shape == (1, 6):
            continue  # the reference takes n_q from the mask there
        options = {"is_causal": is_causal, "softcap": softcap, "qk_matmul_output_mode": mode}
        ours, theirs = run(opset, inputs, 4, **options)
        if mode == 0 and softcap:  # raw by the text and the function body; softcapped in the reference
            k = np.repeat(x["K"], 3, 1).astype(np.float64).swapaxes(2, 3)
            theirs[3] = (x["Q"].astype(np.float64) @ k / np.sqrt(8)).astype(dtype)
        compare((ours, theirs), dtype)
        compare(run(opset, inputs, 1, **options), dtype)


@pytest.mark.parametrize("opset", [23, 24, 25])
def test_three_axes_with_head_counts_and_scale(opset):
    x = {n: t.transpose(0, 2, 1, 3).reshape(2, t.shape[2], -1) for n, t in tensors().items()}
    compare(run(opset, x, 4, q_num_heads=6, kv_num_heads=2, scale=0.3, qk_matmul_output_mode=3))
    with pytest.raises(ValueError, match="heads"):
        run(opset, x)


@pytest.mark.parametrize("opset", [23, 24, 25])
@pytest.mark.parametrize("n_past", [0, 3])
@pytest.mark.parametrize("is_causal", [0, 1])
def test_past_and_present(opset, n_past, is_causal):
    for n_q, n_new in ((4, 4), (1, 1), (2, 5)):
        x = tensors(n_q, n_new)
        past = tensors(n_q, n_past, seed=2)
        x |= {"past_key": past["K"], "past_value": past["V"]}
        compare(run(opset, x, 4, is_causal=is_causal, qk_matmul_output_mode=2))
        x["attn_mask"] = np.random.default_rng(3).random((n_q, n_past + n_new)) < 0.8
        compare(run(opset, x, 4, is_causal=is_causal))


@pytest.mark.parametrize("opset", [24, 25])
@pytest.mark.parametrize("is_causal", [0, 1])
def test_external_cache(opset, is_causal):
    x = tensors(4, 9, batch=3)
    for lengths in ([9, 4, 6], [2, 9, 0]):
        x["nonpad_kv_seqlen"] = np.array(lengths)
        compare(run(opset, x, 4, is_causal=is_causal, qk_matmul_output_mode=3))
        short = np.random.default_rng(4).random((4, 9)) < 0.8
        compare(run(opset, x | {"attn_mask": short}, 4, is_causal=is_causal, qk_matmul_output_mode=3))


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("cache", ["none", "past", "external"])
def test_windows_of_opset_25(is_causal, cache):
    for left, right in itertools.product((-1, 0, 1, 3), repeat=2):
        x = tensors(4, 9 if cache == "external" else 4, batch=3)
        if cache == "past":
            past = tensors(4, 5, batch=3, seed=2)
            x |= {"past_key": past["K"], "past_value": past["V"]}
        if cache == "external":
            x["nonpad_kv_seqlen"] = np.array([9, 2, 6])
        options = {"is_causal": is_causal, "left_window_size": left, "right_window_size": right}
        compare(run(25, x, 4, qk_matmul_output_mode=3, **options))
        mask = np.random.default_rng(5).random((3, 1, 4, 9)) < 0.7
        if cache != "none":
            compare(run(25, x | {"attn_mask": mask}, 4, qk_matmul_output_mode=2, **options))


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("empty", ["batch", "n_q"])
def test_nothing_in_gives_nothing_out(axes, empty):
    x = tensors(**{empty: 0})
    heads = {}
    if axes == 3:
        heads = {"q_num_heads": 6, "kv_num_heads": 2}
        x = {n: t.transpose(0, 2, 1, 3).reshape(t.shape[0], t.shape[2], t.shape[1] * t.shape[3]) for n, t in x.items()}
    for mode in range(4):
        y, _, _, qk = evaluate([qkv.onnx.Attention], 24, x, qk_matmul_output_mode=mode, **heads)
        batch, n_q = (0, 4) if empty == "batch" else (2, 0)
        assert y.shape == ((batch, n_q, 30) if axes == 3 else (batch, 6, n_q, 5)) and qk.shape == (batch, 6, n_q, 6)


def test_a_short_mask_is_padded_as_hidden():
    x = tensors(4, 6)
    for mask in (np.ones((4, 4), bool), np.zeros((4, 4), np.float32)):
        compare(run(24, x | {"attn_mask": mask}, 4, qk_matmul_output_mode=3))


def test_mistakes_are_value_errors():
    x = tensors()
    for inputs, options in (
        (x | {"past_key": x["K"]}, {}),
        (x | {"past_key": x["K"], "past_value": x["V"], "nonpad_kv_seqlen": np.array([1, 1])}, {}),
        (x, {"left_window_size": -2}),
        (x, {"q_num_heads": 6, "kv_num_heads": 2}),
        (x | {"K": x["K"][..., :4]}, {}),
    ):
        with pytest.raises(ValueError):
            run(25, inputs, 1, **options)

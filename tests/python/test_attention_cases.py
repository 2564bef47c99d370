# SPDX-License-Identifier: Apache-2.0
"""The golden kernel cases through Python: f64, f32 and, where inputs are exact, f16 and bf16."""

import numpy as np
import pytest
from support import HAS_SHARED, SHARED, assert_close, from_dtype, mask_of, needs_shared, read_json, to_dtype

import qkv

CASES = read_json("attention_cases", "index.json")["cases"] if HAS_SHARED else []
GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")


@pytest.fixture(scope="module")
def tensors():
    from safetensors import safe_open

    with safe_open(SHARED / "attention_cases" / "tensors.safetensors", "np") as f:
        yield f


@needs_shared
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_golden_cases(tensors, dtype):
    compared, wrong = 0, []
    for case in CASES:
        if dtype in ("f16", "bf16") and not case["exact_in_half"]:
            continue
        t = {n: tensors.get_tensor(f"{case['name']}/{n}") for n in case["inputs"]}
        want = {n: tensors.get_tensor(f"{case['name']}/{n}") for n in case["expected"]}
        q, k, v = (to_dtype(t[n], dtype) for n in "qkv")
        options = {n: to_dtype(t[n], dtype) for n in ("bias", "sinks", "alibi_slopes") if n in t}
        options.update(mask=mask_of(case["mask"], t), scale=case["scale"], softcap=case["softcap"])
        got = dict(
            zip(("out", "lse", "weights"), qkv.attention(q, k, v, return_lse=True, return_weights=True, **options))
        )
        if any(n in want for n in GRADIENTS) and dtype in ("f64", "f32"):
            dout = to_dtype(t["dout"], dtype)
            grads = qkv.attention_backward(q, k, v, got["out"], got["lse"], dout, **options)
            names = ["dq", "dk", "dv"] + ["dbias"] * ("bias" in t) + ["dsinks"] * ("sinks" in t)
            got.update(zip(names, grads, strict=True))
        for name in got:
            if name not in want:
                continue
            tolerance = case["tol_f32"][name]
            if dtype == "f64":
                tolerance = tolerance * 2.0**-26 + 1e-13
            elif dtype != "f32" and name == "out":
                tolerance += 4 * (2.0**-11 if dtype == "f16" else 2.0**-8) * float(np.max(np.abs(t["v"]), initial=0))
            try:
                assert_close(f"{case['name']}/{name}", from_dtype(got[name]), want[name], tolerance)
            except AssertionError as error:
                wrong.append(str(error).splitlines()[0])
            compared += 1
    assert not wrong
    assert compared > 100

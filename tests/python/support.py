# SPDX-License-Identifier: Apache-2.0
"""Golden data and comparisons for the tests of the Python package."""

import json
import os
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHARED = pathlib.Path(os.environ.get("QKV_SHARED_DATA", ROOT.parent / "shared" / "data"))
HAS_SHARED = (SHARED / "bug_cases_dev.jsonl").is_file()

if HAS_SHARED:
    sys.path.append(str(SHARED))

needs_shared = pytest.mark.skipif(not HAS_SHARED, reason="the shared golden data are not on this machine")

try:
    import torch
except ImportError:
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")

EPS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


def read_json(*path):
    with open(SHARED.joinpath(*path), encoding="utf-8") as f:
        return json.load(f)


def bug_cases():
    if not HAS_SHARED:
        return []
    with open(SHARED / "bug_cases_dev.jsonl", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def assert_close(name, got, want, tolerance, relative=0.0):
    """|got - want| <= tolerance + relative * |want|; NaN and infinities exactly."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (name, got.shape, want.shape)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=name)
    excess = np.abs(got[finite] - want[finite]) - (tolerance + relative * np.abs(want[finite]))
    assert excess.size == 0 or not np.any(~(excess <= 0)), (name, float(np.max(excess)))


def to_dtype(array, dtype):
    """A NumPy array in one of f32, f64, f16, bf16."""
    if dtype == "bf16":
        import ml_dtypes

        return np.asarray(array, np.float32).astype(ml_dtypes.bfloat16)
    return np.asarray(array).astype({"f32": np.float32, "f64": np.float64, "f16": np.float16}[dtype])


def from_dtype(array):
    return np.asarray(array).astype(np.float64)


def mask_of(spec, tensors=None):
    """A mask description of the golden data as a qkv.Mask (or a boolean array)."""
    import qkv

    if spec is None:
        return None
    kind = spec["kind"]
    if kind == "and":
        mask = qkv.Mask.full()
        for part in spec["of"]:
            mask = mask & mask_of(part, tensors)
        return mask
    if kind == "bool":
        if "tensor" in spec:
            return np.ascontiguousarray(tensors[spec["tensor"]].astype(bool))
        import bugspec

        data = spec["data"]
        return bugspec.tensor(data).astype(bool) if isinstance(data, dict) else np.asarray(data, bool)
    if kind == "window":
        return qkv.Mask.window(spec["left"], spec["right"], spec.get("alignment", "bottom_right"))
    if kind == "prefix":
        return qkv.Mask.prefix(spec["n"])
    if kind == "chunk":
        return qkv.Mask.chunk(spec["size"])
    if kind == "lengths":
        return qkv.Mask.lengths(spec["kv_lengths"])
    if kind == "documents":
        return qkv.Mask.documents(np.asarray(spec["q_ids"]), np.asarray(spec["kv_ids"]))
    return getattr(qkv.Mask, kind)()


class OnlyDlpackNamespace:
    @staticmethod
    def from_dlpack(x):
        return OnlyDlpack(np.from_dlpack(x))


class OnlyDlpack:
    """A producer that knows DLPack and nothing else."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return OnlyDlpackNamespace

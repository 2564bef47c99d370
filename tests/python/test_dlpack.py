# SPDX-License-Identifier: Apache-2.0
"""Objects that lie in __dlpack__, and tensors that are not what they look like: refused, or read right."""

import ctypes

import numpy as np
import pytest
from support import needs_torch, torch

import qkv

X = np.random.default_rng(0).standard_normal((1, 2, 3, 4)).astype(np.float32)


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("dtype", Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor),
    ]  # fmt: skip


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Liar:
    """X, but for what is said to be different."""

    def __init__(self, **said):
        self.said, self.kept = said, []

    def __dlpack__(self, **_):
        said = {
            "data": X.ctypes.data, "ndim": 4, "shape": X.shape, "strides": None, "code": 2, "bits": 32, "lanes": 1,
            "device": 1, "major": None, "flags": 0, "offset": 0,
        } | self.said  # fmt: skip
        lists = [None if x is None else (ctypes.c_int64 * len(x))(*x) for x in (said["shape"], said["strides"])]
        dtype = Type(said["code"], said["bits"], said["lanes"])
        tensor = DLTensor(said["data"], Device(said["device"], 0), said["ndim"], dtype, *lists, said["offset"])
        if said["major"] is None:
            managed, name = Managed(tensor, None, None), b"dltensor"
        else:
            managed, name = Versioned(said["major"], 0, None, None, said["flags"], tensor), b"dltensor_versioned"
        name = ctypes.create_string_buffer(name)
        self.kept += [managed, name, lists]
        return new_capsule(ctypes.addressof(managed), ctypes.cast(name, ctypes.c_char_p), None)


def test_truth_is_read():
    want = qkv.attention(X, X, X)
    for truth in ({}, {"major": 1}, {"strides": (24, 12, 4, 1)}, {"offset": 0}):
        np.testing.assert_array_equal(qkv.attention(X, Liar(**truth), Liar(**truth)), want)
    backwards = np.ascontiguousarray(X[:, :, ::-1])
    said = {"data": X.ctypes.data + 8 * 4, "strides": (24, 12, -4, 1)}
    np.testing.assert_array_equal(qkv.attention(X, Liar(**said), Liar(**said)), qkv.attention(X, backwards, backwards))


LIES = {
    "axes below zero": ({"ndim": -1}, "-1 axes"),
    "nine axes": ({"ndim": 9, "shape": (1,) * 9}, "9 axes"),
    "no shape": ({"shape": None}, "no shape"),
    "negative extent": ({"shape": (1, 2, -3, 4)}, "extent .*-3"),
    "no data": ({"data": None}, "no data"),
    "more than 64 bits of elements": ({"shape": (2**40, 2**40, 2**40, 4), "strides": (0, 0, 0, 1)}, "extent"),
    "more than 64 bits of bytes": ({"shape": (2**61, 2, 3, 4), "strides": (0, 12, 4, 1)}, "extent"),
    "vector lanes": ({"lanes": 2}, "element type"),
    "unknown code": ({"code": 9}, "element type"),
    "odd width": ({"bits": 7}, "element type"),
    "another device": ({"device": 2}, "CPU memory"),
    "another version": ({"major": 2}, "DLPack 2"),
}


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize("argument", ["q", "k", "v", "mask", "bias", "sinks"])
def test_lies_are_refused(name, argument):
    said, text = LIES[name]
    with pytest.raises(ValueError, match=f"{argument}.*{text}|mask .*has"):
        qkv.attention(**({"q": X, "k": X, "v": X} | {argument: Liar(**said)}))


def test_an_address_between_elements_is_copied_and_not_written_to():
    raw = np.zeros(X.nbytes + 1, np.uint8)
    raw[1:] = X.view(np.uint8).reshape(-1)
    odd = Liar(data=raw.ctypes.data + 1)
    np.testing.assert_array_equal(qkv.attention(X, odd, odd), qkv.attention(X, X, X))
    with pytest.raises(ValueError, match="out is not aligned"):
        qkv.attention(X, X, X, out=odd)
    with pytest.raises(ValueError, match="out is read-only"):
        qkv.attention(X, X, X, out=Liar(major=1, flags=1))


class Gives:
    def __init__(self, value):
        self.value = value

    def __dlpack__(self, **_):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


@pytest.mark.parametrize("value, error", [(None, ValueError), (3, ValueError), (KeyError("mine"), KeyError)])
def test_what_is_no_capsule_is_refused(value, error):
    with pytest.raises(error):
        qkv.attention(X, Gives(value), X)


def test_one_capsule_serves_both_and_stays_the_owners():
    capsule = Gives(X.__dlpack__())
    np.testing.assert_array_equal(qkv.attention(X, capsule, capsule), qkv.attention(X, X, X))
    np.testing.assert_array_equal(qkv.attention(X, capsule, capsule), qkv.attention(X, X, X))


@needs_torch
def test_torch_tensors_that_are_not_what_they_look_like():
    import qkv.torch

    t = torch.from_numpy(X)
    complex_numbers = torch.randn(1, 2, 3, 4, dtype=torch.complex64)
    negated = complex_numbers.conj().imag  # torch keeps the sign in a flag, not in the memory
    assert negated.is_neg()
    want = qkv.attention(*(negated.resolve_neg(),) * 3)
    for call in (qkv.attention, qkv.torch.scaled_dot_product_attention):
        assert torch.equal(call(negated, negated, negated), want)
    bias = negated[0, 0, :, :3]
    assert torch.equal(qkv.attention(t, t, t, bias=bias), qkv.attention(t, t, t, bias=bias.resolve_neg()))
    emptied = torch.ones(1, 2, 3, 4)
    emptied.untyped_storage().resize_(0)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(1, 2, 3, 4)
    for bad in (emptied, t.to_sparse(), t.to("meta"), fake, complex_numbers, t.to(torch.float8_e4m3fn)):
        with pytest.raises((ValueError, RuntimeError, TypeError, BufferError, NotImplementedError)):
            qkv.attention(t, bad, bad)
    with pytest.raises((ValueError, RuntimeError)):
        torch.func.vmap(lambda x: qkv.attention(x, x, x))(torch.ones(5, 1, 2, 3, 4))
    with pytest.raises((ValueError, RuntimeError)):
        torch.func.grad(lambda x: qkv.attention(x, x, x).sum())(t)

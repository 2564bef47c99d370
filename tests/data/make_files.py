"""Writes tests/data/files: files made by the reference implementations of safetensors and npy.

python3 tests/data/make_files.py (needs numpy and safetensors). Made with NumPy 2.4.6 and safetensors 0.8.0.
The tests rewrite the safetensors files byte for byte and compare the values of the npy files with the same formulas.
"""
import os
import warnings

import numpy as np
import safetensors

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "files")
os.makedirs(folder, exist_ok=True)

# One tensor of every element type; the bytes of tensor t are (7 * i + len(t)) % 251, booleans i % 2.
TYPES = {"bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4,
         "float32": 4, "float64": 8, "uint64": 8, "int64": 8}
tensors = {}
for t, size in TYPES.items():
    n = 3 * 5 * size
    data = bytes(i % 2 if t == "bool" else (7 * i + len(t)) % 251 for i in range(n))
    tensors["t." + t] = {"dtype": t, "shape": [3, 5], "data": data}
tensors["scalar"] = {"dtype": "float32", "shape": [], "data": np.float32(2.5).tobytes()}
tensors["empty"] = {"dtype": "float32", "shape": [2, 0, 3], "data": b""}
tensors['q"\\/\b\f\n\r\t\x01\x7f \u00fc\u20ac\U0001f600'] = {"dtype": "uint8", "shape": [1], "data": b"\x2a"}


def save(name, tensors, metadata):
    arrays = {n: np.frombuffer(t["data"], np.uint8) for n, t in tensors.items()}
    specs = {n: safetensors.TensorSpec(dtype=t["dtype"], shape=t["shape"], data_ptr=arrays[n].ctypes.data,
                                       data_len=arrays[n].nbytes) for n, t in tensors.items()}
    with open(os.path.join(folder, name), "wb") as f:
        f.write(safetensors.serialize(specs, metadata))


save("all_dtypes.safetensors", tensors, {"key \"\u00fc\"": "value\n\u20ac"})
save("six_axes.safetensors", {"x": {"dtype": "uint8", "shape": [1, 2, 1, 2, 1, 1], "data": b"abcd"}}, None)
save("no_metadata.safetensors", {"a": tensors["scalar"]}, None)
save("no_tensors.safetensors", {}, None)


def npy(name, array, version):
    with open(os.path.join(folder, name), "wb") as f, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.lib.format.write_array(f, array, version=version, allow_pickle=True)


cube = (np.arange(24) - 5).reshape(2, 3, 4)
for version in [(1, 0), (2, 0), (3, 0)]:
    npy("f4_v%d.npy" % version[0], cube.astype("<f4"), version)
for t in ["f2", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]:
    npy(t + ".npy", (cube + (5 if t[0] == "u" else 0)).astype("<" + t), (1, 0))
npy("b1.npy", cube % 2 == 0, (1, 0))
npy("fortran.npy", np.asfortranarray(cube.astype("<f8")), (1, 0))
npy("rank5.npy", np.arange(32, dtype="<i2").reshape(2, 2, 2, 2, 2), (1, 0))
npy("scalar.npy", np.array(2.5, "<f4"), (1, 0))
npy("empty.npy", np.zeros((2, 0, 3), "<f4"), (1, 0))
npy("big_endian.npy", cube.astype(">f4"), (1, 0))
npy("object.npy", np.array([{}, None], dtype=object), (1, 0))
npy("records.npy", np.zeros(3, dtype=[("x", "<f4"), ("y", "<i4")]), (1, 0))
npy("unicode_records.npy", np.zeros(3, dtype=[("\u20ac", "<f4")]), (3, 0))
npy("complex.npy", np.zeros(3, "<c8"), (1, 0))
npy("text.npy", np.array(["abc"]), (1, 0))
npy("datetime.npy", np.array(["2001-01-01"], "<M8[D]"), (1, 0))

# SPDX-License-Identifier: Apache-2.0
"""Weight files as NumPy arrays."""

import os

import numpy as np

from . import _core


def _shaped(flat, shape, dtype):
    if dtype == "bf16":
        # NumPy has no bfloat16. With ml_dtypes it has; else float32 holds the same values exactly.
        try:
            import ml_dtypes

            flat = flat.view(ml_dtypes.bfloat16)
        except ImportError:
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.reshape(shape)


def load_safetensors(path):
    """The tensors of a safetensors file: {name: array}, in the order of the file.

    Every offset, size, overlap, dtype and shape is checked first; a broken file raises ValueError
    with the path and the byte offset. bfloat16 comes as ml_dtypes.bfloat16 where that package is
    installed, else as float32 (the same values). Arrays are copies and writable.
    """
    tensors, _ = _core.load_safetensors(os.fspath(path))
    return {name: _shaped(*parts) for name, parts in tensors.items()}


def load_safetensors_metadata(path):
    """The metadata of a safetensors file: {str: str}."""
    return _core.load_safetensors(os.fspath(path))[1]


def save_safetensors(path, tensors, metadata=None):
    """Write {name: array} (NumPy, torch, DLPack; at most 4 axes) and {str: str} metadata.

    The file appears whole or not at all.
    """
    _core.save_safetensors(os.fspath(path), dict(tensors), dict(metadata or {}))


def load_npy(path):
    """The array of an npy file (versions 1 to 3, C or Fortran order, little endian, no objects).

    A broken file raises ValueError with the path and the byte offset.
    """
    (flat, shape, dtype), is_fortran = _core.load_npy(os.fspath(path))
    array = _shaped(flat, (-1,), dtype)
    return array.reshape(shape, order="F") if is_fortran else array.reshape(shape)

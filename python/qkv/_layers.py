# SPDX-License-Identifier: Apache-2.0
"""The layers of the lesson on arrays: MHA, MQA and GQA with their projections."""

import os

import numpy as np

from . import _core
from ._files import load_safetensors, save_safetensors

_NAMES = [f"fc_{x}.{y}" for x in "qkvo" for y in ("weight", "bias")]


class GQA:
    """Grouped-query attention with its projections; MHA and MQA are its two ends.

      GQA(num_heads, num_kv_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, *, dim_q=None, bias=True)

      fc_q.weight [num_heads * head_dim_qk, dim_q]       fc_q.bias     dim_q defaults to dim_k
      fc_k.weight [num_kv_heads * head_dim_qk, dim_k]    fc_k.bias
      fc_v.weight [num_kv_heads * head_dim_v, dim_v]     fc_v.bias
      fc_o.weight [dim_out, num_heads * head_dim_v]      fc_o.bias

    layer(q, k, v, mask=None, need_weights=True) -> (weights, output), or output alone:

      q        [batch, n_q,  dim_q]   float32; NumPy, torch or anything with DLPack
      k        [batch, n_kv, dim_k]
      v        [batch, n_kv, dim_v]
      mask     additive floats [batch, n_q, n_kv] (-inf hides), booleans (True = attend) or a qkv.Mask
      weights  [num_heads * batch, n_q, n_kv], head-major: index h * batch + b
      output   [batch, n_q, dim_out]

    A row that sees no key has weights 0 and the output fc_o.bias. Parameters start as torch.nn.Linear
    starts them (from seed). Mistakes raise ValueError and name both shapes.
    """

    def __init__(
        self, num_heads, num_kv_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, *, dim_q=None, bias=True, seed=0
    ):
        dim_q = dim_k if dim_q is None else dim_q
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.dim_q, self.dim_k, self.dim_v, self.dim_out = dim_q, dim_k, dim_v, dim_out
        self.head_dim_qk, self.head_dim_v = head_dim_qk, head_dim_v
        sizes = (num_heads, num_kv_heads, dim_q, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out)
        if min(sizes) < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"layer: sizes must be positive and num_heads a multiple of num_kv_heads, got num_heads {num_heads}, "
                f"num_kv_heads {num_kv_heads} and {dict(zip(self._size_names(), sizes[2:]))}"
            )
        self._sizes = sizes
        rng = np.random.default_rng(seed)
        self._state = {}
        for name in "qkvo":
            rows, width = self._shape(name)
            bound = width**-0.5
            self._state[f"fc_{name}.weight"] = rng.uniform(-bound, bound, (rows, width)).astype(np.float32)
            if bias:
                self._state[f"fc_{name}.bias"] = rng.uniform(-bound, bound, rows).astype(np.float32)
        self._layer = None

    @staticmethod
    def _size_names():
        return ("dim_q", "dim_k", "dim_v", "head_dim_qk", "head_dim_v", "dim_out")

    def _shape(self, name):
        return {
            "q": (self.num_heads * self.head_dim_qk, self.dim_q),
            "k": (self.num_kv_heads * self.head_dim_qk, self.dim_k),
            "v": (self.num_kv_heads * self.head_dim_v, self.dim_v),
            "o": (self.dim_out, self.num_heads * self.head_dim_v),
        }[name]

    def __call__(self, q, k, v, mask=None, need_weights=True, *, num_threads=None):
        if self._layer is None:
            self._layer = _core.Layer(self._sizes, self._state)
        return self._layer(q, k, v, mask, need_weights, num_threads)

    def __repr__(self):
        names = ("num_heads", "num_kv_heads", *self._size_names())
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)}' for n in names)})"

    @property
    def num_parameters(self):
        """Weights and biases together."""
        return sum(x.size for x in self._state.values())

    def state_dict(self):
        """{name: float32 array}; the arrays are copies."""
        return {name: x.copy() for name, x in self._state.items()}

    def load_state_dict(self, state):
        """Take parameters by the lesson's names (NumPy or torch arrays). Weights must all be there; a
        bias that is absent is absent; other names are ignored.
        """
        new = {}
        for name in _NAMES:
            if name not in state:
                if name.endswith("weight"):
                    raise ValueError(f"load_state_dict: {name} is missing, got {sorted(state)}")
                continue
            value = state[name]
            if hasattr(value, "detach"):
                value = value.detach().float().numpy()
            rows, width = self._shape(name[3])
            want = (rows, width) if name.endswith("weight") else (rows,)
            value = np.array(value, np.float32)
            if value.shape != want:
                raise ValueError(f"load_state_dict: {name} needs shape {list(want)}, got {list(value.shape)}")
            new[name] = value
        self._state = new
        self._layer = None

    def load(self, path):
        """load_state_dict() of a safetensors file with the lesson's names."""
        self.load_state_dict(load_safetensors(path))

    def save(self, path):
        """Write a safetensors file with the lesson's names; num_heads and num_kv_heads are its metadata."""
        metadata = {"num_heads": str(self.num_heads), "num_kv_heads": str(self.num_kv_heads)}
        save_safetensors(path, self._state, metadata)


class MHA(GQA):
    """Multi-head attention: every query head has its own KV head. See GQA."""

    def __init__(self, num_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, *, dim_q=None, bias=True, seed=0):
        super().__init__(
            num_heads, num_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, dim_q=dim_q, bias=bias, seed=seed
        )


class MQA(GQA):
    """Multi-query attention: all query heads share one KV head. See GQA."""

    def __init__(self, num_heads, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, *, dim_q=None, bias=True, seed=0):
        super().__init__(num_heads, 1, dim_k, dim_v, head_dim_qk, head_dim_v, dim_out, dim_q=dim_q, bias=bias, seed=seed)


def layer_from_state(state, num_heads, num_kv_heads):
    """The layer whose sizes are those of its parameters."""
    shapes = {x: np.shape(state[f"fc_{x}.weight"]) for x in "qkvo"}
    sizes = (
        shapes["k"][1], shapes["v"][1], shapes["q"][0] // num_heads, shapes["v"][0] // num_kv_heads, shapes["o"][0],
    )  # fmt: skip
    options = {"dim_q": shapes["q"][1], "bias": False}
    if num_heads == num_kv_heads:
        layer = MHA(num_heads, *sizes, **options)
    elif num_kv_heads == 1:
        layer = MQA(num_heads, *sizes, **options)
    else:
        layer = GQA(num_heads, num_kv_heads, *sizes, **options)
    layer.load_state_dict(state)
    return layer


def load_layer(path, preset="auto", num_heads=None, num_kv_heads=None, *, prefix=""):
    """The layer of a safetensors file, as MHA, MQA or GQA.

      preset  "lesson"  fc_q.weight fc_q.bias fc_k.* fc_v.* fc_o.*
              "torch"   in_proj_weight in_proj_bias, or q_proj_weight ...; out_proj.*
              "bert"    self.query.* self.key.* self.value.*, output.dense.*
              "llama"   q_proj.* k_proj.* v_proj.* o_proj.*, or fused qkv_proj.*
              "auto"    whichever the names fit

    num_heads and num_kv_heads come from the file's metadata unless given. prefix selects one of several
    layers: "model.layers.0". Sizes come from the shapes and must agree; unknown names are ignored;
    absent biases are absent. A file that does not fit raises ValueError with its path.
    """
    num_heads, num_kv_heads, state = _core.load_layer(
        os.fspath(path), preset, num_heads or 0, num_kv_heads or 0, prefix
    )
    return layer_from_state(state, num_heads, num_kv_heads)

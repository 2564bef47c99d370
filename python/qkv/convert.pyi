# SPDX-License-Identifier: Apache-2.0
from typing import Optional

from ._core import Array
from ._layers import GQA

__all__: list[str]

def split_fused_qkv(
    w: Array, layout: str = "flat", num_heads: int = 1, num_kv_heads: Optional[int] = None
) -> tuple[Array, Array, Array]: ...
def permute_rope_rows(w: Array, heads: int, inverse: bool = False) -> Array: ...
def from_conv1d(w: Array) -> Array: ...
def to_gqa(
    layer: GQA, num_kv_heads: int, *, k: Optional[Array] = None, v: Optional[Array] = None, ridge: float = 1e-6
) -> GQA: ...

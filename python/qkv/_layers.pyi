# SPDX-License-Identifier: Apache-2.0
import os
from typing import Any, Mapping, Optional, Union

from ._core import Array, Mask

class GQA:
    num_heads: int
    num_kv_heads: int
    dim_q: int
    dim_k: int
    dim_v: int
    dim_out: int
    head_dim_qk: int
    head_dim_v: int
    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        dim_k: int,
        dim_v: int,
        head_dim_qk: int,
        head_dim_v: int,
        dim_out: int,
        *,
        dim_q: Optional[int] = None,
        bias: bool = True,
        seed: int = 0,
    ) -> None: ...
    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Union[Mask, Array, None] = None,
        need_weights: bool = True,
        *,
        num_threads: Optional[int] = None,
    ) -> Any: ...
    @property
    def num_parameters(self) -> int: ...
    def state_dict(self) -> dict[str, Array]: ...
    def load_state_dict(self, state: Mapping[str, Array]) -> None: ...
    def load(self, path: Union[str, os.PathLike[str]]) -> None: ...
    def save(self, path: Union[str, os.PathLike[str]]) -> None: ...

class MHA(GQA):
    def __init__(
        self,
        num_heads: int,
        dim_k: int,
        dim_v: int,
        head_dim_qk: int,
        head_dim_v: int,
        dim_out: int,
        *,
        dim_q: Optional[int] = None,
        bias: bool = True,
        seed: int = 0,
    ) -> None: ...

class MQA(GQA):
    def __init__(
        self,
        num_heads: int,
        dim_k: int,
        dim_v: int,
        head_dim_qk: int,
        head_dim_v: int,
        dim_out: int,
        *,
        dim_q: Optional[int] = None,
        bias: bool = True,
        seed: int = 0,
    ) -> None: ...

def layer_from_state(state: Mapping[str, Array], num_heads: int, num_kv_heads: int) -> GQA: ...
def load_layer(
    path: Union[str, os.PathLike[str]],
    preset: str = "auto",
    num_heads: Optional[int] = None,
    num_kv_heads: Optional[int] = None,
    *,
    prefix: str = "",
) -> GQA: ...

# SPDX-License-Identifier: Apache-2.0
import os
from typing import Any, Mapping, Optional, Union

from . import convert as convert
from ._cache import KVCache as KVCache
from ._cache import attention_paged as attention_paged
from ._core import Array
from ._core import Mask as Mask
from ._core import attention as attention
from ._core import attention_backward as attention_backward
from ._core import attention_varlen as attention_varlen
from ._core import merge_states as merge_states
from ._core import set_num_threads as set_num_threads
from ._layers import GQA as GQA
from ._layers import MHA as MHA
from ._layers import MQA as MQA
from ._layers import load_layer as load_layer
from ._positions import alibi_slopes as alibi_slopes
from ._positions import rope as rope

__version__: str
__all__: list[str]

_Path = Union[str, os.PathLike[str]]

def plan(
    q: Optional[Array] = None,
    k: Optional[Array] = None,
    v: Optional[Array] = None,
    *,
    batch: int = 1,
    num_heads: int = 1,
    num_kv_heads: Optional[int] = None,
    n_q: int = 1,
    n_kv: Optional[int] = None,
    head_dim_qk: int = 64,
    head_dim_v: Optional[int] = None,
    dtype: Any = "float32",
    dtype_kv: Any = None,
    mask: Union[Mask, Array, None] = None,
    return_weights: bool = False,
    return_mean_weights: bool = False,
    return_row_weights: bool = False,
    return_column_sums: bool = False,
    num_threads: Optional[int] = None,
) -> dict[str, Any]: ...
def info() -> dict[str, Any]: ...
def set_isa(isa: str = "auto") -> None: ...
def load_safetensors(path: _Path) -> dict[str, Array]: ...
def load_safetensors_metadata(path: _Path) -> dict[str, str]: ...
def save_safetensors(
    path: _Path, tensors: Mapping[str, Array], metadata: Optional[Mapping[str, str]] = None
) -> None: ...
def load_npy(path: _Path) -> Array: ...

# SPDX-License-Identifier: Apache-2.0
from typing import Any, Optional, Union

from ._core import Array, Mask

class KVCache:
    kind: str
    capacity: int
    page_size: int
    window: Optional[int]
    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_v: int,
        capacity: int,
        dtype: Any = "float32",
        kind: str = "contiguous",
        page_size: int = 64,
        window: Optional[int] = None,
    ) -> None: ...
    @classmethod
    def from_buffers(cls, k_buffer: Array, v_buffer: Array, lengths: Any) -> KVCache: ...
    @property
    def length(self) -> Any: ...
    def append(self, k: Array, v: Array) -> None: ...
    def attend(
        self,
        q: Array,
        *,
        mask: Union[Mask, Array, None] = None,
        bias: Optional[Array] = None,
        scale: Optional[float] = None,
        softcap: Optional[float] = None,
        sinks: Optional[Array] = None,
        alibi_slopes: Optional[Array] = None,
        return_lse: bool = False,
        return_weights: bool = False,
        num_threads: Optional[int] = None,
    ) -> Any: ...
    def truncate(self, n: int) -> None: ...
    def fork(self) -> KVCache: ...

def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Any,
    lengths: Any,
    *,
    mask: Union[Mask, Array, None] = None,
    bias: Optional[Array] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    sinks: Optional[Array] = None,
    alibi_slopes: Optional[Array] = None,
    return_lse: bool = False,
    return_weights: bool = False,
    num_threads: Optional[int] = None,
) -> Any: ...

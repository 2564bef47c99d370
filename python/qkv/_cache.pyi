# SPDX-License-Identifier: Apache-2.0
from typing import Any, Optional, Union

from ._core import Array, IntArray, Mask

class KVCache:
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
        *,
        num_sink_tokens: int = 0,
        rope: Any = None,
    ) -> None: ...
    @classmethod
    def from_buffers(cls, k_buffer: Array, v_buffer: Array, lengths: Any) -> KVCache: ...
    @classmethod
    def load(cls, path: Any) -> KVCache: ...
    def save(self, path: Any) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def capacity(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def window(self) -> Optional[int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def quant_error(self) -> dict[str, Any]: ...
    @property
    def length(self) -> Any: ...
    def append(
        self,
        k: Array,
        v: Array,
        *,
        counts: Optional[IntArray] = None,
        positions: Optional[IntArray] = None,
        num_threads: Optional[int] = None,
    ) -> None: ...
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
        return_mean_weights: bool = False,
        weight_rows: Optional[IntArray] = None,
        top_k: Optional[int] = None,
        return_column_sums: bool = False,
        return_entropy: bool = False,
        num_threads: Optional[int] = None,
        counts: Optional[IntArray] = None,
        positions: Optional[IntArray] = None,
        parents: Optional[IntArray] = None,
    ) -> Any: ...
    def truncate(self, n: int) -> None: ...
    def keep_of_last(self, n: int, places: IntArray) -> None: ...
    def reserve(self, tokens: int) -> None: ...
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
    return_mean_weights: bool = False,
    weight_rows: Optional[IntArray] = None,
    top_k: Optional[int] = None,
    return_column_sums: bool = False,
    return_entropy: bool = False,
    num_threads: Optional[int] = None,
) -> Any: ...

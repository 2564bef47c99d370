# SPDX-License-Identifier: Apache-2.0
# Types of the extension module. The public names are those of qkv itself.
from typing import Any, Optional, Sequence, Union

Array = Any
IntArray = Union[Sequence[int], Array]

__version__: str

class Mask:
    @staticmethod
    def full() -> Mask: ...
    @staticmethod
    def causal_top_left() -> Mask: ...
    @staticmethod
    def causal_bottom_right() -> Mask: ...
    @staticmethod
    def window(left: Optional[int], right: Optional[int], alignment: str = "bottom_right") -> Mask: ...
    @staticmethod
    def prefix(n: int) -> Mask: ...
    @staticmethod
    def chunk(size: int) -> Mask: ...
    @staticmethod
    def lengths(kv_lengths: IntArray) -> Mask: ...
    @staticmethod
    def documents(q_ids: IntArray, kv_ids: IntArray) -> Mask: ...
    @staticmethod
    def dense(array: Array) -> Mask: ...
    def __and__(self, other: Union[Mask, Array]) -> Mask: ...
    def __rand__(self, other: Array) -> Mask: ...
    def to_dense(
        self, n_q: int, n_kv: int, *, batch: Optional[int] = None, num_heads: Optional[int] = None
    ) -> Array: ...
    def to_text(self, n_q: int, n_kv: int, *, b: int = 0, h: int = 0) -> str: ...
    def to_svg(self, n_q: int, n_kv: int, *, b: int = 0, h: int = 0) -> str: ...
    def count_visible(
        self, n_q: int, n_kv: int, *, batch: Optional[int] = None, num_heads: Optional[int] = None
    ) -> int: ...
    @property
    def is_full(self) -> bool: ...

class Cache:
    def __init__(self, sizes: tuple[int, ...], dtype: Any, kind: str, rope: Optional[tuple[float, str, int]]) -> None: ...
    @staticmethod
    def from_buffers(k: Array, v: Array, lengths: Sequence[int]) -> Cache: ...
    @staticmethod
    def load(path: str) -> Cache: ...
    def append(self, k: Array, v: Array, counts: Optional[Sequence[int]], positions: Optional[Array], num_threads: int) -> None: ...
    def attend(
        self,
        q: Array,
        parents: Optional[Sequence[int]],
        mask: Any,
        bias: Optional[Array],
        scale: Optional[float],
        softcap: Optional[float],
        sinks: Optional[Array],
        alibi_slopes: Optional[Array],
        counts: Optional[Sequence[int]],
        positions: Optional[Array],
        wanted: tuple[Any, ...],
        num_threads: Optional[int],
    ) -> Any: ...
    def truncate(self, n: int) -> None: ...
    def keep_of_last(self, n: int, places: Sequence[int]) -> None: ...
    def reserve(self, n: int) -> None: ...
    def fork(self) -> Cache: ...
    def save(self, path: str) -> None: ...
    def lengths(self) -> list[int]: ...
    def sizes(self) -> tuple[int, ...]: ...
    def dtype(self) -> str: ...
    def kind(self) -> str: ...
    def bytes(self) -> int: ...
    def quant_error(self) -> dict[str, Any]: ...

class Layer:
    def __init__(self, sizes: tuple[int, ...], state: dict[str, Array]) -> None: ...
    def __call__(
        self, q: Array, k: Array, v: Array, mask: Any, need_weights: bool, num_threads: Optional[int]
    ) -> Any: ...

def sdpa(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Optional[Array],
    is_causal: bool,
    scale: Optional[float],
    enable_gqa: bool,
    /,
) -> Optional[Array]: ...
def layer_on_parameters(
    sizes: tuple[int, ...],
    parameters: tuple[dict[str, Any], ...],
    types: tuple[type, type],
    q: Array,
    k: Array,
    v: Array,
    mask: Optional[Array],
    need_weights: bool,
    /,
) -> Any: ...
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Union[Mask, Array, None] = None,
    bias: Optional[Array] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    sinks: Optional[Array] = None,
    alibi_slopes: Optional[Array] = None,
    dropout: float = 0.0,
    seed: int = 0,
    return_lse: bool = False,
    return_weights: bool = False,
    return_mean_weights: bool = False,
    weight_rows: Optional[IntArray] = None,
    top_k: Optional[int] = None,
    return_column_sums: bool = False,
    return_entropy: bool = False,
    out: Optional[Array] = None,
    num_threads: Optional[int] = None,
) -> Any: ...
def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    *,
    mask: Union[Mask, Array, None] = None,
    bias: Optional[Array] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    sinks: Optional[Array] = None,
    alibi_slopes: Optional[Array] = None,
    dropout: float = 0.0,
    seed: int = 0,
    dlse: Optional[Array] = None,
    num_threads: Optional[int] = None,
) -> tuple[Array, ...]: ...
def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_kv: Array,
    *,
    mask: Optional[Mask] = None,
    bias: Optional[Array] = None,
    scale: Optional[float] = None,
    softcap: Optional[float] = None,
    sinks: Optional[Array] = None,
    alibi_slopes: Optional[Array] = None,
    dropout: float = 0.0,
    seed: int = 0,
    return_lse: bool = False,
    return_weights: bool = False,
    return_mean_weights: bool = False,
    weight_rows: Optional[IntArray] = None,
    top_k: Optional[int] = None,
    return_column_sums: bool = False,
    return_entropy: bool = False,
    out: Optional[Array] = None,
    num_threads: Optional[int] = None,
) -> Any: ...
def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]: ...
def _attention_backward(*args: Any) -> tuple[Any, ...]: ...
def plan(*args: Any) -> dict[str, Any]: ...
def info() -> dict[str, Any]: ...
def set_isa(isa: str) -> None: ...
def set_repeats(n: int) -> None: ...
def set_num_threads(n: int) -> None: ...
def load_safetensors(path: str) -> tuple[dict[str, tuple[Array, tuple[int, ...], str]], dict[str, str]]: ...
def save_safetensors(path: str, tensors: dict[str, Array], metadata: dict[str, str]) -> None: ...
def load_npy(path: str) -> tuple[tuple[Array, tuple[int, ...], str], bool]: ...
def load_layer(
    path: str, preset: str, num_heads: int, num_kv_heads: int, prefix: str
) -> tuple[int, int, dict[str, Array]]: ...
def attention_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_table: Array,
    lengths: Array,
    mask: Any,
    bias: Optional[Array],
    scale: Optional[float],
    softcap: Optional[float],
    sinks: Optional[Array],
    alibi_slopes: Optional[Array],
    wanted: tuple[Any, ...],
    num_threads: Optional[int],
) -> Any: ...

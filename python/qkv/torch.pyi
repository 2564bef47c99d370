# SPDX-License-Identifier: Apache-2.0
from contextlib import AbstractContextManager
from typing import Any, Optional, Union

import torch

from . import _core

__all__: list[str]

def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> torch.Tensor: ...
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Union[torch.Tensor, _core.Mask, None] = None,
    bias: Optional[torch.Tensor] = None,
    sinks: Optional[torch.Tensor] = None,
    causal: bool = False,
    scale: Optional[float] = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def sdpa_override() -> AbstractContextManager[None]: ...

class GQA(torch.nn.Module):
    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    dropout: float
    fc_q: torch.nn.Linear
    fc_k: torch.nn.Linear
    fc_v: torch.nn.Linear
    fc_o: torch.nn.Linear
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
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None: ...
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Optional[torch.Tensor] = None,
        need_weights: bool = True,
    ) -> Any: ...

class MHA(GQA):
    def __init__(
        self, num_heads: int, dim_k: int, dim_v: int, head_dim_qk: int, head_dim_v: int, dim_out: int, **options: Any
    ) -> None: ...

class MQA(GQA):
    def __init__(
        self, num_heads: int, dim_k: int, dim_v: int, head_dim_qk: int, head_dim_v: int, dim_out: int, **options: Any
    ) -> None: ...

def from_multihead_attention(module: torch.nn.MultiheadAttention) -> MHA: ...

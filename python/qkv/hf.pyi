# SPDX-License-Identifier: Apache-2.0
from typing import Any, Optional

import torch

__all__: list[str]

def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    is_causal: Optional[bool] = None,
    position_bias: Optional[torch.Tensor] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Optional[torch.Tensor]]: ...
def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Optional[torch.Tensor] = None,
    use_vmap: bool = False,
    device: Any = "cpu",
    **kwargs: Any,
) -> torch.Tensor: ...
def register() -> None: ...

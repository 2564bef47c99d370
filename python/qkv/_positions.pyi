# SPDX-License-Identifier: Apache-2.0
from typing import Optional

from ._core import Array

def rope(
    x: Array, positions: Array, *, base: float = 10000.0, style: str = "half_split", rot_dim: Optional[int] = None
) -> Array: ...
def alibi_slopes(num_heads: int) -> Array: ...

# SPDX-License-Identifier: Apache-2.0
from typing import Any

from onnx.reference.op_run import OpRun

__all__: list[str]

class Attention(OpRun):
    def _run(
        self, Q: Any, K: Any, V: Any, attn_mask: Any = None, past_key: Any = None, past_value: Any = None,
        nonpad_kv_seqlen: Any = None, scale: Any = None, is_causal: int = 0, q_num_heads: Any = None, kv_num_heads: Any = None,
        softmax_precision: Any = None, softcap: Any = None, qk_matmul_output_mode: Any = None, left_window_size: Any = None,
        right_window_size: Any = None,
    ) -> Any: ...  # fmt: skip

# SPDX-License-Identifier: Apache-2.0
from onnx.reference.op_run import OpRun

__all__: list[str]

class Attention(OpRun): ...

# SPDX-License-Identifier: Apache-2.0
"""scaled_dot_product_attention by ONNX Runtime and OpenVINO, where they can be imported: models of one operator,
one thread, memory bound once so that a call runs the operator and nothing else. Used by peers.py.
"""

import importlib.util
import math

import torch


def has(*packages):
    return all(importlib.util.find_spec(p) for p in packages)


def versions():
    found = []
    if has("onnxruntime", "onnx"):
        import onnxruntime

        found.append(f"onnxruntime {onnxruntime.__version__}")
    if has("openvino"):
        import openvino

        found.append(f"openvino {openvino.__version__.split('-')[0]}")
    return found


def token_major(x):
    """[batch, heads, n, d] -> [batch, n, heads * d]"""
    return x.transpose(1, 2).flatten(2).contiguous()


def head_major(x, heads):
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def as_bias(mask, dtype):
    """A boolean mask as additive floats with 4 axes."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, float("-inf"))
    return mask[(None,) * (4 - mask.dim())].contiguous()


def onnx_session(domain, operator, inputs, outputs, attributes, opset):
    """(run, first output) of a model of one node; inputs: {name or None: tensor}, in order. An output that shares an
    input's memory is named in `outputs` as (shape, name of that input)."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    types = {torch.float32: TensorProto.FLOAT, torch.bool: TensorProto.BOOL, torch.int32: TensorProto.INT32}
    given = {n: x for n, x in inputs if x is not None}
    names = [n if x is not None else "" for n, x in inputs]
    results = [f"out{i}" for i in range(len(outputs))]
    node = helper.make_node(operator, names, results, domain=domain, **attributes)
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(n, types[x.dtype], list(x.shape)) for n, x in given.items()],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, list(shape)) for n, (shape, _) in zip(results, outputs)],
    )  # fmt: skip
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    codes = {torch.float32: 1, torch.bool: 9, torch.int32: 6}
    for n, x in given.items():
        binding.bind_input(n, "cpu", 0, codes[x.dtype], list(x.shape), x.data_ptr())
    memory = []
    for n, (shape, shared) in zip(results, outputs):
        x = given[shared] if shared else torch.empty(shape)
        memory.append(x)
        binding.bind_output(n, "cpu", 0, 1, list(shape), x.data_ptr())
    keep = (given, memory)

    def run():
        session.run_with_iobinding(binding)
        return keep[1][0]

    return run


def onnx_attention(q, k, v, mask, causal):
    """ai.onnx Attention"""
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, q.shape[2], -1).contiguous()
    inputs = [("q", q), ("k", k), ("v", v), ("mask", mask)]
    return onnx_session("", "Attention", inputs, [(q.shape, None)], {"is_causal": int(causal)}, 23), lambda y: y


def onnx_multi_head(q, k, v, mask, causal):
    """com.microsoft MultiHeadAttention, in the layout it likes: [batch, n, heads * d]"""
    heads = q.shape[1]
    if k.shape[1] != heads:
        return None
    padding = bias = None
    if mask is not None and mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        padding = mask[:, 0, 0].int().contiguous()
    elif mask is not None:
        bias = as_bias(mask, q.dtype)
    inputs = [
        ("q", token_major(q)), ("k", token_major(k)), ("v", token_major(v)), ("projection_bias", None),
        ("padding", padding), ("bias", bias),
    ]  # fmt: skip
    attributes = {"num_heads": heads, "unidirectional": int(causal)}
    run = onnx_session("com.microsoft", "MultiHeadAttention", inputs, [(inputs[0][1].shape, None)], attributes, 21)
    return run, lambda y: head_major(y, heads)


def onnx_grouped(q, k, v, mask, causal, window=None):
    """com.microsoft GroupQueryAttention, which is causal; the cache it appends to is memory of its own"""
    batch, heads, n_q, d = q.shape
    kv_heads, n_kv = k.shape[1], k.shape[2]
    is_decode = n_q == 1 and mask is None
    if not (is_decode or (n_q == n_kv and (causal or window))):
        return None
    new = [x[:, :, n_kv - n_q :] for x in (k, v)]
    past = [x.clone() for x in (k, v)]
    inputs = [
        ("q", token_major(q)), ("k", token_major(new[0])), ("v", token_major(new[1])), ("past_k", past[0]),
        ("past_v", past[1]), ("lengths", torch.full((batch,), n_kv - 1, dtype=torch.int32)),
        ("total", torch.tensor([n_kv], dtype=torch.int32)),
    ]  # fmt: skip
    outputs = [((batch, n_q, heads * d), None), (k.shape, "past_k"), (v.shape, "past_v")]
    attributes = {"num_heads": heads, "kv_num_heads": kv_heads, "local_window_size": window or -1}
    return onnx_session("com.microsoft", "GroupQueryAttention", inputs, outputs, attributes, 21), lambda y: head_major(y, heads)


def openvino_attention(q, k, v, mask, causal):
    """OpenVINO's ScaledDotProductAttention, float32"""
    if k.shape[1] != q.shape[1]:
        return None
    import numpy as np
    import openvino as ov
    import openvino.opset13 as op

    arrays = [x.numpy() for x in (q, k, v)]
    if mask is not None:
        arrays.append(as_bias(mask, q.dtype).numpy())
    inputs = [op.parameter(list(x.shape), np.float32) for x in arrays]
    nodes = list(inputs)
    if mask is None and not causal:
        nodes.append(op.constant(np.float32(0)))
    scale = op.constant(np.float32(1 / math.sqrt(q.shape[3])))
    if causal:
        y = op.scaled_dot_product_attention(*nodes, causal=True)
    else:
        y = op.scaled_dot_product_attention(*nodes, scale, causal=False)
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    request = ov.compile_model(ov.Model([y], inputs), "CPU", options).create_infer_request()
    for i, x in enumerate(arrays):
        request.set_input_tensor(i, ov.Tensor(x, shared_memory=True))
    out = torch.empty(q.shape)
    request.set_output_tensor(0, ov.Tensor(out.numpy(), shared_memory=True))
    keep = (arrays, out)

    def run():
        request.infer()
        return keep[1]

    return run, lambda y: y


def peers(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False, window=None):
    """{name: (run, to [batch, heads, n, d])} of what can be imported and knows the case; window: attn_mask is the
    causal window of so many tokens, itself included."""
    found = {}
    makers = []
    if has("onnxruntime", "onnx"):
        makers += [("ort Attention", onnx_attention), ("ort MultiHead", onnx_multi_head)]
        makers.append(("ort GroupQuery", lambda *a: onnx_grouped(*a, window=window)))
    if has("openvino"):
        makers.append(("openvino", openvino_attention))
    for name, make in makers:
        try:
            made = make(q, k, v, attn_mask, is_causal)
        except Exception as error:  # an operator of another version: say so, measure the rest
            print(f"  {name}: not measured, {str(error).splitlines()[0][:120]}")
            continue
        if made:
            found[name] = made
    return found

# SPDX-License-Identifier: Apache-2.0
"""qkv.torch.MHA, MQA, GQA: the lesson's modules; and nn.MultiheadAttention imported."""

import copy
import pickle

import numpy as np
import pytest
from support import ROOT, assert_close

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import qkv.torch  # noqa: E402

LAYERS = ROOT / "tests" / "data" / "layers"


def lesson_forward(module, q, k, v, mask=None):
    """The lesson's text: heads first, additive mask, softmax, weights head-major."""
    batch, n_q, _ = q.shape
    n_kv = k.shape[1]
    h, g = module.num_heads, module.num_heads // module.num_kv_heads
    q = module.fc_q(q).view(batch, n_q, h, -1).permute(2, 0, 1, 3).reshape(h * batch, n_q, -1)
    k = module.fc_k(k).view(batch, n_kv, h // g, -1).permute(2, 0, 1, 3).repeat_interleave(g, 0).reshape(h * batch, n_kv, -1)
    v = module.fc_v(v).view(batch, n_kv, h // g, -1).permute(2, 0, 1, 3).repeat_interleave(g, 0).reshape(h * batch, n_kv, -1)
    s = q @ k.transpose(1, 2) / module.head_dim_qk**0.5
    if mask is not None:
        s = s + mask.repeat(h, 1, 1)
    weights = torch.softmax(s, -1)
    out = (weights @ v).view(h, batch, n_q, -1).permute(1, 2, 0, 3).reshape(batch, n_q, -1)
    return weights, module.fc_o(out)


def make(kind):
    torch.manual_seed(2)
    if kind == "gqa":
        return qkv.torch.GQA(6, 2, 20, 12, 5, 7, 9, dim_q=16)
    return {"mha": qkv.torch.MHA, "mqa": qkv.torch.MQA}[kind](6, 20, 12, 5, 7, 9, dim_q=16)


def inputs(dtype=torch.float64):
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 4, 16), torch.randn(2, 5, 20), torch.randn(2, 5, 12)
    mask = torch.randn(2, 4, 5).masked_fill(torch.rand(2, 4, 5) < 0.3, float("-inf"))
    mask[..., 0] = 0
    return [x.to(dtype) for x in (q, k, v, mask)]


@pytest.mark.parametrize("kind", ["mha", "mqa", "gqa"])
@pytest.mark.parametrize("masked", [False, True])
def test_modules_equal_the_lesson_forward_and_backward(kind, masked):
    module = make(kind).double()
    q, k, v, mask = inputs()
    mask = mask if masked else None
    results = []
    for run in (module, lambda *a: lesson_forward(module, *a)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        weights, output = run(*leaves, mask)
        loss = (weights.sin().sum() + output.square().sum())
        results.append((weights, output, *torch.autograd.grad(loss, [*leaves, *module.parameters()])))
    assert results[0][0].shape == (6 * 2, 4, 5)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        weights, output = module(q, k, v, mask)
        torch.testing.assert_close(weights, results[1][0].detach())
        torch.testing.assert_close(module(q, k, v, mask, need_weights=False), output)


def test_boolean_mask_attends_where_true_and_empty_rows_give_the_bias():
    module = make("mha").double()
    q, k, v, mask = inputs()
    hidden = torch.isneginf(mask)
    torch.testing.assert_close(module(q, k, v, ~hidden), module(q, k, v, torch.zeros_like(mask).masked_fill(hidden, -torch.inf)))
    mask[1, 2] = float("-inf")
    weights, output = module(q, k, v, mask)
    assert not weights.view(6, 2, 4, 5)[:, 1, 2].any()
    torch.testing.assert_close(output[1, 2], module.fc_o.bias)
    (output.sum() + weights.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in module.parameters())


def test_state_dict_names_deepcopy_pickle_dtype():
    module = make("mqa")
    names = [f"fc_{x}.{y}" for x in "qkvo" for y in ("weight", "bias")]
    assert list(module.state_dict()) == names
    assert module.fc_k.weight.shape == (5, 20) and module.fc_o.weight.shape == (9, 6 * 7)
    q, k, v, _ = inputs(torch.float32)
    want = module(q, k, v)[1]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(q, k, v)[1], want)
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert half(*(x.bfloat16() for x in (q, k, v)))[1].dtype is torch.bfloat16
    assert list(qkv.torch.MHA(2, 4, 4, 2, 2, 4, bias=False).state_dict()) == names[::2]
    with pytest.raises(ValueError, match="multiple"):
        qkv.torch.GQA(3, 2, 4, 4, 2, 2, 4)


def test_training_lowers_the_loss():
    torch.manual_seed(4)
    module = qkv.torch.GQA(4, 2, 16, 16, 4, 4, 16)
    x, y = torch.randn(8, 6, 16), torch.randn(8, 6, 16)
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (module(x, x, x, need_weights=False) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("name", ["seed_mha", "seed_mqa", "gqa_group4", "no_bias"])
def test_golden_layers(name):
    import json

    from safetensors.torch import load_file

    case = next(c for c in json.loads((LAYERS / "index.json").read_text())["cases"] if c["name"] == name)
    folder = LAYERS / name
    state = load_file(folder / "weights.safetensors")
    module = qkv.torch.GQA(
        *(case[n] for n in "num_heads num_kv_heads dim_k dim_v head_dim_qk head_dim_v dim_out".split()), bias=case["bias"]
    )
    module.load_state_dict(state)
    for run in case["runs"]:
        if run["mask_flag"]:
            continue
        x, want = load_file(folder / run["input"]), load_file(folder / run["expected"])
        weights, output = module(x["q"], x["k"], x["v"], x.get("mask"))
        assert_close("attention", weights.detach(), want["attention"], 2e-6, 1e-5)
        assert_close("output", output.detach(), want["output"], 5e-6, 1e-5)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 12, "vdim": 20}, {"add_zero_attn": True}])
def test_imported_multihead_attention_gives_the_same_numbers(options, batch_first):
    torch.manual_seed(6)
    theirs = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options).double().eval()
    nn.init.normal_(theirs.out_proj.weight)
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
    ours = qkv.torch.from_multihead_attention(theirs)
    batch, n_q, n_kv = 3, 4, 5
    shapes = [(n_q, 16), (n_kv, theirs.kdim), (n_kv, theirs.vdim)]
    q, k, v = (torch.randn(*((batch, n, d) if batch_first else (n, batch, d)), dtype=torch.double) for n, d in shapes)
    padding = torch.zeros(batch, n_kv, dtype=torch.bool)
    padding[1, 3:] = True
    per_head = torch.rand(batch * 4, n_q, n_kv) < 0.2
    per_head[..., 0] = False
    added = torch.randn(n_q, n_kv, dtype=torch.double)
    added_padding = torch.zeros(batch, n_kv, dtype=torch.double).masked_fill(padding, float("-inf"))
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": per_head},
        {"attn_mask": per_head, "key_padding_mask": padding},
        {"attn_mask": added, "key_padding_mask": added_padding},
    ):
        want, want_weights = theirs(q, k, v, average_attn_weights=False, **masks)
        weights, output = ours(q, k, v, **masks)
        torch.testing.assert_close(output, want)
        by_head = weights.view(4, batch, n_q, n_kv).transpose(0, 1)
        torch.testing.assert_close(by_head, want_weights[..., :n_kv])
    lesson_mask = added.expand(batch, -1, -1)
    torch.testing.assert_close(ours(q, k, v, lesson_mask)[1], theirs(q, k, v, attn_mask=added)[0])


def test_a_learned_extra_key_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="bias_k and bias_v .*learned key"):
        qkv.torch.from_multihead_attention(nn.MultiheadAttention(8, 2, add_bias_kv=True))


def test_weights_and_output_do_not_depend_on_being_asked_for():
    module = make("mha")
    q, k, v, mask = inputs(torch.float32)
    assert torch.equal(module(q, k, v, mask)[1], module(q, k, v, mask, need_weights=False))
    assert np.isfinite(module(q, k, v, mask)[0].detach().numpy()).all()


# Without gradients a call runs on the parameters where they are: nothing may be remembered of them.


def plain(module, q, k, v, mask=None):
    """The general road: torch's products around the kernel."""
    with torch.no_grad():
        return module._attend(q, k, v, mask, True, None)


def in_place(module, q, k, v, mask=None):
    with torch.no_grad():
        return module._in_place(q, k, v, mask, True)


def small(kind="mqa"):
    module = make(kind)
    return module, inputs(torch.float32)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mha", "mqa", "gqa"])
@pytest.mark.parametrize("bias", [True, False])
def test_calls_in_place_equal_the_general_road_and_the_layer(kind, bias):
    module, (q, k, v, mask) = small(kind)
    if not bias:
        for x in "qv":
            module._modules[f"fc_{x}"].bias = None
    layer = qkv.GQA(6, module.num_kv_heads, 20, 12, 5, 7, 9, dim_q=16)
    layer.load_state_dict(module.state_dict())
    for m in (None, mask, ~torch.isneginf(mask)):
        got = in_place(module, q, k, v, m)
        assert_same(got, plain(module, q, k, v, m))
        for a, b in zip(got, layer(q, k, v, m), strict=True):
            assert torch.equal(a, b)
        with torch.no_grad():
            assert torch.equal(module(q, k, v, m, need_weights=False), got[1])


def step(module, _):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with torch.enable_grad():
        module(*inputs(torch.float32)[:3], need_weights=False).square().sum().backward()
    optimizer.step()


WRITES = {
    "data.add_": lambda m, _: m.fc_k.weight.data.add_(1),
    "data of a bias": lambda m, _: m.fc_o.bias.data.fill_(3),
    "data =": lambda m, _: setattr(m.fc_v.weight, "data", torch.ones_like(m.fc_v.weight)),
    "NumPy": lambda m, _: m.fc_q.weight.detach().numpy().__setitem__((0, 0), 9),
    "optimizer.step": step,
    "load_state_dict": lambda m, other: m.load_state_dict(other.state_dict()),
    "load_state_dict assign": lambda m, other: m.load_state_dict(other.state_dict(), assign=True),
    "no_grad copy_": lambda m, other: m.fc_o.weight.copy_(other.fc_o.weight),
    "new Parameter": lambda m, other: setattr(m.fc_q, "weight", nn.Parameter(other.fc_q.weight.clone())),
    "new Linear": lambda m, other: setattr(m, "fc_q", other.fc_q),
    "bias removed": lambda m, _: setattr(m.fc_k, "bias", None),
    "there and back": lambda m, _: m.double().float(),
    "untyped storage": lambda m, _: m.fc_q.weight.untyped_storage().fill_(0),
    "transposed memory": lambda m, _: setattr(m.fc_q.weight, "data", m.fc_q.weight.data.t().contiguous().t() + 1),
    "a view of a larger one": lambda m, _: setattr(m.fc_v.weight, "data", torch.randn(14, 24)[::2, ::2]),
}


@pytest.mark.parametrize("name", WRITES)
def test_every_write_to_a_parameter_is_seen_at_the_next_call(name):
    module, (q, k, v, mask) = small()
    torch.manual_seed(11)
    other = qkv.torch.MQA(6, 20, 12, 5, 7, 9, dim_q=16)
    with torch.no_grad():
        before = module(q, k, v, mask)
        WRITES[name](module, other)
        got = module(q, k, v, mask)
    assert_same(got, plain(module, q, k, v, mask))
    if name != "there and back":
        assert not torch.equal(got[1], before[1])


def test_what_torch_does_to_a_linear_layer_is_kept():
    """Hooks, pruning, parametrizations, other classes: these calls may not bypass the layer."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def subclass(m):
        m.fc_v.__class__ = Doubled

    changes = [
        lambda m: m.fc_q.register_forward_hook(lambda _, __, y: y + 1),
        lambda m: m.fc_o.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
        lambda m: torch.nn.utils.prune.l1_unstructured(m.fc_k, "weight", 0.5),
        lambda m: torch.nn.utils.parametrizations.weight_norm(m.fc_k),
        subclass,
    ]
    import torch.nn.utils.prune

    for change in changes:
        module, (q, k, v, mask) = small()
        with torch.no_grad():
            before = module(q, k, v, mask)[1]
            change(module)
            if change is changes[3]:
                module.fc_k.parametrizations.weight.original0.mul_(3)
            got = module(q, k, v, mask)
        assert_same(got, plain(module, q, k, v, mask))
        assert not torch.equal(got[1], before)
    module, (q, k, v, mask) = small()
    handle = nn.modules.module.register_module_forward_hook(lambda m, _, y: y + 1 if isinstance(m, nn.Linear) else None)
    try:
        with torch.no_grad():
            assert_same(module(q, k, v, mask), plain(module, q, k, v, mask))
    finally:
        handle.remove()


def test_modules_without_gradients_in_graphs_transforms_and_modes():
    module, (q, k, v, mask) = small()
    with torch.no_grad():
        want = module(q, k, v, mask)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        assert_same(compiled(q, k, v, mask), want)
        module.fc_o.bias.data.add_(1)
        assert_same(compiled(q, k, v, mask), module(q, k, v, mask))
        exported = torch.export.export(module, (q, k, v, mask))
        assert_same(exported.module()(q, k, v, mask), module(q, k, v, mask))
        assert "qkv.attention" in str(exported.graph)
        changed = {n: p + 0.1 for n, p in module.named_parameters()}
        twin = copy.deepcopy(module)
        for p in twin.parameters():
            p.add_(0.1)
        assert_same(torch.func.functional_call(module, changed, (q, k, v, mask)), twin(q, k, v, mask))
        stacked = {n: torch.stack([p, p + 0.1]) for n, p in module.named_parameters()}
        call = torch.func.vmap(lambda p: torch.func.functional_call(module, p, (q, k, v, mask)))
        both = call(stacked)
        for i, m in enumerate((module, twin)):
            assert_same([x[i] for x in both], m(q, k, v, mask))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module(q, k, v, mask)[1].dtype is torch.bfloat16
        seen = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))

        with Watch():
            assert_same(module(q, k, v, mask), plain(module, q, k, v, mask))
        assert any("addmm" in f or "linear" in f for f in seen) and any("qkv.attention" in f for f in seen)
    gradient = torch.func.grad(
        lambda p: torch.func.functional_call(module, p, (q, k, v, mask))[1].square().sum()
    )(dict(module.named_parameters()))
    module(q, k, v, mask)[1].square().sum().backward()
    for n, p in module.named_parameters():
        torch.testing.assert_close(gradient[n], p.grad)
    with torch.inference_mode():
        assert_same(module(q, k, v, mask), plain(module, q, k, v, mask))


def test_forward_derivatives_and_traces_go_the_general_road():
    module, (q, k, v, mask) = small()
    from torch.autograd import forward_ad

    with torch.no_grad(), forward_ad.dual_level():
        try:
            tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(q, torch.ones_like(q)), k, v, mask)[1]).tangent
        except NotImplementedError:
            tangent = "refused"
    assert tangent is not None  # a lost derivative would be a silent zero
    with torch.no_grad():
        try:
            traced = torch.jit.trace(module, (q, k, v, mask), check_trace=False)
        except Exception as error:
            assert "trac" in str(error).lower() or "qkv" in str(error).lower()
        else:
            assert_same(traced(2 * q, k, v, mask), module(2 * q, k, v, mask))


@pytest.mark.parametrize("batch, n_q, n_kv", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (1, 1, 1), (3, 1, 70), (2, 70, 1)])
def test_modules_of_any_extent(batch, n_q, n_kv):
    module, _ = small("gqa")
    torch.manual_seed(1)
    q, k, v = torch.randn(batch, n_q, 16), torch.randn(batch, n_kv, 20), torch.randn(batch, n_kv, 12)
    assert_same(in_place(module, q, k, v), plain(module, q, k, v))


def test_inputs_of_any_strides_and_bad_inputs():
    module, (q, k, v, mask) = small()
    want = plain(module, q, k, v, mask)
    for change in (
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    ):
        assert_same(in_place(module, *(change(x) for x in (q, k, v)), mask), want)
    with torch.no_grad():
        for bad in ((q[0], k, v), (q[..., :3], k, v), (q, k[:, :2], v), (q, k.double(), v), (q[:1], k, v)):
            with pytest.raises((ValueError, RuntimeError)):
                module(*bad)
        with pytest.raises((ValueError, RuntimeError)):
            module(q, k, v, mask[:, :2])


def test_threads_call_one_module_while_it_is_written():
    """Two threads call, one replaces parameters: each result is that of some state between the writes."""
    import threading

    module, (q, k, v, _) = small()
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        states.append({n: torch.randn_like(p) for n, p in module.named_parameters() if n == "fc_o.bias"})
    results = []
    with torch.no_grad():
        for s in states:
            module.fc_o.bias = nn.Parameter(s["fc_o.bias"].clone())
            results.append(module(q, k, v)[1])
    stop, wrong = threading.Event(), []

    def call():
        with torch.no_grad():
            while not stop.is_set():
                got = module(q, k, v)[1]
                if not any(torch.equal(got, r) for r in results):
                    wrong.append(got)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for t in threads:
        t.start()
    for i in range(2000):
        module.fc_o.bias = nn.Parameter(states[i % 3]["fc_o.bias"].clone())
    stop.set()
    for t in threads:
        t.join()
    assert not wrong

# SPDX-License-Identifier: Apache-2.0
"""qkv.torch: the operator against torch's own, its gradients, compile, export, func, the override."""

import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import qkv  # noqa: E402
import qkv.torch  # noqa: E402

sdpa = qkv.torch.scaled_dot_product_attention


def reference(q, k, v, mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The definition in float64; rows without a visible key give 0."""
    q, k, v = (x.double() for x in (q, k, v))
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * (q @ k.transpose(-2, -1))
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.double()
    empty = torch.isneginf(s).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0) @ v


def bound(naives, exact, dtype):
    """At most twice the error of torch in the same precision, and a few ulp of the type."""
    eps = torch.finfo(dtype).eps
    error = max((x.double() - exact).abs().max().item() if exact.numel() else 0.0 for x in naives)
    size = exact.abs().max().item() if exact.numel() else 0.0
    return 2 * error + 8 * eps * max(size, 1.0)


def assert_near(got, exact, limit, what=""):
    assert got.shape == exact.shape, what
    if got.numel():
        worst = (got.double() - exact).abs().max().item()
        assert worst <= limit, (what, worst, limit)


def samples(dtype):
    from torch.testing._internal.common_methods_invocations import op_db

    op = next(o for o in op_db if o.name == "nn.functional.scaled_dot_product_attention")
    return list(op.sample_inputs("cpu", dtype, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_torchs_own_samples_agree_forward_and_backward(dtype):
    seen = 0
    for s in samples(dtype):
        tensors = [s.input, *s.args]
        options = dict(s.kwargs)
        if options.pop("dropout_p", 0.0):
            assert sdpa(*tensors, dropout_p=0.5, **options).shape == F.scaled_dot_product_attention(*tensors, **options).shape
            continue
        mask = options.get("attn_mask", tensors[3] if len(tensors) > 3 else None)
        wanted = [x for x in (*tensors, mask) if isinstance(x, torch.Tensor) and x.requires_grad]
        doubles = {id(x): x.detach().double().requires_grad_() for x in wanted}

        def exact_of(x):
            return doubles.get(id(x), x)

        kwargs = {n: exact_of(x) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        kwargs["mask"] = kwargs.pop("attn_mask", exact_of(mask))
        exact = reference(*(exact_of(x) for x in tensors[:3]), **kwargs)
        fused = F.scaled_dot_product_attention(*tensors, **options)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            plain = F.scaled_dot_product_attention(*tensors, **options)
        got = sdpa(*tensors, **options)
        assert got.dtype == fused.dtype
        assert_near(got, exact, bound((fused, plain), exact, dtype), s)
        dout = torch.randn_like(fused)
        groups = zip(
            torch.autograd.grad(got, wanted, dout),
            torch.autograd.grad(fused, wanted, dout),
            torch.autograd.grad(plain, wanted, dout),
            torch.autograd.grad(exact, list(doubles.values()), dout.double()),
            strict=True,
        )
        # A score s is off by |s| ulp whatever computes it; the gradients of a call share that.
        scores = (s.input.abs().max() * s.args[0].abs().max()).item() * s.input.shape[-1] ** 0.5 if s.input.numel() else 0
        for g, f, n, e in groups:
            size = 1 + (e.abs().max().item() if e.numel() else 0)
            assert_near(g, e, bound((f, n), e, dtype) + torch.finfo(torch.float32).eps * scores * size / 4, s)
        seen += 1
    assert seen >= 10


sizes = st.sampled_from([1, 2, 3, 7, 16, 17, 33])


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.sampled_from([(), (1,), (2,), (2, 3)]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    n_q=sizes,
    n_kv=sizes,
    d=sizes,
    dv=sizes,
    mask=st.sampled_from(["none", "causal", "bool", "bool_row", "float", "float_head"]),
    layout=st.sampled_from(["plain", "bshd", "flipped", "expanded", "strided"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([None, 1.0, 0.0, -0.5]),
    seed=st.integers(0, 10**6),
)
def test_random_calls_agree_with_the_definition(
    batch, kv_heads, group, n_q, n_kv, d, dv, mask, layout, dtype, scale, seed
):
    torch.manual_seed(seed)
    heads = kv_heads * group

    def make(h, n, width):
        if layout == "bshd":
            return torch.randn(*batch, n, h, width).to(dtype).transpose(-3, -2)
        if layout == "flipped":
            return torch.randn(*batch, h, width, n).to(dtype).transpose(-2, -1)
        if layout == "expanded":
            return torch.randn(*(1,) * len(batch), h, n, width).to(dtype).expand(*batch, h, n, width)
        if layout == "strided":
            return torch.randn(*batch, h, 2 * n, width + 3).to(dtype)[..., ::2, 1 : width + 1]
        return torch.randn(*batch, h, n, width).to(dtype)

    tensors = [make(heads, n_q, d), make(kv_heads, n_kv, d), make(kv_heads, n_kv, dv)]
    options = {"scale": scale, "enable_gqa": group > 1, "is_causal": mask == "causal"}
    attn_mask = {
        "bool": lambda: torch.rand(*batch, 1, n_q, n_kv) < 0.6,
        "bool_row": lambda: torch.rand(1, n_kv) < 0.6,
        "float": lambda: torch.randn(n_q, n_kv).to(dtype),
        "float_head": lambda: torch.randn(heads, n_q, n_kv).to(dtype).masked_fill_(torch.rand(n_q, n_kv) < 0.3, float("-inf")),
    }.get(mask, lambda: None)()
    leaves = [x.detach().requires_grad_() for x in tensors]
    if attn_mask is not None and attn_mask.is_floating_point():
        leaves.append(attn_mask.requires_grad_())
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    got = sdpa(*leaves[:3], attn_mask, **options)
    exact = reference(*doubles[:3], mask=doubles[3] if len(doubles) > 3 else attn_mask, **options)
    q, k = doubles[:2]
    scores = (1 if scale is None else abs(scale)) * (q.abs().max() * k.abs().max()).item() * d
    size = (1 + exact.abs().max().item()) * (1 + scores)  # exp(s) is off by |s| ulp
    eps = torch.finfo(dtype).eps
    assert_near(got.detach(), exact.detach(), 8 * eps * size)
    with torch.no_grad():
        assert torch.equal(sdpa(*tensors, None if attn_mask is None else attn_mask.detach(), **options), got.detach())
    dout = torch.randn_like(got)
    for g, e in zip(
        torch.autograd.grad(got, leaves, dout), torch.autograd.grad(exact, doubles, dout.double()), strict=True
    ):
        assert_near(g, e, 16 * eps * (1 + e.abs().max().item()) * size)


@pytest.mark.parametrize("case", ["plain", "causal", "gqa_bias", "bool", "sinks_softcap"])
def test_gradcheck_and_gradgradcheck(case):
    torch.manual_seed(1)
    heads = 2 if case == "gqa_bias" else 1
    q = torch.randn(2, 2, 3, 4, dtype=torch.double, requires_grad=True)
    k = torch.randn(2, 2 // heads, 5, 4, dtype=torch.double, requires_grad=True)
    v = torch.randn(2, 2 // heads, 5, 3, dtype=torch.double, requires_grad=True)
    inputs = (q, k, v)
    if case == "gqa_bias":
        inputs += (torch.randn(3, 5, dtype=torch.double, requires_grad=True),)
        function = lambda q, k, v, b: sdpa(q, k, v, b, enable_gqa=True)  # noqa: E731
    elif case == "bool":
        visible = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
        function = lambda q, k, v: sdpa(q, k, v, visible)  # noqa: E731
    elif case == "sinks_softcap":
        inputs += (torch.randn(2, dtype=torch.double, requires_grad=True),)
        function = lambda q, k, v, s: qkv.torch.attend(q, k, v, sinks=s, softcap=2.0)  # noqa: E731
    else:
        function = lambda q, k, v: sdpa(q, k, v, is_causal=case == "causal")  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def wide(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return torch.randn(2, 4, 6, 8, dtype=dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_makes_one_graph_with_gradients(dynamic):
    bias = torch.randn(6, 6)

    def function(x, b):
        return sdpa(x, x, x, is_causal=True) + sdpa(x, x[:, :2], x[:, :2], b, enable_gqa=True, scale=0.3)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = []
    for f in (function, compiled):
        x, b = wide().requires_grad_(), bias.clone().requires_grad_()
        y = f(x, b)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, b))))
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(eager, graph)


def test_compile_draws_new_dropout_each_run():
    compiled = torch.compile(lambda x: sdpa(x, x, x, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    x = wide()
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(compiled(x), first)


def test_operator_passes_torchs_own_check():
    x = wide(dtype=torch.double).requires_grad_()
    bias = torch.randn(6, 6, dtype=torch.double, requires_grad=True)
    torch.library.opcheck(torch.ops.qkv.attention.default, (x, x, x, None, bias, None, None, True, 0.3, 0.0, 0.0))


def test_export_keeps_the_operator():
    class Model(torch.nn.Module):
        def forward(self, x):
            return sdpa(x, x, x, is_causal=True)

    x = wide()
    exported = torch.export.export(Model(), (x,))
    assert "qkv.attention" in str(exported.graph)
    assert torch.equal(exported.module()(x), Model()(x))


def test_func_transforms_agree_with_loops():
    xs = torch.randn(3, 2, 4, 6, 8)
    bias = torch.randn(6, 6)

    def loss(x, b):
        return sdpa(x, x, x, b).sin().sum()

    for dims in (0, 1):
        moved = xs.movedim(0, dims)
        got = torch.func.vmap(lambda x: sdpa(x, x, x, is_causal=True), in_dims=dims)(moved)
        torch.testing.assert_close(got, torch.stack([sdpa(x, x, x, is_causal=True) for x in xs]))
    got = torch.func.vmap(lambda x: sdpa(xs[0], x, x))(xs)
    torch.testing.assert_close(got, torch.stack([sdpa(xs[0], x, x) for x in xs]))
    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(xs, bias)
    for i, x in enumerate(xs):
        for a, b in zip(per_sample, torch.func.grad(loss, argnums=(0, 1))(x, bias), strict=True):
            torch.testing.assert_close(a[i], b)
        leaves = (x.clone().requires_grad_(), bias.clone().requires_grad_())
        for a, b in zip(per_sample, torch.autograd.grad(loss(*leaves), leaves), strict=True):
            torch.testing.assert_close(a[i], b)


def test_second_derivative_under_func_grad():
    def second(f):
        inner = torch.func.grad(lambda x: f(x).sin().sum())
        return torch.func.grad(lambda x: inner(x).square().sum())(wide(dtype=torch.double))

    got = second(lambda x: sdpa(x, x, x, is_causal=True))
    torch.testing.assert_close(got, second(lambda x: reference(x, x, x, is_causal=True)))


def test_dropout_is_drawn_from_torchs_generator_and_scales():
    x = torch.ones(1, 1, 200, 50)
    torch.manual_seed(5)
    first = sdpa(x, x, x, dropout_p=0.25)
    assert not torch.equal(first, sdpa(x, x, x, dropout_p=0.25))
    torch.manual_seed(5)
    assert torch.equal(first, sdpa(x, x, x, dropout_p=0.25))
    assert abs(first.mean().item() - 1) < 0.02
    assert not sdpa(x, x, x, dropout_p=1.0).any()


def test_dropout_gradient_drops_what_the_forward_dropped():
    x = wide(dtype=torch.double)

    def function(q, k, v):
        torch.manual_seed(9)
        return sdpa(q, k, v, dropout_p=0.4)

    leaves = [x.clone().requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(function, leaves)


MISTAKES = {
    "dim": lambda x: ((x, x[..., :4], x), {}),
    "mask size": lambda x: ((x, x, x, torch.ones(4, 4)), {}),
    "mask and causal": lambda x: ((x, x, x, torch.ones(6, 6)), {"is_causal": True}),
    "dtype": lambda x: ((x, x.double(), x), {}),
    "one axis": lambda x: ((x[0, 0, 0], x, x), {}),
    "int mask": lambda x: ((x, x, x, torch.ones(6, 6, dtype=torch.int32)), {}),
    "half mask": lambda x: ((x, x, x, torch.ones(6, 6).half()), {}),
    "dropout": lambda x: ((x, x, x), {"dropout_p": 1.5}),
    "gqa heads": lambda x: ((x[:, :3], x, x), {"enable_gqa": True}),
    "heads": lambda x: ((x, x[:, :2], x[:, :2]), {}),
    "int": lambda x: ((x.int(), x.int(), x.int()), {}),
    "no tensor": lambda x: ((x, None, x), {}),
    "list": lambda x: ((x.tolist(), x, x), {}),
    "scale by position": lambda x: ((x, x, x, None, 0.0, False, 0.5), {}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_same_error_for_the_same_mistake(name):
    args, kwargs = MISTAKES[name](wide())
    with pytest.raises(Exception) as theirs:
        F.scaled_dot_product_attention(*args, **kwargs)
    with pytest.raises(type(theirs.value)) as ours:
        sdpa(*args, **kwargs)
    if name != "scale by position":
        assert str(ours.value) == str(theirs.value)


def test_a_value_shorter_than_the_key_is_refused():
    x = wide()
    with pytest.raises(ValueError, match=r"n_kv .*\[2, 4, 6, 8\].*\[2, 4, 5, 8\]"):
        sdpa(x, x, x[:, :, :5])


def test_other_tensors_go_to_torch():
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    try:
        want = F.scaled_dot_product_attention(nested, nested, nested)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error)[:20].replace("(", ".")):
            sdpa(nested, nested, nested)
    else:
        for a, b in zip(sdpa(nested, nested, nested).unbind(), want.unbind(), strict=True):
            torch.testing.assert_close(a, b)
    meta = torch.empty(1, 2, 3, 4, device="meta")
    assert sdpa(meta, meta, meta).device.type == "meta"


def test_autocast_is_followed():
    x = wide()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = sdpa(x, x, x), F.scaled_dot_product_attention(x, x, x)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)


def test_nan_in_a_hidden_key_reaches_nothing():
    q, k, v = wide(), wide(1), wide(2)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 4] = False
    want = sdpa(q, k, v, mask)
    k[:, :, 4], v[:, :, 4] = float("nan"), float("inf")
    assert torch.equal(sdpa(q, k, v, mask), want)


def test_override_reaches_torch_nn_and_ends():
    theirs = F.scaled_dot_product_attention
    x = torch.randn(2, 5, 16)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    want = layer(x)
    seen = []

    def watched(*args, **kwargs):
        seen.append(args[0].shape)
        return sdpa(*args, **kwargs)

    with qkv.torch.sdpa_override():
        assert F.scaled_dot_product_attention is sdpa
        with qkv.torch.sdpa_override():
            pass
        assert F.scaled_dot_product_attention is sdpa
        torch.testing.assert_close(layer(x), want)
        F.scaled_dot_product_attention = watched
        layer(x)
    assert F.scaled_dot_product_attention is theirs
    assert seen
    with pytest.raises(RuntimeError, match="stop"), qkv.torch.sdpa_override():
        raise RuntimeError("stop")
    assert F.scaled_dot_product_attention is theirs


def test_backward_from_many_threads_at_once():
    x = torch.randn(2, 4, 64, 16)
    want = torch.autograd.grad(sdpa(*(leaf := x.clone().requires_grad_(),) * 3, is_causal=True).sum(), leaf)[0]
    wrong = []

    def work():
        for _ in range(10):
            leaf = x.clone().requires_grad_()
            if not torch.equal(torch.autograd.grad(sdpa(leaf, leaf, leaf, is_causal=True).sum(), leaf)[0], want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and np.isfinite(want.numpy()).all()

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

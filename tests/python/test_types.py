# SPDX-License-Identifier: Apache-2.0
"""The stubs: mypy accepts right programs, refuses wrong ones, and finds the stubs true to the package."""

import subprocess
import sys

import pytest

pytest.importorskip("mypy")

RIGHT = """
import numpy as np
import qkv

q = np.zeros((1, 2, 3, 4), np.float32)
mask: qkv.Mask = qkv.Mask.window(3, None) & qkv.Mask.lengths([2]) & np.ones((3, 3), bool)
out = qkv.attention(q, q, q, mask=mask, scale=1, return_lse=True, num_threads=2)
cost: int = qkv.plan(q, q, q, mask=mask)["flop"]
layer = qkv.GQA(4, 2, 8, 8, 2, 2, 8, dim_q=4)
names: list[str] = list(layer.state_dict())
small: qkv.GQA = qkv.convert.to_gqa(layer, 1)
qkv.set_isa("auto")
"""
WRONG = {
    "qkv.attention(1, 2)": "missing|Missing|Too few",
    "qkv.attention(1, 2, 3, causal=True)": "Unexpected keyword",
    "qkv.Mask.window(1.5, 0)": "incompatible type",
    "x: str = qkv.Mask.full().count_visible(2, 3)": "Incompatible types",
    "qkv.MHA(4, 8)": "Missing positional",
    "qkv.nothing": "no attribute",
}


def mypy(program, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_right_programs_pass(tmp_path):
    result = mypy(RIGHT, tmp_path)
    assert result.returncode == 0, result.stdout


def test_wrong_programs_do_not(tmp_path):
    result = mypy("import qkv\n" + "\n".join(WRONG), tmp_path)
    lines = result.stdout.splitlines()
    import re

    for number, text in enumerate(WRONG.values(), 2):
        assert any(f":{number}: error" in line and re.search(text, line) for line in lines), result.stdout


def test_stubs_are_true_to_the_package(tmp_path):
    allowed = tmp_path / "allowed.txt"
    # Not part of the surface, or known to nanobind alone.
    allowed.write_text("\n".join([r"qkv\._core\.(Layer|Mask)\..*", r"qkv\._core\..*", r"qkv\._(math|ops|torch_modules|files).*", r"qkv\.__main__.*"]))
    command = [sys.executable, "-m", "mypy.stubtest", "qkv", "--allowlist", str(allowed), "--ignore-unused-allowlist", "--ignore-missing-stub"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]

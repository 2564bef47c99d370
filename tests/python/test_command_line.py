# SPDX-License-Identifier: Apache-2.0
"""python -m qkv: the command line inside the package."""
import json
import subprocess
import sys


def run(*args):
    return subprocess.run([sys.executable, "-m", "qkv", *args], capture_output=True, text=True)


def test_bench_measures_and_prints_json():
    result = run("bench", "--filter", "attention/lesson-b10-h8-d16", "--seconds", "1", "--num-threads", "1", "--json")
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    assert [row["name"] for row in measured["rows"]] == ["attention/lesson-b10-h8-d16"]
    assert measured["rows"][0]["best"] > 0
    assert {roof["kind"] for roof in measured["roofs"]} == {"fma", "read"}


def test_bad_arguments_end_with_exit_code_2():
    result = run("bench", "--seconds", "nan")
    assert (result.returncode, result.stdout) == (2, "")
    assert "--seconds" in result.stderr

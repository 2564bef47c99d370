# SPDX-License-Identifier: Apache-2.0
"""What a call from Python costs above the C++ call inside it, on tiny arrays, in one run.

    QKV_NUM_THREADS=1 OMP_NUM_THREADS=1 python bench/tiny_calls.py

The C++ part of a call is told from the rest by running it 1001 times inside one call. Best of many turns,
microseconds. Must hold: less than 5 us above C++ for every row; the exit code is 1 if one is missed.
"""

import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("QKV_NUM_THREADS", "1")

import numpy as np  # noqa: E402

import qkv  # noqa: E402
from qkv import _core  # noqa: E402

LIMIT_US = 5.0
MANY = 1000


def best(call, calls, turns):
    """Seconds of one call."""
    found = float("inf")
    for _ in range(turns):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found = min(found, (time.perf_counter() - start) / calls)
    return found


def costs(call, turns=200):
    """(whole call, its C++ part) in microseconds."""
    call()
    whole = best(call, 50, turns)
    _core.set_repeats(1 + MANY)
    try:
        inside = (best(call, 1, max(turns // 10, 5)) - whole) / MANY
    finally:
        _core.set_repeats(1)
    return 1e6 * whole, 1e6 * inside


def cases():
    """{name: call}"""
    x, lesson = np.ones((1, 1, 1, 1), np.float32), np.ones((1, 8, 2, 16), np.float32)
    causal = qkv.Mask.causal_bottom_right()
    mask = np.ones((2, 2), bool)
    layer = qkv.MHA(1, 1, 1, 1, 1, 1)
    row = np.ones((1, 1, 1), np.float32)
    cache = qkv.KVCache(1, 1, 1, 1, 8)
    cache.append(x, x)
    found = {
        "attention, NumPy": lambda: qkv.attention(x, x, x),
        "attention, NumPy, causal, lse": lambda: qkv.attention(lesson, lesson, lesson, mask=causal, return_lse=True),
        "attention, NumPy, array mask": lambda: qkv.attention(lesson, lesson, lesson, mask=mask),
        "MHA, NumPy": lambda: layer(row, row, row),
        "KVCache.attend, NumPy": lambda: cache.attend(x),
    }
    try:
        import torch

        from qkv.torch import scaled_dot_product_attention as sdpa
    except ImportError:
        return found
    t, l, r = torch.from_numpy(x), torch.from_numpy(lesson), torch.from_numpy(row)
    visible = torch.from_numpy(mask)
    return found | {
        "attention, torch": lambda: qkv.attention(t, t, t),
        "attention, torch, causal, lse": lambda: qkv.attention(l, l, l, mask=causal, return_lse=True),
        "sdpa, torch": lambda: sdpa(t, t, t),
        "sdpa, torch, causal": lambda: sdpa(l, l, l, is_causal=True),
        "sdpa, torch, array mask": lambda: sdpa(l, l, l, visible),
        "MHA, torch": lambda: layer(r, r, r),
    }


def main():
    print(f"{'microseconds':32} {'Python':>8} {'C++':>8} {'above':>8}")
    missed = 0
    for name, call in cases().items():
        whole, inside = costs(call)
        missed += whole - inside >= LIMIT_US
        print(f"{name:32} {whole:8.2f} {inside:8.2f} {whole - inside:8.2f}{'' if whole - inside < LIMIT_US else '   too much'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

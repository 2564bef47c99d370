#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The hot loops as the compiler wrote them: tile rows x vectors FMAs per step, one broadcast per row, one
load per panel vector, and no vector register that goes to the stack and back.

    codegen_test.py OBJDUMP OBJECT...       the objects of src/kernels in a Release build
"""
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import objdump  # noqa: E402

# The tiles of tile-inl.h and linear_rows-inl.h: Highway target, rows, vectors of the tile, and of linear.
TILES = [("AVX3", 8, 2, 8, 2), ("AVX2", 4, 3, 6, 2)]
ON_TILES = ("QkRows<{}, {}, {}>", "PvColumns<{}, {}, {}>", "DpRows<{}, {}, false, {}>", "OuterRows<{}, {}, {}>")

HOT = [
    (target, name.format(element, vectors, rows), rows, vectors)
    for target, rows, vectors, _, _ in TILES
    for name in ON_TILES
    for element in ("float", "double")
] + [
    ("AVX3", "AddRows<float, float, 4, 4, false>", 4, 4)
] + [
    ("AVX3", f"{name}<{element}>", 4, 4) for name in ("PairScores", "PairDp") for element in ("float", "double")
] + [
    (target, name, rows, vectors)
    for target, _, _, rows, vectors in TILES
    for name in (f"LinearRows<{rows}, {vectors}>", "GradientRun")
]

VECTOR = re.compile(r"%[xyz]mm\d")
MEMORY = re.compile(r"\(")


def count(loop):
    """How often the loop does what costs: FMAs, broadcasts, panel loads, loads inside FMAs, the stack."""
    counts = {"fma": 0, "broadcast": 0, "load": 0, "folded": 0, "store": 0, "stack": 0}
    for i in loop:
        if not VECTOR.search(i.operands):
            continue
        is_memory = bool(MEMORY.search(i.operands))
        counts["fma"] += i.mnemonic.startswith("vfmadd")
        if "(%rsp" in i.operands:
            counts["stack"] += 1
        if not is_memory:
            continue
        if i.mnemonic.startswith(("vbroadcast", "vmovddup")) or "{1to" in i.operands:
            counts["broadcast"] += 1
        elif i.mnemonic.startswith("vfmadd"):
            counts["folded"] += 1
        elif i.operands.endswith(")"):
            counts["store"] += 1
        else:
            counts["load"] += 1
    return counts


def check(body, rows, vectors):
    """What is wrong with the hot loops of a function (a compiler may make several of one), or None."""
    hot = [c for c in map(count, objdump.loops(body)) if c["fma"] > 0]
    if not hot:
        return "no innermost loop with FMAs"
    for counts in hot:
        steps, rest = divmod(counts["fma"], rows * vectors)
        want = {"broadcast": rows * steps, "load": vectors * steps, "folded": 0, "store": 0, "stack": 0}
        if rest or steps < 1 or any(counts[key] != value for key, value in want.items()):
            return f"{counts}, expected {rows * vectors} FMAs per step and {want}"
    return None


def main(tool, paths):
    wanted = {f"qkv::kernels::N_{target}::{name}(": (rows, vectors) for target, name, rows, vectors in HOT}
    seen, failures = set(), []
    for path in paths:
        for name, body in objdump.functions(tool, path, "-C"):
            for key, (rows, vectors) in wanted.items():
                if key in name and ".cold" not in name:
                    seen.add(key)
                    problem = check(body, rows, vectors)
                    print(f"{'FAIL' if problem else 'ok  '} {key[:-1]} in {os.path.basename(path)}")
                    if problem:
                        failures.append(f"{key[:-1]}: {problem}")
    failures += [f"{key[:-1]}: not found; was it renamed?" for key in wanted if key not in seen]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The hot loops as the compiler wrote them: as many FMAs per broadcast and load as designed, and no vector
register that goes to the stack and back. On a tile rows x vectors FMAs per step, one broadcast per row, one load per
vector of the panel; in decode one load per vector of K, V and q, shared by all rows.

    codegen_test.py OBJDUMP OBJECT...       the objects of src/kernels in a Release build
"""
import os
import re
import sys
from typing import NamedTuple

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import objdump  # noqa: E402

# The tiles of tile-inl.h and linear_rows-inl.h: Highway target, rows, vectors of the tile, and of linear.
TILES = [("AVX3", 8, 2, 8, 2), ("AVX2", 4, 3, 6, 2)]
ON_TILES = (
    "QkRows<{}, {}, {}>",
    "PvColumns<{}, {}, {}>",
    "DpRows<{}, {}, false, {}>",
    "OuterRows<{}, {}, {}>",
)
# decode_rows-inl.h: accumulators of a tile (kSums), arithmetic type and type of K and V.
DECODE_SUMS = [("AVX3", 16), ("AVX2", 8)]
DECODE_TYPES = ["float, float", "float, qkv::bf16_t", "float, qkv::f16_t", "float, signed char", "double, double"]
ROWS_AT_ONCE, MOST_VECTORS = 4, 8  # query rows that share the loads of K and V; vectors of columns at most


class Loop(NamedTuple):
    """What one step of a hot loop may cost. anywhere: of all loops with FMAs; else of the shortest that loads as
    much (the others are tails)."""

    fma: int
    broadcast: int
    load: int
    may_fold: bool = False  # loads inside of FMAs count as loads
    anywhere: bool = True


def tile(rows, vectors):
    return Loop(rows * vectors, rows, vectors)


HOT = [
    (target, name.format(element, vectors, rows), tile(rows, vectors))
    for target, rows, vectors, _, _ in TILES
    for name in ON_TILES
    for element in ("float", "double")
]
HOT += [("AVX3", f"{name}<{element}>", tile(4, 4)) for name in ("PairScores", "PairDp") for element in ("float", "double")]
HOT += [
    (target, name, tile(rows, vectors))
    for target, _, _, rows, vectors in TILES
    for name in (f"LinearRows<{rows}, {vectors}>", f"LinearRowsAhead<{rows}>", "GradientRun")
]
for target, sums in DECODE_SUMS:
    for types in DECODE_TYPES:
        for rows in range(1, ROWS_AT_ONCE + 1):
            keys = 4 if sums // rows >= 4 else 2
            columns = min(-(-sums // rows), MOST_VECTORS)
            HOT += [
                (target, f"DotRows<{types}, {rows}>", Loop(rows * keys, 0, rows + keys, True, False)),
                (target, f"AddRows<{types}, {rows}, {columns}, false>", Loop(rows * columns, rows, columns, True)),
            ]

# What a compiler makes worse than designed: clang 14 spills one register where 8 converted values of V meet 8 sums.
KNOWN = {f"AVX2::AddRows<float, {kv}, 1, 8, false>" for kv in ("qkv::bf16_t", "qkv::f16_t", "signed char")}

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


def check(body, want):
    """What is wrong with the hot loops of a function (a compiler may make several of one), or None."""
    hot = [(len(loop), count(loop)) for loop in objdump.loops(body)]
    hot = [(length, counts) for length, counts in hot if counts["fma"] > 0]
    if not want.anywhere:
        hot = [(length, c) for length, c in hot if c["load"] + c["folded"] >= want.load]
        hot = sorted(hot, key=lambda loop: loop[0])[:1]
    if not hot:
        return "no innermost loop with FMAs"
    for _, counts in hot:
        steps, rest = divmod(counts["fma"], want.fma)
        loads = counts["load"] + counts["folded"]
        if (
            rest
            or steps < 1
            or counts["broadcast"] != want.broadcast * steps
            or loads > want.load * steps
            or (counts["folded"] and not want.may_fold)
            or counts["store"]
            or counts["stack"]
        ):
            return f"{counts}, expected {want} per step, no stores, no stack"
    return None


def main(tool, paths):
    wanted = {f"qkv::kernels::N_{target}::{name}(": want for target, name, want in HOT}
    seen, failures = set(), []
    for path in paths:
        for name, body in objdump.functions(tool, path, "-C"):
            for key, want in wanted.items():
                if key in name and ".cold" not in name:
                    seen.add(key)
                    problem = check(body, want)
                    known = key[len("qkv::kernels::N_") : -1] in KNOWN
                    print(f"{('known' if known else 'FAIL ') if problem else 'ok   '} {key[:-1]} in {os.path.basename(path)}")
                    if problem and not known:
                        failures.append(f"{key[:-1]}: {problem}")
    failures += [f"{key[:-1]}: not found; was it renamed?" for key in wanted if key not in seen]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

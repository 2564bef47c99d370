#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What is compiled for a newer instruction set stays in its own namespace.

The linker keeps one copy of each inline function. If a copy that contains AVX2 has the name of one that
other code uses, a machine without AVX2 dies far from the kernels. So in the objects of src/kernels:
  - weak symbols belong to a target's namespace (N_AVX2, ...), or to the libraries;
  - everything outside those namespaces holds instructions of the baseline only.
Optimised code inlines such functions away, so the check is made on objects compiled without optimisation,
as a debug build has them.

    isa_symbols_test.py OBJDUMP NM compile_commands.json
"""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "support"))
import objdump  # noqa: E402

TARGET = re.compile(r"\d(N_[A-Z0-9_]+)")  # in a mangled name
# Not in the x86-64 baseline (SSE2; tzcnt runs as bsf there): VEX and EVEX forms, and SSE3 to SSE4.2, BMI, AES.
NEWER = re.compile(
    r"^(v[a-z]|andn|bextr|bls|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|popcnt|crc32|k(and|or|x|not"
    r"|mov|shift|test|unpck)|movddup|movs[hl]dup|addsub|hadd|hsub|lddqu|pabs|palignr|phadd|phsub|pmadd(ubsw)"
    r"|pmulhrsw|pshufb|psign|blend|dpp|extractps|insertps|pextr[bdq]|pinsr[bdq]|pblend|pmov[sz]x|pmuldq"
    r"|pmulld|pm(ax|in)(sb|sd|uw|ud)|packusdw|pcmpeqq|pcmpgtq|pcmp[ei]str|ptest|round[ps][sd]|mpsadbw|aes"
    r"|pclmul|movntdqa)"
)
# The libraries, the compiler, and qkv/dtype.h, which is included before any target begins.
ALLOWED = re.compile(
    r"_Z[A-Z]*(St|NSt|NKSt|N3hwy|NK3hwy)|_ZN3qkv4infoENS_5DTypeE$|__clang_call_terminate$|DW.ref."
)


def compile_unoptimised(entry, folder):
    """Object of one source, by the build's own command without -O."""
    words = shlex.split(entry["command"]) if "command" in entry else list(entry["arguments"])
    keep, skip = [], False
    for word in words:
        if skip or word == "-o":
            skip = not skip
        elif not re.match(r"-O|-g|-flto", word) and word != "-DNDEBUG":
            keep.append(word)
    path = os.path.join(folder, os.path.basename(entry["file"]) + ".o")
    cache = ["ccache"] if shutil.which("ccache") and "ccache" not in keep[0] else []
    subprocess.run(cache + keep + ["-O0", "-w", "-o", path], cwd=entry["directory"], check=True)
    return path


def symbols(nm, path):
    """(type, mangled name) of what the object defines."""
    output = subprocess.run([nm, "--defined-only", path], capture_output=True, text=True, check=True)
    for line in output.stdout.splitlines():
        words = line.split()
        if len(words) == 3:
            yield words[1], words[2]


def problems_of(tools, path):
    dump, nm = tools
    outside = [(kind, name) for kind, name in symbols(nm, path) if not TARGET.search(name)]
    for kind, name in outside:
        if kind in "WV" and not ALLOWED.match(name):
            yield f"weak symbol outside the target namespaces: {name}"
    # Each inline function has a section of its own; to disassemble all of them takes minutes.
    functions = {name for kind, name in outside if kind in "TtWw"}
    sections = [".text", ".text.startup"] + [f".text.{name}" for name in sorted(functions)]
    for name, body in objdump.functions(dump, path, *(f"-j{section}" for section in sections)):
        newer = sorted({i.mnemonic for i in body if NEWER.match(i.mnemonic)})
        if name in functions and newer:
            yield f"{name} is outside the target namespaces and uses {', '.join(newer[:5])}"


def main(dump, nm, commands):
    entries = [e for e in json.load(open(commands)) if "/src/kernels/" in e["file"]]
    entries = [e for e in entries if "foreach_target.h" in open(e["file"]).read()]
    if not entries:
        print("no kernel is compiled for more than one target", file=sys.stderr)
        return 1
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for entry in entries:
            problems = list(problems_of((dump, nm), compile_unoptimised(entry, folder)))
            print(f"{os.path.basename(entry['file'])}: {len(problems)} problems")
            for problem in problems:
                print(f"  {problem}", file=sys.stderr)
            failed |= bool(problems)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

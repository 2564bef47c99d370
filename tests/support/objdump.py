# SPDX-License-Identifier: Apache-2.0
"""Functions of an object file as lists of instructions, read from objdump (x86-64, AT&T syntax)."""
import re
import subprocess
from typing import NamedTuple

HEADER = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S.*)$")
PREFIXES = ("rep", "repz", "repnz", "lock", "bnd", "notrack", "data16", "cs", "ds", "es", "{vex}", "{evex}")


class Instruction(NamedTuple):
    address: int
    mnemonic: str
    operands: str


def parse(lines):
    """(function, [Instruction]) for each function of a disassembly."""
    name, body = None, []
    for line in lines:
        header = HEADER.match(line)
        if header:
            if name is not None:
                yield name, body
            name, body = header.group(1), []
            continue
        match = INSTRUCTION.match(line)
        if match and name is not None:
            words = match.group(2).split()
            while len(words) > 1 and words[0] in PREFIXES:
                words.pop(0)
            body.append(Instruction(int(match.group(1), 16), words[0], " ".join(words[1:])))
    if name is not None:
        yield name, body


def functions(objdump, path, *options):
    """The same for an object file."""
    command = [objdump, "-d", "--no-show-raw-insn", *options, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield from parse(process.stdout)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed")


def loops(body):
    """Innermost loops: lists of instructions from the target of a backward jump to the jump."""
    spans = []
    for jump in body:
        target = re.match(r"([0-9a-f]+) <", jump.operands)
        if jump.mnemonic.startswith("j") and target:
            begin = int(target.group(1), 16)
            if body[0].address <= begin <= jump.address:
                spans.append((begin, jump.address))
    for begin, end in spans:
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in spans):
            yield [i for i in body if begin <= i.address <= end]

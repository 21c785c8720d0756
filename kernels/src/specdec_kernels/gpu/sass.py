"""What a compiled kernel does, by Hopper's machine code: what is in its main loop, and whether it writes
registers that a product in flight still reads.

``wgmma`` goes on behind its instruction: registers that it takes its first operand from must be left alone
until it is waited for. Triton 3.6 carries a product over into the loop's next turn, which writes them; no run
shows it but one whose timing is bad.
"""

from __future__ import annotations

import re
from collections import Counter

_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(.*?)\s*;")
_PRODUCT = re.compile(r"[HQI]GMMA\S*\s+R\d+, R(\d+), gdesc")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_BRANCH = re.compile(r"BRA\S*\s+(?:!?U?P\w+, )?`?\(?(0x[0-9a-f]+)")
_WRITTEN = re.compile(r"\S+\s+(?:!?P\w+, )?R(\d+)\b")
#: ``wgmma`` of bfloat16, of float8 and of int8.
_PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")
#: They have a register first that they read.
_WRITE_NONE = ("ST", "LDGSTS", "RED", "BAR", "BRA", *_PRODUCTS)
#: Registers of a thread that hold 64 x 16 weights of two bytes, or 64 x 32 of one.
_OPERAND = 4

#: Instructions by what they keep busy, in the order in which they are looked for.
_CLASSES = {
    "tensor": r"[HQI]GMMA|HMMA|QMMA|IMMA",
    "wait": r"WARPGROUP|WARPSYNC|DEPBAR|LDGDEPBAR|BAR|SYNCS|FENCE|MEMBAR|NANOSLEEP",
    "load": r"LDGSTS|LDG|UTMA|UBLK|LD\.",
    "shared": r"LDS|STS",
    "convert": r"F2F|F2I|I2F|I2I|F2FP",
    "float": r"FFMA|FADD|FMUL|FSEL|HFMA2|HADD2|HMUL2|MUFU",
    "uniform": r"U[A-Z]|R2UR|S2UR",
    "shift": r"SHF|IMAD\.SHL|PRMT",
    "logic": r"LOP3|PLOP3",
}

#: Products that are not waited for: the groups that are complete, then the one that is not, by registers.
_Groups = tuple[frozenset[int], ...]


def main_loop(text: str) -> dict[str, int]:
    """Instructions by class in a turn of the longest loop that multiplies on tensor cores; {} without one."""
    code = _code(text)
    at = {address: index for index, (address, _) in enumerate(code)}
    longest: list[str] = []
    for index, (_, instruction) in enumerate(code):
        if (branch := _BRANCH.match(instruction)) and (first := at.get(int(branch[1], 16), index)) < index:
            turn = [name for _, name in code[first : index + 1]]
            if len(turn) > len(longest) and any(map(re.compile(_CLASSES["tensor"]).match, turn)):
                longest = turn
    return dict(Counter(map(_class, longest)))


def _class(instruction: str) -> str:
    return next((name for name, of in _CLASSES.items() if re.match(of, instruction)), "other")


def _code(text: str) -> list[tuple[int, str]]:
    """Addresses and instructions of a disassembly."""
    return [(int(m[1], 16), m[2]) for m in map(_INSTRUCTION.match, text.splitlines()) if m]


def overwritten(text: str) -> list[str]:
    """Instructions in a disassembly that write what a product not yet waited for may still read."""
    code = _code(text)
    at = {address: index for index, (address, _) in enumerate(code)}
    found: set[int] = set()
    seen: set[tuple[int, _Groups]] = set()
    paths: list[tuple[int, _Groups]] = [(0, (frozenset(),))]
    while paths:
        index, groups = paths.pop()
        while index < len(code) and (index, groups) not in seen:
            seen.add((index, groups))
            instruction = code[index][1]
            groups = _behind(instruction, groups)
            if _written(instruction) & frozenset().union(*groups):
                found.add(index)
            if (branch := _BRANCH.match(instruction)) and int(branch[1], 16) in at:
                paths.append((at[int(branch[1], 16)], groups))
            index += 1
    return [code[index][1] for index in sorted(found)]


def _behind(instruction: str, groups: _Groups) -> _Groups:
    if wait := _WAIT.match(instruction):
        kept = int(wait[1], 16)
        return (*groups[max(0, len(groups) - 1 - kept) : -1], groups[-1])
    if product := _PRODUCT.match(instruction):
        first = int(product[1])
        groups = (*groups[:-1], groups[-1] | set(range(first, first + _OPERAND)))
    if instruction.startswith(_PRODUCTS) and "gsb0" in instruction:
        groups = (*groups, frozenset())
    return groups[-8:]


def _written(instruction: str) -> frozenset[int]:
    register = _WRITTEN.match(instruction)
    if register is None or instruction.startswith(_WRITE_NONE):
        return frozenset()
    name, first = instruction.split()[0], int(register[1])
    wide = 4 if re.search(r"\.128|M88\.4", name) else 2 if re.search(r"\.64|\.WIDE|M88\.2", name) else 1
    return frozenset(range(first, first + wide))

"""Finds the memory accesses of a compiled kernel that move plane bytes, and their width, in the LLVM IR of Triton.

Triton makes LLVM IR for every family of targets. In LLVM IR a value is written once, so its origin does not depend on
the place where it is used. An address derives from

    an argument         pointer plus anything          Origin("state_ptr", loaded=False)
    a value loaded      an entry of an address table   Origin("tiles_ptr", loaded=True)

The origin of a value that passes through shared or private memory is lost. An access without a known origin is
reported, too, and counts as an access of plane bytes. For NVIDIA most accesses are inline assembly, which is the final
text.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

WIDE_BITS = 128  # 16 bytes, the widest access that every target has
NAME = r"%[\w.$-]+"
# a pointer to global memory, or to any memory
POINTER = re.compile(rf"\bptr(?: addrspace\([178]\))?(?: [a-z]+)* ({NAME})")
ELSEWHERE = re.compile(r"(?:= load|ldmatrix|asm).*ptr addrspace\([2-6]\)")  # a read from shared or private memory
TYPE = r"(?:<(?P<lanes>\d+) x )?(?P<type>i\d+|half|bfloat|float|double|ptr)\b>?"
SIZES = {"half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}
BUFFER = r"@llvm\.amdgcn\.(?:raw|struct)\.ptr\.buffer\."
MOVES = [
    re.compile(f"{before}{TYPE}{behind}")
    for before, behind in (
        (r"= (?P<load>load) (?:atomic |volatile )*", ""), (r"^store (?:atomic |volatile )*", ""),
        (r"= (?:atomicrmw|cmpxchg) .*, ", ""), ("call ", f" {BUFFER}(?P<load>load|atomic)(?!.*lds)"),
        (BUFFER + r"store[\w.]*\(", ""),
    )
]  # fmt: skip
ASSEMBLY = re.compile(r'asm (?:sideeffect )?"(.*?)"')
STATEMENT = re.compile(r"\b(?P<op>ld|st|atom|red|cp\.async)\.(?P<how>[\w.:]+)(?P<operands>.*)")
HARMLESS = re.compile(r"@llvm\.(?:amdgcn\.make\.buffer\.rsrc|amdgcn\.readfirstlane|assume|prefetch|lifetime)")


class Origin(NamedTuple):
    """The origin of a value: a kernel argument, or a value loaded through it."""

    argument: str
    loaded: bool = False


Origins = frozenset[Origin]
NOTHING: Origins = frozenset()


class Access(NamedTuple):
    """One load, store or atomic of global memory: the bits that one lane moves, and the origins of the address."""

    bits: int
    origins: Origins


def accesses(text: str, arguments: Sequence[str]) -> list[Access]:
    """Returns every access of global memory.

    Args:
        text: LLVM IR of one kernel.
        arguments: Names of the kernel's parameters, in order.

    Raises:
        ValueError: A line may move bytes, but their number is unknown.
    """
    head = re.search(r"^define .*$", text, re.MULTILINE)
    if head is None:
        raise ValueError("LLVM IR: no kernel in the text")
    parameters = re.findall(rf"({NAME})[,)]", head[0])
    known = {name: frozenset({Origin(argument)}) for name, argument in zip(parameters, arguments, strict=False)}
    moves: list[tuple[int, list[str]]] = []
    made: list[tuple[str, list[str], bool]] = []  # (value, values that it is made of, whether it is loaded)
    for line in text[head.end() : text.index("\n}", head.end())].splitlines():
        line = line.partition(", !")[0].strip()
        name, equals, right = line.partition(" = ")
        bits, address = _bits(line), POINTER.findall(line)
        if bits:
            moves.append((bits, address))
        if equals:
            made.append((name, address, True) if bits else (name, _reads(line, right), False))
    _follow(made, known)
    return [Access(bits, _union(known, address)) for bits, address in moves]


def _bits(line: str) -> int:
    """Returns the bits that one lane moves to or from global memory; 0 for a line that moves none."""
    if not POINTER.search(line):
        return 0
    if assembly := ASSEMBLY.search(line):
        statements = re.sub(r"\\[0-9A-F]{2}", " ", assembly[1]).split(";")  # line ends are escaped, as \0A
        return max(map(_statement_bits, statements), default=0)
    for move in MOVES:
        if match := move.search(line):
            return int(match["lanes"] or 1) * (SIZES.get(match["type"]) or int(match["type"][1:]))
    if "call " in line and not HARMLESS.search(line):
        raise ValueError(f"LLVM IR: cannot tell what `{line}` moves")
    return 0


def _statement_bits(statement: str) -> int:
    """Returns the bits that a PTX statement moves: `ld.global.v4.b32` 128, `cp.async` its third operand in bytes."""
    match = STATEMENT.search(statement)
    if match is None or re.search(r"\b(?:mbarrier|shared|local)\b", match["how"].replace("shared.global", "")):
        return 0
    size = re.search(r"\]\s*,\s*(0x[0-9a-fA-F]+|\d+)", match["operands"].rpartition("[")[2])
    kinds = re.findall(r"(?:b|u|s|f|bf)(8|16|32|64|128)(x2)?\b", match["how"])
    if match["op"] == "cp.async" and size and "bulk" not in match["how"]:
        return 8 * int(size[1], 0)
    if match["op"] == "cp.async" or not kinds:
        raise ValueError(f"PTX: cannot tell what `{statement.strip()}` moves")
    vector = re.search(r"\bv(\d)\b", match["how"])
    width, twice = kinds[-1]
    return int(width) * (2 if twice else 1) * (int(vector[1]) if vector else 1)


def _reads(line: str, right: str) -> list[str]:
    """Returns the values from which the value of a line is made. Predicates are left out: they only select."""
    if right.startswith(("icmp", "fcmp")) or ELSEWHERE.search(line):
        return []
    if right.startswith("phi"):
        return re.findall(rf"\[ ({NAME}),", right)
    return re.findall(NAME, right.partition(", ")[2] if right.startswith("select") else right)


def _follow(made: Sequence[tuple[str, list[str], bool]], known: dict[str, Origins]) -> None:
    """Adds the origins of all values to `known`. Repeats until nothing is new: a loop may use a later value."""
    news = True
    while news:
        news = False
        for name, reads, loads in made:
            origins = _union(known, reads)
            if loads:
                origins = frozenset(Origin(origin.argument, True) for origin in origins)
            if origins != known.get(name, NOTHING):
                known[name], news = origins, True


def _union(known: Mapping[str, Origins], names: Iterable[str]) -> Origins:
    return NOTHING.union(*(known.get(name, NOTHING) for name in names))


def plane_accesses(all_accesses: Sequence[Access], plane_args: Iterable[str], pointers: Iterable[str]) -> list[Access]:
    """Returns the accesses that move plane bytes.

    An argument through which addresses are loaded is a table. Accesses through these addresses count, but reads of the
    table do not. An access also counts if its address derives from no argument in `pointers`: it may move plane bytes.
    """
    direct = {Origin(argument) for argument in pointers}
    planes: set[Origin] = set()
    for argument in plane_args:
        table = Origin(argument, True)
        planes.add(table if any(table in access.origins for access in all_accesses) else Origin(argument))
    return [access for access in all_accesses if access.origins & planes or not access.origins & direct]

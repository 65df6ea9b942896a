"""What a warp issues to compute one token: the instructions of a compiled kernel, in order. Reads NVIDIA's binaries.

The text of a program holds more than one token takes: padding, and copies of a loop that the assembler unrolled. Taken
is the shortest way from the entry to the exit that passes the longest block, which is the arithmetic of a token. Of a
step with a tail, which has a loop over kept tokens and one over its own, it is the shortest way round each.
"""

import heapq
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from memstate_tools.compile.assembly import of_binary

LABEL = re.compile(r"(\.L_\w+):")
INSTRUCTION = re.compile(
    r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(?P<mask>!?U?P\w+)\s+)?(?P<op>[A-Z][A-Z0-9_.]*)(?P<operands>[^;]*);"
)
REGISTER = re.compile(r"\bR(\d+)(\.64)?")
TARGET = re.compile(r"\((\.L_\w+)\)")
WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}  # bytes of one lane; 4 without


class Instruction(NamedTuple):
    """One instruction of the assembly: the predicate that it depends on or "", its name, its operands."""

    mask: str
    op: str
    operands: str


Blocks = dict[str, list[Instruction]]  # label -> its instructions, in the order of the text


def disassemble(cubin: bytes) -> str:
    """Returns the assembly of a binary, with labels."""
    # Dataflow names targets of jumps by a branch stack, which these targets do not have, and takes a quarter longer
    return of_binary("nvdisasm", cubin, "-c", "--no-dataflow")


def of_a_token(assembly: str) -> list[Instruction]:
    """Returns the instructions on the shortest way through a program that passes its longest block.

    Raises:
        ValueError: There is no such way.
    """
    blocks = _blocks(assembly)
    after = _successors(blocks)
    longest = max(blocks, key=lambda name: len(blocks[name]))
    way = [*_shortest(blocks, after, next(iter(blocks)), longest), *_shortest(blocks, after, longest, "")]
    return list(chain.from_iterable(blocks[name] for name in way))


def of_two_loops(assembly: str) -> tuple[list[Instruction], list[Instruction]]:
    """Returns the instructions on the shortest way round each of the two loops with the longest blocks, first to last.

    Raises:
        ValueError: There are no two loops.
    """
    blocks = _blocks(assembly)
    after = _successors(blocks)
    ahead = {name: _reached(after, name) for name in blocks}
    loops: list[str] = []  # the longest block of each
    for name in sorted(blocks, key=lambda name: -len(blocks[name])):
        if name in ahead[name] and not any(name in ahead[other] and other in ahead[name] for other in loops):
            loops.append(name)
    if len(loops) < 2:
        raise ValueError(f"expected a program with two loops, got {len(loops)}")
    first, last = loops[:2] if loops[1] in ahead[loops[0]] else loops[1::-1]
    return _round(blocks, after, first), _round(blocks, after, last)


def bytes_in_flight(instructions: Sequence[Instruction]) -> int:
    """Returns the most bytes that a warp's 32 lanes wait for at a time.

    A load is under way until an instruction reads one of its registers. Loads arrive in order.
    """
    pending: dict[int, tuple[int, int]] = {}  # register -> number and bytes of the load that fills it
    most = loads = 0
    for found in instructions:
        operands = found.operands
        loaded = found.op.startswith("LDG")
        first, _, rest = operands.partition(",")
        read = _registers(rest if loaded or not found.op.startswith(("ST", "RED")) else operands)
        arrived = max((pending[register][0] for register in read if register in pending), default=0)
        pending = {register: load for register, load in pending.items() if load[0] > arrived}
        if loaded and (target := REGISTER.search(first)):
            loads += 1
            width = next((WIDTHS[part] for part in WIDTHS if part in found.op), 4)
            for register in range(int(target[1]), int(target[1]) + max(1, width // 4)):
                pending[register] = (loads, width)
        most = max(most, 32 * sum(dict(pending.values()).values()))
    return most


def _registers(operands: str) -> set[int]:
    """Returns the numbers of the registers in operands; of a pair both."""
    found = REGISTER.findall(operands)
    return {int(number) for number, _ in found} | {int(number) + 1 for number, pair in found if pair}


def _blocks(assembly: str) -> Blocks:
    """Returns the blocks of a program; each ends where it may branch, or before a label."""
    blocks: Blocks = {"entry": []}
    name = "entry"
    for line in assembly.splitlines():
        if label := LABEL.match(line):
            name = label[1]
            blocks[name] = []
        elif (found := INSTRUCTION.match(line)) and found["op"] != "NOP":
            blocks[name].append(Instruction(found["mask"] or "", found["op"], found["operands"]))
            if found["op"].startswith(("BRA", "CALL", "EXIT", "RET")):
                name = f"after {len(blocks)}"
                blocks[name] = []
    return blocks


def _successors(blocks: Mapping[str, Sequence[Instruction]]) -> dict[str, list[str]]:
    """Returns the blocks that each block may be followed by; "" is the end.

    A call is a jump that may also not be taken: the assembler leaves loops by calls that do not return, and where one
    does, the way that passes it by is the shorter one.
    """
    names, after = list(blocks), {}
    for at, name in enumerate(names):
        following = names[at + 1 : at + 2]
        last = blocks[name][-1] if blocks[name] else Instruction("", "", "")
        if last.op.startswith(("BRA", "CALL")):
            target = TARGET.search(last.operands)
            sure = last.op.startswith("BRA") and not last.mask and not re.search(r"\bU?P\d", last.operands)
            after[name] = [*([target[1]] if target else []), *([] if sure else following)]
        elif last.op.startswith("EXIT"):
            after[name] = ["", *(following if last.mask else [])]
        elif last.op.startswith("RET"):
            after[name] = []
        else:
            after[name] = following
    return after


def _reached(after: Mapping[str, Sequence[str]], start: str) -> set[str]:
    """Returns the blocks that a program can come to behind a block."""
    found: set[str] = set()
    left = [start]
    while left:
        new = {name for name in after[left.pop()] if name} - found
        found |= new
        left += new
    return found


def _round(
    blocks: Mapping[str, Sequence[Instruction]], after: Mapping[str, Sequence[str]], name: str
) -> list[Instruction]:
    """Returns the instructions from a block on until it comes again, where they are fewest."""
    ahead = (following for following in after[name] if following == name or name in _reached(after, following))
    ways = ([name, *_shortest(blocks, after, following, name)] for following in ahead)
    return min(([part for block in way for part in blocks[block]] for way in ways), key=len)


def _shortest(
    blocks: Mapping[str, Sequence[Instruction]], after: Mapping[str, Sequence[str]], start: str, end: str
) -> list[str]:
    """Returns the blocks from `start` up to but not with `end` that have fewest instructions."""
    heap: list[tuple[int, str, list[str]]] = [(0, start, [])]
    seen: set[str] = set()
    while heap:
        cost, name, way = heapq.heappop(heap)
        if name == end:
            return way
        if name and name not in seen:
            seen.add(name)
            for successor in after[name]:
                heapq.heappush(heap, (cost + len(blocks[name]), successor, [*way, name]))
    raise ValueError(f"the program has no way from {start} to {end or 'its end'}")

"""Lists the instructions that a warp issues to compute one token, from the binary of a kernel for NVIDIA.

A program has more instructions than one token needs: padding, and copies of a loop that the assembler unrolled. So the
module takes the shortest path from the entry to the exit through the longest block, which is the arithmetic of a token.
A step with a tail has two loops, over kept tokens and over its own tokens: of each loop, the module takes the shortest
round.
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
# suffix -> bytes of one lane; 4 without a suffix
WIDTHS = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}


class Instruction(NamedTuple):
    """One instruction of the assembly: the predicate that it depends on (or ""), its name and its operands."""

    mask: str
    op: str
    operands: str


Blocks = dict[str, list[Instruction]]  # label -> instructions of the block, in the order of the text


def disassemble(cubin: bytes) -> str:
    """Returns the assembly of a binary, with labels."""
    # --dataflow names jump targets by a branch stack, which these GPUs lack, and takes a quarter longer
    return of_binary("nvdisasm", cubin, "-c", "--no-dataflow")


def of_a_token(assembly: str) -> list[Instruction]:
    """Returns the instructions on the shortest of all paths through a program that pass its longest block.

    Raises:
        ValueError: There is no such path.
    """
    blocks = _blocks(assembly)
    after = _successors(blocks)
    longest = max(blocks, key=lambda name: len(blocks[name]))
    way = [*_shortest(blocks, after, next(iter(blocks)), longest), *_shortest(blocks, after, longest, "")]
    return list(chain.from_iterable(blocks[name] for name in way))


def of_two_loops(assembly: str) -> tuple[list[Instruction], list[Instruction]]:
    """Returns the instructions on the shortest path around each of the two loops with the longest blocks.

    Returns:
        The instructions of the first and of the last loop.

    Raises:
        ValueError: There are no two loops.
    """
    blocks = _blocks(assembly)
    after = _successors(blocks)
    ahead = {name: _reached(after, name) for name in blocks}
    loops: list[str] = []  # the longest block of each loop
    for name in sorted(blocks, key=lambda name: -len(blocks[name])):
        if name in ahead[name] and not any(name in ahead[other] and other in ahead[name] for other in loops):
            loops.append(name)
    if len(loops) < 2:
        raise ValueError(f"expected a program with two loops, got {len(loops)}")
    first, last = loops[:2] if loops[1] in ahead[loops[0]] else loops[1::-1]
    return _round(blocks, after, first), _round(blocks, after, last)


def bytes_in_flight(instructions: Sequence[Instruction]) -> int:
    """Returns the most bytes that the 32 lanes of a warp wait for at a time.

    A load is under way until an instruction reads one of its registers. Loads arrive in order.
    """
    pending: dict[int, tuple[int, int]] = {}  # register -> (number, bytes) of the load that fills it
    most = loads = 0
    for instruction in instructions:
        operands = instruction.operands
        loaded = instruction.op.startswith("LDG")
        first, _, rest = operands.partition(",")
        read = _registers(rest if loaded or not instruction.op.startswith(("ST", "RED")) else operands)
        arrived = max((pending[register][0] for register in read if register in pending), default=0)
        pending = {register: load for register, load in pending.items() if load[0] > arrived}
        if loaded and (target := REGISTER.search(first)):
            loads += 1
            width = next((WIDTHS[part] for part in WIDTHS if part in instruction.op), 4)
            for register in range(int(target[1]), int(target[1]) + max(1, width // 4)):
                pending[register] = (loads, width)
        most = max(most, 32 * sum(dict(pending.values()).values()))
    return most


def _registers(operands: str) -> set[int]:
    """Returns the numbers of the registers in operands: two for a register pair."""
    registers = REGISTER.findall(operands)
    return {int(number) for number, _ in registers} | {int(number) + 1 for number, pair in registers if pair}


def _blocks(assembly: str) -> Blocks:
    """Returns the blocks of a program. A block ends after a branch or before a label."""
    blocks: Blocks = {"entry": []}
    name = "entry"
    for line in assembly.splitlines():
        if label := LABEL.match(line):
            name = label[1]
            blocks[name] = []
        elif (match := INSTRUCTION.match(line)) and match["op"] != "NOP":
            blocks[name].append(Instruction(match["mask"] or "", match["op"], match["operands"]))
            if match["op"].startswith(("BRA", "CALL", "EXIT", "RET")):
                name = f"after {len(blocks)}"
                blocks[name] = []
    return blocks


def _successors(blocks: Mapping[str, Sequence[Instruction]]) -> dict[str, list[str]]:
    """Returns the possible successors of each block; "" is the end.

    A call counts as a jump that may not be taken. The assembler leaves loops by calls that do not return. If a call
    does return, the path without it is shorter anyway.
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
    """Returns the blocks that a program can reach after a block."""
    reached: set[str] = set()
    left = [start]
    while left:
        new = {name for name in after[left.pop()] if name} - reached
        reached |= new
        left += new
    return reached


def _round(
    blocks: Mapping[str, Sequence[Instruction]], after: Mapping[str, Sequence[str]], name: str
) -> list[Instruction]:
    """Returns the instructions on the shortest path from a block back to it."""
    ahead = (following for following in after[name] if following == name or name in _reached(after, following))
    ways = ([name, *_shortest(blocks, after, following, name)] for following in ahead)
    return min(([part for block in way for part in blocks[block]] for way in ways), key=len)


def _shortest(
    blocks: Mapping[str, Sequence[Instruction]], after: Mapping[str, Sequence[str]], start: str, end: str
) -> list[str]:
    """Returns the blocks on the path with fewest instructions from `start` to `end`, without `end`."""
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

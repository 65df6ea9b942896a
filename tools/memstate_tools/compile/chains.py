"""Counts the loads of global memory that wait for each other in a compiled kernel, in the PTX of Triton.

A small kernel takes as long as its longest chain of such loads. A load waits for its address, its mask and the branches
before it. If a load waits for an atomic, the atomic counts as a load, because it takes as long.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

INSTRUCTION = re.compile(r"\s*(?:@!?(?P<mask>%\w+)\s+)?(?P<op>[a-z][\w.:]*)\s+(?P<operands>.*?);")
LABEL = re.compile(r"\s*(\$\w+):")
REGISTER = re.compile(r"%\w+")
NO_RESULT = ("st.", "red.", "bra", "bar", "ret", "membar", "fence")

Blocks = dict[str, list[re.Match[str]]]  # label -> instructions of the block


def dependent_loads(ptx: str) -> int:
    """Counts the loads of global memory in the longest chain in which each waits for the previous one.

    Blocks are followed once, from the entry on, so one pass of a loop counts. A value read from shared memory counts
    the longest chain of any value that was stored there.

    Args:
        ptx: Assembly of one kernel for NVIDIA.
    """
    blocks = _blocks(ptx)
    after = _successors(blocks)
    late: dict[str, int] = {}  # register -> number of loads in the longest chain before the register has its value
    branches: dict[str, int] = {}  # block -> number of loads in the longest chain before a branch to it
    shared = longest = 0
    for name in _order(next(iter(blocks)), after):
        branched = branches.get(name, 0)
        for instruction in blocks[name]:
            op, written, read = instruction["op"], *_operands(instruction)
            before = max((late.get(register, 0) for register in read), default=0)
            if op.startswith("bra"):
                branched = max(branched, before)
            elif op.startswith("st.shared"):
                shared = max(shared, before)
            elif op.startswith(("ld.shared", "ldmatrix")):
                before = max(before, shared)
            elif op.startswith(("ld.global", "atom.global")):
                before = max(before, branched) + 1
                longest = max(longest, before if op.startswith("ld") else 0)
            for register in written:
                late[register] = max(before, late.get(register, 0))
        for successor in after[name]:
            branches[successor] = max(branched, branches.get(successor, 0))
    return longest


def _blocks(ptx: str) -> Blocks:
    """Returns the instructions of a kernel, block by block."""
    blocks: Blocks = {"": []}
    current = blocks[""]
    for line in ptx.splitlines():
        if label := LABEL.match(line):
            current = blocks.setdefault(label[1], [])
        elif instruction := INSTRUCTION.match(line):
            current.append(instruction)
    return blocks


def _successors(blocks: Blocks) -> dict[str, list[str]]:
    """Returns the possible successors of each block."""
    names = [*blocks, ""]
    after: dict[str, list[str]] = {}
    for name, following in pairwise(names):
        jumps = [jump["operands"].strip() for jump in blocks[name] if jump["op"].startswith("bra")]
        after[name] = [target for target in jumps if target in blocks]
        last = blocks[name][-1] if blocks[name] else None
        if following and (last is None or last["mask"] or not last["op"].startswith(("bra", "ret", "exit"))):
            after[name].append(following)
    return after


def _order(entry: str, after: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the blocks in an order in which each block comes after its predecessors, except in loops."""
    order, seen = [], {entry}
    path: list[tuple[str, Iterator[str]]] = [(entry, iter(after[entry]))]
    while path:
        name, rest = path[-1]
        if (successor := next(rest, None)) is None:
            order.append(name)
            path.pop()
        elif successor not in seen:
            seen.add(successor)
            path.append((successor, iter(after[successor])))
    return order[::-1]


def _operands(instruction: re.Match[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the registers that an instruction writes and those that it reads.

    An instruction writes its first operand: one register, several in braces, or two predicates with a bar between them.
    """
    operands, mask = instruction["operands"], [instruction["mask"]] if instruction["mask"] else []
    registers = REGISTER.findall(operands)
    if instruction["op"].startswith(NO_RESULT):
        return [], [*registers, *mask]
    first = operands[: operands.index("}")] if operands.startswith("{") else operands.partition(",")[0]
    count = len(REGISTER.findall(first))
    return registers[:count], [*registers[count:], *mask]

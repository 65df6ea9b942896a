"""Reads the mutants that were written by hand, one for each rule. Their names are unique.

A block of mutants/*.txt is one mutant. An empty line ends a block. A block that starts with `#` is a comment:

    name | file [| order]
    -old text, which stands exactly once in the file
    +new text in its place; without such a line, the old lines are deleted
    tests/folder/test_file.py::test_that_must_fail

An order of warps, as in MEMSTATE_COMPILED, says that only compiled kernels show the fault: the test must fail with
them, and pass in the interpreter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of one text in one file.

    killer: node id of the test that must fail because of it. compiled: order of warps in which compiled kernels run it.
    """

    name: str
    file: str
    old: str
    new: str
    killer: str
    compiled: str = ""


def parse(text: str) -> Iterator[tuple[list[str], str, str, list[str]]]:
    """Yields for each block: the fields of its first line, the old text, the new text, and the other lines."""
    for block in text.strip().split("\n\n"):
        if not block.startswith("#"):
            head, *lines = block.split("\n")
            old, new = ([line[1:] for line in lines if line.startswith(sign)] for sign in "-+")
            others = [line for line in lines if not line.startswith(("-", "+"))]
            yield head.split(" | "), "\n".join(old) + "\n" * (not new), "\n".join(new), others


def mutant_of(head: list[str], old: str, new: str, others: list[str]) -> Mutant:
    """Returns the mutant of a block, from what `parse` yields. Raises: ValueError if the block has another form."""
    if len(head) not in (2, 3) or not old.strip() or len(others) != 1 or not others[0].startswith("tests/"):
        raise ValueError(f"no mutant: {' | '.join(head)}: expected a name and a file, lines with - and +, and a test")
    return Mutant(*head[:2], old, new, *others, *head[2:])


FILES = sorted((Path(__file__).parent / "mutants").glob("*.txt"))
MUTANTS = [mutant_of(*block) for path in FILES for block in parse(path.read_text())]

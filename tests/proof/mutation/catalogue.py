"""All mutants, in the order of docs/mutants.md, read from `mutants/*.txt`. Every name is unique.

A block of a file is one mutant. Blocks are separated by an empty line; a block that starts with `#` is a comment:

    name | category | file            and ` | crashed` where that is the fate of the run
    -text that stands exactly once in the file
    +text in its place; no such line: the old lines go, with their end
    tests/folder/test_file.py::test_that_must_fail
"""

from collections.abc import Iterator
from pathlib import Path

from tests.proof.mutation.mutant import Mutant

FILES = ("kernels", "owners", "places", "prefix", "marks", "tiers", "host", "salts", "streams", "chaos", "guard")


def parse(text: str) -> Iterator[tuple[list[str], str, str, list[str]]]:
    """What each block of a file has: the fields of its first line, old text, new text, and other lines."""
    for block in text.strip().split("\n\n"):
        if not block.startswith("#"):
            head, *lines = block.split("\n")
            old, new = ([line[1:] for line in lines if line.startswith(sign)] for sign in "-+")
            others = [line for line in lines if not line.startswith(("-", "+"))]
            yield head.split(" | "), "\n".join(old) + "\n" * (not new), "\n".join(new), others


def blocks(name: str) -> Iterator[tuple[list[str], str, str, list[str]]]:
    """What each block of `mutants/{name}.txt` has."""
    return parse((Path(__file__).parent / "mutants" / f"{name}.txt").read_text())


def mutant_of(head: list[str], old: str, new: str, others: list[str]) -> Mutant:
    """Raises: ValueError where a block has another form."""
    if len(head) not in (3, 4) or not old.strip() or len(others) != 1 or not others[0].startswith("tests/"):
        raise ValueError(
            f"no mutant: {' | '.join(head)}: expected three or four fields, lines with - and +, and a test"
        )
    name, category, file, *fate = head
    return Mutant(name, category, file, old, new, *others, *fate)


MUTANTS = [mutant_of(*block) for name in FILES for block in blocks(name)]

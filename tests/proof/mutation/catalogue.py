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

FILES = ("kernels", "owners", "places", "prefix", "tiers", "host", "salts")


def parse(text: str) -> Iterator[Mutant]:
    """The mutants of a file. Raises: ValueError for a block that has another form."""
    for block in text.strip().split("\n\n"):
        if block.startswith("#"):
            continue
        try:
            head, *lines, killer = block.split("\n")
            name, category, file, *fate = head.split(" | ")
            old, new = ([line[1:] for line in lines if line.startswith(sign)] for sign in "-+")
            if not old or len(old) + len(new) < len(lines) or not killer.startswith("tests/"):
                raise ValueError("expected lines with - and +, and a test below them")
            yield Mutant(name, category, file, "\n".join(old) + "\n" * (not new), "\n".join(new), killer, *fate)
        except (ValueError, TypeError) as error:
            raise ValueError(f"no mutant: {error}:\n{block}") from error


MUTANTS = [
    mutant for name in FILES for mutant in parse((Path(__file__).parent / "mutants" / f"{name}.txt").read_text())
]

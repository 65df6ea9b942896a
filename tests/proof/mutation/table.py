"""docs/mutants.md: which tests notice which mutant. Made by `python -m tests.proof.mutation`, compared by `--check`."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tests.proof.mutation.mutant import CATEGORIES, Mutant
from tests.proof.mutation.runner import ROOT, Verdict

PAGE = ROOT / "docs" / "mutants.md"
NOTICED = ("killed", "crashed", "timed out")  # fates of a run that say that somebody saw it
UNTRIED = Verdict("not run", [], 0, 0.0, "")  # of the tests near, where only the one test was
NAMED = 3  # failing tests that the table names
HEAD = """# Mutants

Broken copies of the library: each has one text replaced, see `tests/proof/mutation`. `make test` runs every mutant
against one test, which must fail; `make proof` runs it against all tests that are near and writes this page.

"Fails" is what becomes of the run of that one test: where an address may lie outside of the process, its end counts.
"Near" is how many of the tests near the changed file fail, with fresh random inputs, and the first of them.
"""
CELL = re.compile(r"^\| (\w[^|]*) \| ([^|]*) \| `([^`]*)` \| `([^`]*)` \|", re.MULTILINE)


class Line(NamedTuple):
    """What a run found: the verdict of the one test, and of those near."""

    mutant: Mutant
    one: Verdict
    near: Verdict


def page(mutants: Sequence[Mutant], rows: Mapping[str, str]) -> str:
    """The page, in the order of the catalogue. rows: of each mutant, by its name."""
    parts = [HEAD, "| category | what goes wrong | mutants |\n| --- | --- | --- |"]
    counts = {name: sum(mutant.category == name for mutant in mutants) for name in CATEGORIES}
    parts[1] += "".join(f"\n| {name} | {why} | {counts[name]} |" for name, why in CATEGORIES.items())
    unseen, untried = (
        sum(rows[mutant.name].endswith(f"| {fate} |") for mutant in mutants) for fate in ("survived", UNTRIED.fate)
    )
    tried = len(mutants) - untried
    parts.append(
        f"\n{len(mutants)} mutants; of {tried} that the tests near were run on, they notice {tried - unseen}.\n"
    )
    parts.append("| mutant | category | file | killed by | fails | near |\n| --- | --- | --- | --- | --- | --- |")
    parts += [rows[mutant.name] for mutant in mutants]
    return "\n".join(parts) + "\n"


def kept(text: str, mutants: Sequence[Mutant]) -> dict[str, str]:
    """Rows of a page, by name, of mutants that are in the catalogue as they are there."""
    wanted = {(mutant.name, mutant.category, mutant.file, one_line(mutant.killer)) for mutant in mutants}
    tried = [line for line in text.splitlines() if not line.endswith(f"| {UNTRIED.fate} |")]
    return {found[0][0]: line for line in tried if (found := CELL.findall(line)) and found[0] in wanted}


def row(line: Line) -> str:
    """One mutant as a row of the table."""
    mutant, near = line.mutant, line.near
    names = list(dict.fromkeys(short(test) for test, _ in near.failed))
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    found = f"{len(near.failed)}: {', '.join(f'`{name}`' for name in names[:NAMED])}{more}" if names else near.fate
    if near.fate in ("crashed", "timed out"):
        found = f"{near.fate}{f', {found}' if names else ''}"
    cells = (mutant.name, mutant.category, f"`{mutant.file}`", f"`{one_line(mutant.killer)}`", line.one.fate, found)
    return f"| {' | '.join(cells)} |"


def short(test: str) -> str:
    """A test without its folder and its parameters."""
    return one_line(test.removeprefix("tests/").partition("[")[0])


def one_line(text: str) -> str:
    """Text that does not end a cell of a table."""
    return text.replace("|", "/")


def stale(text: str, mutants: Sequence[Mutant]) -> list[str]:
    """How a page and a catalogue differ, a line for each mutant; nothing where they list the same."""
    listed = CELL.findall(text)
    wanted = [(mutant.name, mutant.category, mutant.file, one_line(mutant.killer)) for mutant in mutants]
    lines = [f"not in the page, or not so: {entry[0]}" for entry in wanted if entry not in listed]
    lines += [f"not in the catalogue, or not so: {entry[0]}" for entry in listed if entry not in wanted]
    return lines or ([] if listed == wanted else ["the order is not that of the catalogue"])

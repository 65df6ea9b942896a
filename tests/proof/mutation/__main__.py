"""The long run: every mutant against the tests near it, and docs/mutants.md.

python -m tests.proof.mutation            runs, and writes the page
python -m tests.proof.mutation --new      runs those that the page does not list so, and keeps the rows of the others
python -m tests.proof.mutation --quick    the same without the tests near, for a page that the next long run completes
python -m tests.proof.mutation --check    says whether the page lists the mutants that there are
python -m tests.proof.mutation WORD ..    runs the mutants with a word in their name or file, and prints their fate
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from tests.proof.mutation.catalogue import MUTANTS
from tests.proof.mutation.mutant import Mutant
from tests.proof.mutation.near import near
from tests.proof.mutation.runner import Runner
from tests.proof.mutation.table import NOTICED, PAGE, UNTRIED, Line, kept, page, row, stale

WORKERS = 2
LIMIT = 90.0  # seconds of a run


def run(mutants: Sequence[Mutant], say: Callable[[str], None] = print, quick: bool = False) -> list[Line]:
    """Tries every mutant against its killer, and unless `quick` against the tests near it. Raises: Stale."""
    began = time.monotonic()
    found: list[Line] = []
    idle: SimpleQueue[Runner] = SimpleQueue()

    def one(mutant: Mutant) -> Line:
        runner = idle.get()
        try:
            one = runner.killer(mutant, LIMIT)
            line = Line(mutant, one, UNTRIED if quick else runner.run(mutant, near(mutant), LIMIT))
        finally:
            idle.put(runner)
        found.append(line)
        seconds = f"{time.monotonic() - began:5.0f} s"
        failed = f"{len(line.near.failed)} of {len(line.near.failed) + line.near.passed} fail"
        say(f"{len(found):3} of {len(mutants)}, {seconds}: {mutant.name}: {line.one.fate}; near: {failed}")
        return line

    with Runner() as first, Runner() as second, ThreadPoolExecutor(WORKERS) as workers:
        idle.put(first)
        idle.put(second)
        for mutant in mutants:  # one that fits no more is said at once, not after half an hour
            first.tree.source(mutant)
        return list(workers.map(one, mutants))


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    if list(arguments) == ["--check"]:
        lines = stale(PAGE.read_text() if PAGE.exists() else "", MUTANTS)
        print("\n".join([*lines, "run: python -m tests.proof.mutation"] if lines else [f"{PAGE.name} is up to date"]))
        return bool(lines)
    quick = list(arguments) == ["--quick"]
    rows = kept(PAGE.read_text(), MUTANTS) if quick or list(arguments) == ["--new"] else {}
    words = [] if rows else arguments
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.name} {m.file}" for word in words)]
    chosen = [mutant for mutant in chosen if mutant.name not in rows]
    if not chosen:
        print(f"no mutant has one of {', '.join(arguments)} in its name or file: {len(MUTANTS)} are there")
        return 2
    lines = run(chosen, lambda text: print(text, flush=True), quick)
    if not words:
        PAGE.write_text(page(MUTANTS, rows | {line.mutant.name: row(line) for line in lines}))
    alive = [line.mutant.name for line in lines if line.one.fate not in ("killed", line.mutant.fate)]
    unseen = [line.mutant.name for line in lines if line.near.fate not in (*NOTICED, UNTRIED.fate)]
    print(f"{len(lines)} mutants, {len(alive)} of them alive", *alive, sep="\n  ")
    print(f"{len(unseen)} of them not noticed by the tests near", *unseen, sep="\n  ")
    return bool(alive or unseen)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

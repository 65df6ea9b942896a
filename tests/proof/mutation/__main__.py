"""Runs every mutant against the test that must fail for it, and against the file of that test.

python -m tests.proof.mutation           runs all
python -m tests.proof.mutation WORD ..   runs the mutants with a word in their name or file

Both write the results into results.tsv.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.proof.mutation.catalogue import MUTANTS, Mutant
from tests.proof.mutation.runner import DEAD, Runner

RESULTS = Path(__file__).with_name("results.tsv")
COLUMNS = "mutant", "its killer", "tests of the killer's file that fail, with fresh random inputs"
WORKERS = 2
LIMIT = 300.0  # limit of a run of tests, in seconds


def row(runner: Runner, mutant: Mutant) -> tuple[str, ...]:
    """Returns the line of one mutant. If its killer is in tests/proof, runs only this test, as its file takes long.

    If only compiled kernels show the mutant, says whether it lives when the interpreter runs the killer's file.
    """
    fate, more = runner.killer(mutant, LIMIT).fate, "-"
    if not mutant.killer.startswith("tests/proof/"):
        launched = mutant.file.startswith("kernels/") and "/reference/" not in mutant.file
        other = "reference" if launched else "interpreter"
        path, _, _ = mutant.killer.partition("::")
        verdict = runner.run(mutant, [path, "-m", "not slow", "-k", f"not [{other}"], LIMIT)
        more = f"{len(verdict.failed)} of {len(verdict.failed) + verdict.passed}" if verdict.finished else verdict.fate
        if mutant.compiled:
            more = f"interpreter: {'lives' if verdict.fate == 'survived' else more}"
    return mutant.name, fate, more


def main(words: Sequence[str]) -> int:
    """Runs the program. Returns its exit status."""
    if any(word.startswith("-") for word in words):
        print(__doc__)
        return 2
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.name} {m.file}" for word in words)]
    idle: SimpleQueue[Runner] = SimpleQueue()

    def one(mutant: Mutant) -> tuple[str, ...]:
        runner = idle.get()
        try:
            fields = row(runner, mutant)
        finally:
            idle.put(runner)
        print(*fields, sep="\t", flush=True)
        return fields

    with Runner() as first, Runner() as second, ThreadPoolExecutor(WORKERS) as workers:
        idle.put(first)
        idle.put(second)
        for mutant in chosen:  # if a mutant does not fit, this raises at once, not in half an hour
            first.source(mutant)
        rows = list(workers.map(one, chosen))
    known = {fields[0]: fields for line in RESULTS.read_text().splitlines()[1:] if (fields := tuple(line.split("\t")))}
    known |= {fields[0]: fields for fields in rows}
    table = [COLUMNS, *(known[mutant.name] for mutant in MUTANTS if mutant.name in known)]
    RESULTS.write_text("\n".join(map("\t".join, table)) + "\n")
    alive = [name for name, fate, _ in rows if fate not in DEAD]
    print(f"{len(rows)} mutants, {len(alive)} of them alive", *alive, sep="\n  ")
    return bool(alive or not rows)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

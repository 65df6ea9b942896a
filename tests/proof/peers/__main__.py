"""Runs the suites, compares what is lost with `lost.txt`, and prints a line for each suite."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Any, Final

import tests.proof.peers as package
from tests.proof.peers.sources import BUILD, ROOT, CannotRun, packages
from tests.proof.peers.suites import SUITES, Suite

HERE: Final = Path(__file__).parent
LIMIT: Final = 1500  # seconds of a suite
PREPARING: Final = Lock()  # two suites can share an archive and packages

Note = Mapping[str, Any]  # what inside/notes.py writes about a test


@dataclass(frozen=True)
class Loss:
    """A line of `lost.txt`: so many tests, whose names match, are lost for a reason."""

    suite: str
    count: int
    pattern: str
    reason: str


def known(path: Path = HERE / "lost.txt") -> list[Loss]:
    """Returns the known losses.

    Raises:
        ValueError: A line is neither a comment nor `suite | number | pattern | reason`.
    """
    losses = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            suite, count, pattern, reason = (part.strip() for part in line.split(" | "))
            losses.append(Loss(suite, int(count), pattern, reason))
    return losses


def judged(name: str, inside: int, notes: Sequence[Note], losses: Sequence[Loss]) -> tuple[list[str], str]:
    """Compares what is lost with what is known.

    Args:
        name: The suite.
        inside: At least so many of its tests must have memstate inside.
        notes: A note for each test.
        losses: The known losses of all suites.

    Returns:
        What is wrong, and a line that counts.
    """
    wrong = [f"{note['test']} cannot be collected: {note['uncollected']}" for note in notes if "uncollected" in note]
    ran = [note for note in notes if "uncollected" not in note]
    lost = [note for note in ran if note["faults"] or (note["outcome"], note.get("without")) == ("failed", "passed")]
    mine = [loss for loss in losses if loss.suite == name]
    for note in lost:
        if not any(fnmatchcase(note["test"], loss.pattern) for loss in mine):
            wrong.append(f"lost: {note['test']}: {'; '.join([*note['faults'], *note['refused'], note['why']])}")
    for loss in mine:
        if (found := sum(fnmatchcase(note["test"], loss.pattern) for note in lost)) != loss.count:
            wrong.append(f"lost.txt says that {loss.count} of {loss.pattern} are lost, but {found} are: {loss.reason}")
    used = sum(note["used"] > 0 for note in ran)
    if used < inside:
        wrong.append(f"only {used} tests had memstate inside, expected at least {inside}")
    outcomes = [note["outcome"] for note in ran]
    both = outcomes.count("failed") - sum(note["outcome"] == "failed" for note in lost)
    return wrong, (
        f"{name}: {outcomes.count('passed')} of {len(ran)} tests pass, {used} with memstate inside, "
        f"{sum(note['compared'] for note in ran)} results compared; {both} fail with and without it, "
        f"{outcomes.count('skipped')} are skipped, {len(lost)} lost, {len(wrong)} surprises"
    )


def run(name: str, suite: Suite) -> list[Note]:
    """Runs the tests of a suite. Returns the notes; the output is in a log.

    Raises:
        CannotRun: Its tests or its Python are not there.
    """
    with PREPARING:
        folder, python = suite.prepare()
        extra = packages(suite.plugin, python, suite.pins)
    notes, log = BUILD / f"{name}.notes", BUILD / f"{name}.log"
    notes.parent.mkdir(parents=True, exist_ok=True)
    notes.write_text("")
    path = os.pathsep.join(map(str, (folder, HERE / "inside", extra, ROOT, ROOT / "tools")))
    variables = {"PYTHONPATH": path, "PEER_NOTES": str(notes), "OMP_NUM_THREADS": "1", **suite.variables}
    # Without the project's own settings of pytest: the markers and warnings of others are theirs.
    options = ["-q", "-c", os.devnull, "--rootdir=.", "-W", "ignore", "--continue-on-collection-errors"]
    plugins = [f"-p{plugin}" for plugin in ("no:cacheprovider", "no:xdist", "notes", suite.plugin)]
    command = [python, "-m", "pytest", *options, *plugins, *suite.tests]
    with log.open("w") as said:
        status = subprocess.run(
            command, cwd=folder, env=os.environ | variables, stdout=said, stderr=said, timeout=LIMIT
        ).returncode
    lines = [json.loads(line) for line in notes.read_text(encoding="utf-8").splitlines()]
    if status < 0 or not lines:
        raise RuntimeError(f"pytest ended with {status}, see {log.relative_to(ROOT)}")
    return lines


def tried(name: str, asked: bool) -> str:
    """Runs and judges a suite, and prints a line. Returns "ran", "skipped" or "failed"."""
    begun = time.monotonic()
    try:
        wrong, line = judged(name, SUITES[name].inside, run(name, SUITES[name]), known())
    except CannotRun as error:
        print(f"{name}: {'failed' if asked else 'skipped'}: {error}", flush=True)
        return "failed" if asked else "skipped"
    except Exception as error:
        print(f"{name}: failed: {error}", flush=True)
        return "failed"
    print("\n".join([*wrong, f"{line}; {time.monotonic() - begun:.0f} s"]), flush=True)
    return "failed" if wrong else "ran"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the suites that the command line names. Returns 0 if nothing is wrong, otherwise 1."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests.proof.peers", description=package.__doc__, formatter_class=form)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {list(SUITES)}; default: all")
    parser.add_argument("--workers", type=int, default=2, help="suites at a time")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.suites) - set(SUITES):
        parser.error(f"no suite {sorted(unknown)}: expected some of {list(SUITES)}")
    names = chosen.suites or list(SUITES)
    with ThreadPoolExecutor(chosen.workers) as pool:
        ends = list(pool.map(lambda name: tried(name, bool(chosen.suites)), names))
    print(f"{len(names)} suites: " + ", ".join(f"{ends.count(end)} {end}" for end in ("ran", "skipped", "failed")))
    return int("failed" in ends or "ran" not in ends)


if __name__ == "__main__":
    sys.exit(main())

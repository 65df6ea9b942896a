"""Raises exceptions inside the public calls of random programs, and of all scripts:

    python -m tests.proof.injection [--programs 40] [--seed 1] [--points 1] [--errors MemoryError] [--workers 2]

Prints a line for each program and script: how often a call was done, was undone, or was noticed as broken. Ends with 1
if the result at a point is none of these three.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.proof.injection.torn import KINDS, scripts, work
from tests.proof.injection.verdict import ERRORS

WRONG = 3  # limit of the wrong points to print for each program


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.injection")
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--points", type=int, default=1)
    parser.add_argument("--errors", default=",".join(ERRORS))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(arguments)
    began, total = time.monotonic(), Counter[str]()
    names = [list(KINDS)[at % len(KINDS)] for at in range(given.programs)]
    jobs = [
        (name, error, given.seed + at, given.points)
        for at, name in enumerate([*names, *scripts()])
        for error in given.errors.split(",")
    ]
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        for job, (settings, outcomes) in zip(jobs, pool.map(work, jobs), strict=True):
            kinds = Counter(one.kind for one in outcomes)
            total += kinds
            print(f"{job[0] or 'program'} {job[2]}, {job[1]}: {dict(kinds)}", flush=True)
            for one in [one for one in outcomes if one.kind == "wrong"][:WRONG]:
                print(f"    {settings}\n    {one.call}, {one.place}: {one.text}", flush=True)
    print(f"{total.total()} points: {dict(total)}, {total['wrong']} wrong, {time.monotonic() - began:.0f} s")
    return int(total["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

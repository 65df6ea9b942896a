"""Raises exceptions at every line of every public call:

    python -m tests.proof.injection [--every 1] [--scenes redirect,lazy] [--errors MemoryError] [--workers 2] [CALL ..]

Prints a line for each scene, error and call: how often the call was done, was undone, or was noticed as broken. Ends
with 1 if the result at a point is none of these three.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.proof.injection.scene import SCENES, calls, scene
from tests.proof.injection.verdict import ERRORS, every_so_many

WRONG = 3  # limit of the wrong points to print per call


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.injection")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--scenes", default=",".join([*SCENES, "keyed"]))
    parser.add_argument("--errors", default=",".join(ERRORS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("calls", nargs="*")
    given = parser.parse_args(arguments)
    began, total = time.monotonic(), Counter[str]()
    jobs = [
        (name, error, call) for name in given.scenes.split(",") for error in given.errors.split(",")
        for call in given.calls or calls(scene(name))
    ]  # fmt: skip
    with ProcessPoolExecutor(given.workers, mp_context=get_context("spawn")) as pool:
        results = pool.map(every_so_many, *zip(*jobs, strict=True), [given.every] * len(jobs))
        for job, outcomes in zip(jobs, results, strict=True):
            kinds = Counter(one.kind for one in outcomes)
            total += kinds
            print(f"{job[0]}, {job[1]}, {job[2]}: {dict(kinds)}", flush=True)
            for one in [one for one in outcomes if one.kind == "wrong"][:WRONG]:
                print(f"    {one.place}: {one.text}", flush=True)
    print(f"{total.total()} points: {dict(total)}, {total['wrong']} wrong, {time.monotonic() - began:.0f} s")
    return int(total["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

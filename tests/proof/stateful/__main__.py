"""Runs random programs of a manager beside its model, as many operations as asked for:

    python -m tests.proof.stateful --operations 1000000 --backend reference [--seed 1] [--workers 2] [--length 300]

Prints the first seed, and a line every few seconds. If manager and model differ, prints the shrunk program and how to
run it again, and ends with 1. The seeds are the same for any number of workers.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat

CHUNK = 10  # number of programs that a worker runs before it reports


def positive(text: str) -> int:
    """Returns a number of 1 or more. Raises: argparse.ArgumentTypeError."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: expected 1 or more")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=positive, default=20_000)
    parser.add_argument("--backend", default="reference", choices=("reference", "interpreter", "cuda"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--length", type=positive, default=300, help="operations of a program")
    parser.add_argument("--workers", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--tails", action="store_true", help="rows of all programs have tails")
    parser.add_argument("--kv", choices=("keys", "reach"), help="what the engine of all programs tells of its KV")
    parser.add_argument("--no-shrink", action="store_true")
    chosen = parser.parse_args()
    if chosen.backend == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # before the workers import Triton
    from tests.proof.stateful.program import work

    programs = -(-chosen.operations // chosen.length)
    seeds = range(chosen.seed, chosen.seed + programs)
    chunks = [seeds[at : at + CHUNK] for at in range(0, programs, CHUNK)]
    print(f"{programs * chosen.length} operations in {programs} programs, seeds {seeds[0]} to {seeds[-1]}, "
          f"{chosen.backend}, {chosen.workers} workers", flush=True)  # fmt: skip
    started = told = time.monotonic()
    done = calls = 0
    with ProcessPoolExecutor(chosen.workers, multiprocessing.get_context("spawn")) as pool:
        drawn = ({"tail": True} if chosen.tails else {}) | ({"kv": chosen.kv} if chosen.kv else {})
        given = (chosen.length, chosen.backend, not chosen.no_shrink, drawn)
        for chunk, (made, difference) in zip(chunks, pool.map(work, chunks, *map(repeat, given)), strict=True):
            done, calls = done + len(chunk) * chosen.length, calls + made
            if difference:
                compiled = os.environ.get("MEMSTATE_COMPILED", "")
                again = f"MEMSTATE_COMPILED={compiled} " * bool(compiled) + "python -m tests.proof.stateful"
                again += f" --backend {chosen.backend} --operations {chosen.length} --length {chosen.length}"
                again += " --tails" * chosen.tails + f" --kv {chosen.kv}" * bool(chosen.kv)
                seed, _, _ = difference.partition(":")
                print(f"seed {difference}\nagain: {again} --seed {seed}", flush=True)
                pool.shutdown(cancel_futures=True)
                return 1
            if time.monotonic() - told > 5 or chunk is chunks[-1]:
                told, rate = time.monotonic(), done / (time.monotonic() - started)
                print(f"{done} operations, {calls} calls, {rate:.0f} operations a second", flush=True)
    print(f"{done} operations, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())

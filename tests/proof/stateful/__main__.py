"""Runs random programs for long:

    python -m tests.proof.stateful --operations 1000000 --backend reference [--seed 1] [--workers 2] [--length 300]

Prints the first seed, a line every few seconds, and for a difference the shrunk program and how to run it again. The
seeds are the same for any number of workers. Ends with 1 where manager and model differ.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

CHUNK = 10  # programs a worker runs before it reports


def positive(text: str) -> int:
    """A number of 1 or more, or argparse says what is wrong."""
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
    parser.add_argument("--no-shrink", action="store_true")
    chosen = parser.parse_args()
    if chosen.backend == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # before the workers import Triton
    from tests.proof.stateful.program import work

    device = "cuda" if chosen.backend == "cuda" else "cpu"
    programs = -(-chosen.operations // chosen.length)
    total = programs * chosen.length
    print(f"{total} operations in {programs} programs, seeds {chosen.seed} to {chosen.seed + programs - 1}, "
          f"{chosen.backend}, {chosen.workers} workers", flush=True)  # fmt: skip
    started = told = time.monotonic()
    done = calls = 0
    seeds = iter(range(0, programs, CHUNK))
    with ProcessPoolExecutor(chosen.workers, multiprocessing.get_context("spawn")) as pool:

        def send(first: int) -> tuple:  # type: ignore[type-arg]
            size = min(CHUNK, programs - first)
            given = (chosen.seed + first, size, chosen.length, chosen.backend, device, not chosen.no_shrink)
            return pool.submit(work, *given), size

        running = dict(send(first) for first, _ in zip(seeds, range(2 * chosen.workers), strict=False))
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                made, difference = future.result()
                done, calls = done + running.pop(future), calls + made
                if difference:
                    print(difference, flush=True)
                    seed = str(difference).partition(":")[0].removeprefix("seed ")
                    print(f"again: python -m tests.proof.stateful --backend {chosen.backend} "
                          f"--operations {chosen.length} --length {chosen.length} --seed {seed}",
                          flush=True)  # fmt: skip
                    pool.shutdown(cancel_futures=True)
                    return 1
                running |= dict([send(first)]) if (first := next(seeds, None)) is not None else {}
            now = time.monotonic()
            if now - told > 5 or not running:
                told, rate = now, done * chosen.length / (now - started)
                print(f"{done * chosen.length} operations, {calls} calls, {rate:.0f} operations a second", flush=True)
    print(f"{total} operations, no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())

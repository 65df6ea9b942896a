"""Tries all schedules of calls on a small manager, up to a depth or a time limit:

    python -m tests.proof.exhaustive [--depth 4] [--seconds 600] [--workers 2] [WORD ..]

Prints a line for each case. The depth is the number of calls up to which all schedules were tried, from an empty
manager and from three busy ones. If a state is wrong, prints the shortest schedule that leads to it, and ends with 1.
If a WORD is given, only cases with this word in their name run.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.proof.exhaustive.search import work
from tests.proof.exhaustive.world import CASES

DEEP = 10**6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, help="calls of a schedule; default: as many as the time allows")
    parser.add_argument("--seconds", type=float, help="of all cases together; default: 600, or no limit with --depth")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("words", nargs="*", metavar="WORD")
    chosen = parser.parse_args()
    cases = [case for case in CASES if all(word in case for word in chosen.words)]
    seconds = chosen.seconds or (DEEP if chosen.depth else 600.0)
    depth = DEEP if chosen.depth is None else chosen.depth
    share = seconds * min(chosen.workers, len(cases)) / max(1, len(cases))
    began, results = time.monotonic(), []
    print(f"{'case':28}{'depth':>7}{'states':>10}{'transitions':>13}{'seconds':>9}  differences")
    with ProcessPoolExecutor(chosen.workers, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, case, depth, share) for case in cases]):
            results.append(one := future.result())
            print(f"{one.case:28}{one.depth:7}{one.states:10}{one.transitions:13}{one.seconds:9.1f}  "
                  f"{int(bool(one.difference))}", flush=True)  # fmt: skip
    wrong = [one.difference for one in results if one.difference]
    print(f"{'all':28}{min((one.depth for one in results), default=0):7}{sum(one.states for one in results):10}"
          f"{sum(one.transitions for one in results):13}{time.monotonic() - began:9.1f}  {len(wrong)}")  # fmt: skip
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())

"""Counts the functions and the files that calls of the manager go through: their trips.

What counts is a call of a named function, method or property whose code lies in the package `memstate`, outside of
`memstate/kernels`. Comprehensions and lambdas do not count, because Python 3.12 inlines comprehensions. Figures of two
commits can be compared if the same version of Python took both.

Each trip is made once before it is counted. Run it in the repository:

    python -m benchmarks.trips [--json FILE] [--show TRIP]
"""

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import memstate as ms

PACKAGE = Path(ms.__file__).parent
LAYOUT = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
PAGE = 4
PROMPT = list(range(4 * PAGE + 1))
Calls = Counter[tuple[str, str]]  # (file, function) -> calls


def manager(**more: Any) -> ms.StateManager:
    """Returns a small manager under Redirect."""
    return ms.StateManager(LAYOUT, slots=8, max_requests=2, backend="reference", **more)


def cached(**more: Any) -> ms.StateManager:
    """Returns a manager with a prefix cache and KV pages."""
    return manager(pages=ms.Pages(size=PAGE, count=64, per_row=16), prefix=ms.Prefix(), **more)


def computed(mem: ms.StateManager) -> ms.Rows:
    """Admits the prompt and computes it, in chunks that end where a state is kept."""
    rows = mem.admit([ms.Request("a", tokens=PROMPT)])
    while (length := mem.info(rows[0]).length) < len(PROMPT):
        mem.settle(mem.plan(rows, [mem.chunk(rows[0], len(PROMPT) - length)]))
    return rows


def counted(trip: Callable[[], object]) -> Calls:
    """Makes a trip, and returns its calls."""
    found: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found[frame.f_code] += 1

    sys.setprofile(note)
    try:
        trip()
    finally:
        sys.setprofile(None)
    calls: Calls = Counter()
    for code, times in found.items():
        path = Path(code.co_filename)
        if code.co_name.startswith("<") or not path.is_relative_to(PACKAGE):
            continue
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] != "kernels":
            calls[inside.as_posix(), code.co_qualname] += times
    return calls


def build() -> Calls:
    """A manager without a prefix cache is built."""
    manager()
    return counted(manager)


def plain_admission() -> Calls:
    """A request that starts from zeros, without tokens, without a prefix cache."""
    mem, request = manager(), ms.Request("a")
    mem.end(mem.admit([request]))
    return counted(lambda: mem.admit([request]))


def settle() -> Calls:
    """A step of one row without a prefix cache is settled."""
    mem = manager()
    rows = mem.admit([ms.Request("a")])
    mem.settle(mem.plan(rows, [1]))
    step = mem.plan(rows, [1])
    return counted(lambda: mem.settle(step))


def release_into_cache() -> Calls:
    """A request ends, and its KV and states go to the prefix cache."""
    mem = cached()
    mem.end(computed(mem), keep="cache", tokens=[PROMPT])
    assert mem.prefix is not None
    mem.prefix.clear()
    rows = computed(mem)
    return counted(lambda: mem.end(rows, keep="cache", tokens=[PROMPT]))


def prefetched_admission() -> Calls:
    """A request starts from a state and KV in host memory."""
    kv = ms.Planes(ms.StateLayout([ms.Plane("kv", (PAGE,), torch.float32)], layers=1), 64, ms.Backend("reference"))
    mem = cached(tiers=ms.Tiers(model="toy", host_slots=8, host_pages=64, kv=kv))
    calls: Calls = Counter()
    for _ in range(2):
        mem.end(computed(mem), keep="cache", tokens=[PROMPT])
        assert mem.prefix is not None
        mem.prefix.evict_states(1)
        mem.prefix.evict_pages(64)
        mem.submit()
        mem.poll()
        rows = list[ms.Row]()
        request = ms.Request("a", tokens=PROMPT)
        assert mem.match(PROMPT).host_length == 4 * PAGE
        calls = counted(lambda request=request, rows=rows: rows.extend(mem.admit([request])))
        assert mem.info(rows[0]).length == 4 * PAGE
        mem.end(rows)
        mem.prefix.clear()
    return calls


TRIPS = {
    "plain admission": plain_admission,
    "prefetched admission": prefetched_admission,
    "settle": settle,
    "release into the cache": release_into_cache,
    "build without a cache": build,
}


def main() -> None:
    """Prints the trips as a table, or the functions of one of them."""
    parser = argparse.ArgumentParser(description="count the functions and files that calls of the manager go through")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--show", choices=TRIPS, help="list the functions of this trip")
    given = parser.parse_args()
    if given.show:
        for (file, name), times in sorted(TRIPS[given.show]().items()):
            print(f"{times:4} {file:32} {name}")
        return
    found = {name: trip() for name, trip in TRIPS.items()}
    rows = [{"trip": name, "calls": c.total(), "files": len({file for file, _ in c})} for name, c in found.items()]
    for row in rows:
        print(f"{row['trip']:24} {row['calls']:5} calls {row['files']:3} files")
    if given.json:
        taken = {"python": platform.python_version(), "trips": rows}
        given.json.write_text(json.dumps(taken, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Benchmarks the host time of a park, and of an admission that goes on from it: `memstate bench host --case parked`.

Beside them stands `end(keep="cache")` of requests of the same length: what an engine without `park` does with them. The
cache has a state of each. All three leave the submit of their changes to the next plan.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count

import torch

from memstate.engine.settings import Pages
from memstate.prefix.settings import Prefix
from memstate.requests.handles import Parked, Request, Row
from memstate.requests.tracking import Redirect
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import Tiers
from memstate_tools.bench.host_sides import TimedManager, Timer, task
from memstate_tools.bench.task import Setting, Task

PAGE = 16  # tokens of a page, and tokens between snapshots
CASES = ((1, 41), (1, 1001), (16, 41))  # (rows, tokens of each)
TOY_CASES = ((1, 41), (3, 41))
KV = StateLayout((Plane("kv", (PAGE, 4), torch.bfloat16),), 1)


class Parks(TimedManager):
    """Requests that park and go on, and others that end.

    Args:
        setting: The setting of the benchmark.
        size: Number of requests.
        tokens: Tokens of each request.
    """

    def __init__(self, setting: Setting, size: int, tokens: int) -> None:
        self._size, self._tokens, self._first = size, tokens, count(step=tokens)
        pages = 3 * size * -(-tokens // PAGE)
        tiers = Tiers("bench", host_slots=2 * size, host_pages=pages, kv=Planes(KV, pages, setting.make_backend()),
                      staging=max(size, 2), write="back", ahead=0)  # fmt: skip
        settings = {"prefix": Prefix(), "pages": Pages(size=PAGE, count=pages, per_row=pages), "tiers": tiers}
        super().__init__(setting, Redirect(PAGE), size, **settings)

    def turn(self, timer: Timer) -> None:
        """See `HostSide`."""
        mem, rows, parked = self.mem, list[Row](), list[Parked]()
        ends, texts = self._reach()
        timer("end", lambda: mem.end(ends, keep="cache", tokens=texts))
        mem.submit()
        assert mem.prefix is not None
        self._filed = sum(1 for _ in mem.prefix.stated())
        mem.prefix.clear()
        parks, texts = self._reach()
        timer("park", lambda: parked.extend(mem.park(parks)))
        mem.submit()
        mem.poll()
        requests = [Request(n, resume=one) for n, one in enumerate(parked)]
        timer("resume", lambda: rows.extend(mem.admit(requests)))
        mem.submit()
        self._lengths = [mem.info(row).length for row in rows]
        mem.end(rows)
        mem.submit()
        mem.poll()

    def _reach(self) -> tuple[list[Row], list[Sequence[int]]]:
        """Admits requests with new tokens and computes them. Each has a snapshot. Returns rows and tokens."""
        mem, last = self.mem, self._tokens - self._tokens % PAGE
        firsts = [next(self._first) for _ in range(self._size)]
        texts: list[Sequence[int]] = [array("q", range(first, first + self._tokens)) for first in firsts]
        rows = list(mem.admit([Request(n, tokens=text) for n, text in enumerate(texts)]))
        for tokens in (last, 1, self._tokens - last - 1):
            mem.settle(mem.plan(rows, tokens))
        mem.submit()
        return rows, texts

    def wrong(self) -> str:
        """Returns what is wrong: a state that is not cached, another length, or a leak; empty if nothing is."""
        self.mem.device.check()
        if (self._filed, self._lengths) != (self._size, [self._tokens] * self._size):
            return f"{self._filed} states of {self._size} cached, lengths {self._lengths} of {self._tokens}"
        report, stats = self.mem.audit(), self.mem.stats()
        return "" if report.clean and stats.free == stats.capacity else f"{stats.free} slots free; {report}"


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields a task for each number of requests and each length."""
    for size, tokens in setting.sizes(CASES, TOY_CASES):
        yield task(setting, f"R={size}, {tokens} tokens, parked", partial(Parks, setting, size, tokens), {})

"""Models one prefetch and its jobs, for `tests.support.model_prefetch`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.shelves import Item, Key, Shelf


@dataclass(eq=False)
class Job:
    """A job for a thread. A job of a prefetch asks the store or reads from it. A job without one writes `items` to it.

    A job that reads fills `records` of `shelf` with the KV of `pages` of the prompt; if there are no `pages`, with the
    state.
    """

    run: Callable[[], Any]
    fetch: "Fetched | None" = None
    shelf: Shelf | None = None
    records: Sequence[int] = ()
    pages: Sequence[int] = ()
    items: Sequence[Item] = ()
    begun: bool = False
    ended: bool = False
    failed: bool = False
    result: Any = None

    @property
    def fate(self) -> str:
        if self.ended:
            return "ended" if self.begun else "cancelled"
        return "running" if self.begun else "queued"


@dataclass(eq=False)
class Fetched:
    """A prefetch. Pages are numbered from 0. An end is a number of pages, from 1.

    here: pages in host memory. stated: ends whose state is in host memory. able: ends for which host memory and store
    have all pages and the state. vote: ends that this rank can accept. pages: host record claimed for each page.
    state: host record claimed for the state. run: number of pages before the first that has not arrived. bad: the first
    page that will never arrive.
    """

    keys: list[Key]
    covered: int
    kv_pages: int
    began: float
    size: int  # tokens of a page
    phase: str = "asking"
    outcome: str | None = None
    reserved: int = 0
    stop: bool = False
    over: bool = False
    reason: str = ""
    asked: Sequence[int] = ()
    answer: tuple[int, Sequence[int]] | None = None
    here: set[int] = field(default_factory=set)
    stated: set[int] = field(default_factory=set)
    able: set[int] = field(default_factory=set)
    vote: set[int] | None = None
    pinned: list[tuple[int, Item]] = field(default_factory=list)  # (first end that needs the item, item)
    pages: dict[int, int] = field(default_factory=dict)
    state: int | None = None
    arrived: set[int] = field(default_factory=set)
    bad: int = 0
    come: bool | None = None  # whether the state has arrived; None while it is read
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.missing, self.length = self.tokens - self.covered, self.covered

    @property
    def done(self) -> bool:
        return self.phase == "done"

    @property
    def end(self) -> int:
        return len(self.keys)

    @property
    def tokens(self) -> int:
        return self.end * self.size

    @property
    def run(self) -> int:
        run = 0
        while run < self.end and run in self.arrived:
            run += 1
        return run

    def blame(self, reason: str) -> None:
        self.reason = self.reason or reason

    def missing_up_to(self, end: int) -> list[int]:
        return [page for page in range(end) if page not in self.here]

    def reachable(self, run: int, state: bool) -> set[int]:
        ends = {end for end in self.able & self.stated if end <= min(run, self.end)}
        if run == self.end:
            ends = ends | {run} if state else ends - {run}
        return ends

    @property
    def hopeless(self) -> bool:
        goal = max(self.reachable(self.bad, self.come is not False), default=0)
        return self.run >= goal and not (goal == self.end and self.come is None)

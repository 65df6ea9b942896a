"""Makes the table of docs/strategies.md: tries what each tracking strategy does with each feature.

For every cell, a manager is built and driven through its boundaries on the reference backend. The table has only
counts; tests of the cells show that the bytes are right.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from memstate.engine.manager import StateManager
from memstate.engine.settings import Forward, Pages
from memstate.prefix import Prefix
from memstate.requests.handles import Request, Row
from memstate.requests.steps import Step
from memstate.requests.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
from memstate.state.layout import Plane, StateLayout

EVERY = 4
STRATEGIES: tuple[Tracking, ...] = (NoTracking(EVERY), PingPong(EVERY), LazyPingPong(EVERY), Redirect(EVERY))
# two layers of 16 bytes: a copy of this plane, or of the ring in RING, has 32 bytes
LAYOUT = StateLayout((Plane("ssm", (4,), torch.float32),), layers=2)
RING = StateLayout((*LAYOUT.planes, Plane("ring", (4,), torch.float32, rewritten_each_step=False)), layers=2)


class Use:
    """A manager, and the calls with which a feature uses it.

    Attributes:
        most: Most slots that one row held.
    """

    def __init__(self, mem: StateManager) -> None:
        self.mem, self.most = mem, 0
        self._unsettled: list[Step] = []

    def step(self, *rows: Row, tokens: int | Sequence[int] = 1) -> None:
        """Plans a step, then settles this step or, with overlap, the previous one."""
        self._unsettled.append(self.mem.plan(rows, tokens))
        self.look(*rows)
        self.settle(int(self.mem.overlap))

    def look(self, *rows: Row) -> None:
        """Notes the number of slots that rows hold."""
        self.most = max(self.most, *(self.mem.info(row).slots for row in rows))

    def decode(self, row: Row, until: int) -> None:
        """Decodes single tokens up to a length."""
        while self.mem.info(row).length < until:
            self.step(row)

    def settle(self, but: int = 0) -> None:
        """Settles all steps except the newest `but` steps."""
        while len(self._unsettled) > but:
            self.mem.settle(self._unsettled.pop(0))


def _decode(use: Use) -> None:
    (row,) = use.mem.admit([Request("a")])
    use.decode(row, 3 * EVERY + 1)


def _speculate(use: Use) -> None:
    (row,) = use.mem.admit([Request("a")])
    steps: list[Step] = []
    while use.mem.info(row).length < 3 * EVERY + 1:
        steps.append(use.mem.plan([row], 3, drafts=2))
        steps[-1].accepted.fill_(2)
        use.look(row)
        if len(steps) > use.mem.overlap:
            use.mem.accept(steps.pop(0), [2], written=True)


def _mixed(use: Use) -> None:
    decoding, filling = use.mem.admit([Request("decode"), Request("prefill")])
    for _ in range(3):
        chunk = use.mem.info(filling).next_boundary - use.mem.info(filling).length
        use.step(decoding, filling, tokens=[1, chunk])
    use.decode(filling, 3 * EVERY + 1)


def _prompt(use: Use) -> None:
    (row,) = use.mem.admit([Request("a", tokens=range(3 * EVERY + 1), snapshot_at=[EVERY, 3 * EVERY])])
    use.step(row, tokens=3 * EVERY + 1)
    use.decode(row, 5 * EVERY + 1)


def _sessions(use: Use) -> None:
    (row,) = use.mem.admit([Request("turn 0")])
    for turn in range(1, 4):
        use.decode(row, use.mem.info(row).length + EVERY)
        use.settle()
        (snapshot,) = use.mem.end([row], keep="handle")
        assert snapshot is not None  # the turn ends at a boundary, so there is a snapshot
        (row,) = use.mem.admit([Request(f"turn {turn}", resume=snapshot)])
        use.mem.drop([snapshot])


def _preallocated(use: Use) -> None:
    row, arriving = use.mem.admit([Request("a"), Request("arriving")])
    use.step(row)
    use.mem.device.arrived([arriving], [EVERY - 1])
    use.decode(arriving, 3 * EVERY + 1)


def _fork(use: Use) -> None:
    (row,) = use.mem.admit([Request("a")])
    use.decode(row, EVERY - 1)
    use.settle()
    rows = (row, *use.mem.fork(row, ["b", "c"]).rows)
    for each in rows:
        use.decode(each, 2 * EVERY + 1)


class Feature(NamedTuple):
    """A feature. It makes two rows of the table: one for steps settled in turn, one for overlapped steps.

    Attributes:
        name: Name of the feature.
        settings: Settings of the manager.
        drive: Uses the feature across boundaries.
        means: Meaning of the feature, for the reader.
    """

    name: str
    settings: dict[str, Any]
    drive: Callable[[Use], None]
    means: str


FEATURES = (
    Feature("decode", {}, _decode, "one token a step"),
    Feature(
        "speculation",
        {"forward": Forward(tail=3)},
        _speculate,
        "three tokens a step, two of them drafts, of which one is accepted",
    ),
    Feature("mixed batches", {}, _mixed, "prefill chunks beside decoding rows"),
    Feature(
        "prompts in one chunk",
        {"forward": Forward(grid=EVERY), "pages": Pages(size=EVERY), "prefix": True},
        _prompt,
        "two states inside the chunk are kept, then the row decodes",
    ),
    Feature("sessions", {}, _sessions, "three turns, each going on from the snapshot that the last one left"),
    Feature("preallocated rows", {"preallocated": 1}, _preallocated, "a state from elsewhere"),
    Feature("in-place kernels", {"forward": Forward(in_place=True)}, _decode, "a forward that updates one slot"),
    Feature(
        "speculation in place",
        {"forward": Forward(tail=3, in_place=True)},
        _speculate,
        "the same with kernels that update one slot",
    ),
    Feature("planes written in part", {"layout": RING}, _decode, "a ring of inputs with a cursor beside a whole plane"),
    Feature("forks", {}, _fork, "three continuations of one state"),
)


class Cell(NamedTuple):
    """The result of one strategy with one feature.

    Attributes:
        most: Most slots that one request held.
        snapshots: Number of snapshots taken.
        copies: Number of states that memstate copied for snapshots, hits and forks. A state of
            which only some planes were copied counts as well.
    """

    most: int
    snapshots: int
    copies: int

    def __str__(self) -> str:
        slots = f"{self.most} slot{'s' if self.most > 1 else ''}"
        return f"{slots}, {self.copies} cop{'ies' if self.copies > 1 else 'y'}" if self.copies else slots


def cell(tracking: Tracking, feature: Feature, overlap: bool) -> Cell:
    """Builds a manager with a strategy for a feature, drives it, and returns the counts.

    Syncs: no.
    """
    settings: dict[str, Any] = {
        "layout": LAYOUT,
        "slots": 12,
        "max_requests": 3,
        "backend": "reference",
        "overlap": overlap,
    } | feature.settings
    if settings.get("prefix"):
        settings["prefix"] = Prefix()  # a new one, because its policies belong to one manager
    mem = StateManager(settings.pop("layout"), tracking=tracking, **settings)
    use = Use(mem)
    feature.drive(use)
    use.settle()
    mem.submit()
    stats = mem.stats()
    return Cell(use.most, stats.snapshots, stats.copied_bytes // LAYOUT.bytes_per_slot)


def page() -> str:
    """Returns docs/strategies.md as Markdown."""
    lines = [
        "# What works with what",
        "",
        "Everything. Made by `make docs`: every cell is a manager that was built and driven across three boundaries.",
        "*In turn*: each step is settled before the next is planned; *overlapped*: the next step is planned first. A",
        "cell says how many slots one request was seen to hold, and how many states memstate copied, for snapshots,",
        "hits and forks together; without a figure it copied none.",
        "",
        f"| | | {' | '.join(type(tracking).__name__ for tracking in STRATEGIES)} |",
        f"| --- | --- |{' --- |' * len(STRATEGIES)}",
    ]
    for feature in FEATURES:
        for overlap in (False, True):
            cells = [str(cell(tracking, feature, overlap)) for tracking in STRATEGIES]
            name = "" if overlap else f"**{feature.name}**: {feature.means}"
            lines.append(f"| {name} | {'overlapped' if overlap else 'in turn'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")

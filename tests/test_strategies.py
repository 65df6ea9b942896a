"""The table of strategies and features: every cell is used here, with bytes that differ from row to row."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import memstate as ms
from docs.site.strategies import FEATURES, Feature, cell, page
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.script import Play
from tests.support.build import on
from tests.support.loops import InPlace
from tests.support.planes import MAKERS, I, Loop, fold
from tests.support.scan import scan
from tests.support.tail_walk import WRONG, Model, Walk, layout

PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"


def check(loop: Loop, rows: Sequence[ms.Row]) -> None:
    """Requires right states and snapshots of rows, no leak, and a snapshot of each row if the strategy takes any."""
    for row in rows:
        assert loop.holds(loop.slot(row), row, loop.mem.info(row).length)
        assert loop.mem.info(row).slots <= loop.mem.tracking.most_slots(loop.mem.overlap)
    snapshots = loop.mem.publish(rows)
    for row, snapshot in zip(rows, snapshots, strict=True):
        assert (snapshot is None) == isinstance(loop.mem.tracking, ms.NoTracking)
        if snapshot:
            assert snapshot.length == loop.mem.info(row).length // I * I or loop.mem.info(row).length % I == 0
            assert loop.holds(loop.node(snapshot), row, snapshot.length)
    scan(loop.mem)
    loop.mem.audit().raise_if_leaking()


def advance(loop: Loop, rows: Sequence[ms.Row | None], tokens: Sequence[int | list[int]]) -> None:
    """Runs one step per entry of `tokens`.

    A step is settled at once or, with overlap, after the plan of the next step.
    """
    flight: list[ms.Step] = []
    for n in tokens:
        flight.append(loop.step(rows, n))
        if len(flight) > int(loop.mem.overlap):
            loop.mem.settle(flight.pop(0))
    for step in flight:
        loop.mem.settle(step)


def decode(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    loop = Loop(backend, tracking, overlap=overlap)
    rows = loop.admit(ms.Request("a"), ms.Request("b"))
    advance(loop, [*rows, None], [1] * (2 * I + 1))
    check(loop, rows)


def speculation(backend: Backend, tracking: ms.Tracking, overlap: bool, in_place: bool = False) -> None:
    generator = torch.Generator().manual_seed(0)
    settings = {"slots": 14, "max_requests": 5, "max_batch": 6, "tracking": tracking, "overlap": overlap}
    mem = on(backend, layout(3), **settings, forward=ms.Forward(tail=3, in_place=in_place))
    mem.device.scrub_null()
    Walk(mem, Model(backend, generator, WRONG + 1), generator, 3).run(12)


def mixed(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    loop = Loop(backend, tracking, overlap=overlap)
    rows = loop.admit(ms.Request("decodes"), ms.Request("fills"))
    advance(loop, [None, *rows], [[0, 1, chunk] for chunk in (3, 1, 4, 2, 2, 1)])
    check(loop, rows)


def prompts(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    name = next(name for name, make in MAKERS.items() if type(make()) is type(tracking))
    play = Play(backend, strategy=name, overlap=overlap, every=I, prefix=True, page_size=4, grid=4, placed=4)
    play.turn(range(18), prompt=14, most=13)
    play.reached(**({"inserted": ...} if name != "none" else {}))
    play.match(range(14))
    play.finish()


def sessions(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    loop = Loop(backend, tracking, overlap=overlap)
    (row,) = loop.admit()
    for _ in range(3):
        advance(loop, [row], [1] * I)
        fed = loop.fed[row]
        (snapshot,) = loop.mem.end([row], keep="handle")
        assert snapshot and snapshot.length == len(fed)
        (row,) = loop.admit(ms.Request("next turn", resume=snapshot))
        loop.mem.drop([snapshot])
        loop.fed[row] = list(fed)
    advance(loop, [row], [1] * (I + 1))
    check(loop, [row])
    assert loop.mem.info(row).length == 4 * I + 1


def preallocated(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    loop = Loop(backend, tracking, rows=1, preallocated=1, overlap=overlap)
    here, there = loop.admit(ms.Request("here"), ms.Request("there"))
    loop.fed[there] = [5, 6]
    loop.mem.submit()
    for name, plane in loop.mem.planes.items():
        plane[:, loop.slot(there)] = (fold((5, 6)) * loop.planes.weights[name]).to(plane.dtype)
    loop.mem.device.arrived([there], [2])
    advance(loop, [here, there], [1] * (2 * I))
    check(loop, [here, there])


def in_place(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    loop = InPlace(backend, tracking, overlap=overlap)
    rows = loop.admit(ms.Request("a"), ms.Request("b"))
    advance(loop, [*rows, None], [1] * (2 * I + 1))
    check(loop, rows)


def ring(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    """The plane keeps the last inputs as a ring. A step writes one cell of it, but a snapshot needs all cells."""
    layout = ms.StateLayout((ms.Plane("ring", (I,), torch.int64, rewritten_each_step=False),), 1)
    mem = ms.StateManager(
        layout, slots=6, max_requests=1, tracking=tracking, device=backend.device, backend=backend.name, overlap=overlap
    )
    (row,) = mem.admit([ms.Request("ring")])
    flight: list[ms.Step] = []
    for t in range(1, I + 2):
        flight.append(mem.plan([row]))
        mem.planes["ring"][0, flight[-1].write.long(), t % I] = t
        if len(flight) > int(overlap):
            mem.settle(flight.pop(0))
    for step in flight:
        mem.settle(step)
    snapshots = mem.publish([row])
    mem.submit()
    assert mem.planes["ring"][0, int(mem.device.live_slots[row.index])].tolist() == [4, 5, 2, 3]
    for snapshot in snapshots:
        assert (snapshot is None) == isinstance(tracking, ms.NoTracking)
        if snapshot:
            assert mem.planes["ring"][0, int(mem.device.read_slots([snapshot]).wait()[0])].tolist() == [4, 1, 2, 3]


def forks(backend: Backend, tracking: ms.Tracking, overlap: bool) -> None:
    loop = Loop(backend, tracking, overlap=overlap)
    (row,) = loop.admit()
    advance(loop, [row], [1] * (I - 1))
    rows = [row, *loop.mem.fork(row, ["b", "c"]).rows]
    for new in rows[1:]:
        loop.fed[new] = list(loop.fed[row])
    advance(loop, rows, [1] * (I + 2))
    check(loop, rows)


USES: dict[str, Callable[[Backend, ms.Tracking, bool], None]] = {
    "decode": decode,
    "speculation": speculation,
    "mixed batches": mixed,
    "prompts in one chunk": prompts,
    "sessions": sessions,
    "preallocated rows": preallocated,
    "in-place kernels": in_place,
    "speculation in place": partial(speculation, in_place=True),
    "planes written in part": ring,
    "forks": forks,
}


SCRIPTS = {"prompts in one chunk": pytest.mark.script}  # features that are used by a script
CELLS = [pytest.param(one, id=one.name, marks=SCRIPTS.get(one.name, ())) for one in FEATURES]


@pytest.mark.sample(interpreter=4)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("feature", CELLS)
def test_every_cell_works(backend: Backend, feature: Feature, name: str, overlap: bool) -> None:
    made = cell(MAKERS[name](), feature, overlap)
    USES[feature.name](backend, MAKERS[name](), overlap)
    boundaries = name != "none" and (feature.name, name) != ("sessions", "redirect")  # here live is published
    assert (made.snapshots > 0) == boundaries
    marks = 2 * (feature.name == "prompts in one chunk")
    assert 1 <= made.most <= MAKERS[name]().most_slots(overlap) + marks


def test_what_costs_no_copy_says_so() -> None:
    """Redirect copies only for kernels that cannot read one slot and write another."""
    copies = {feature.name: cell(ms.Redirect(I), feature, overlap=False).copies for feature in FEATURES}
    assert {name for name, count in copies.items() if count} == {
        "in-place kernels", "speculation in place", "planes written in part",
    }  # fmt: skip


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "docs/strategies.md is stale: make docs"

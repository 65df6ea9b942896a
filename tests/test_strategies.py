"""The table of strategies and features: every cell is used here, with bytes that differ from row to row."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from docs.site.strategies import FEATURES, Feature, cell, page
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.script import Play
from tests.support.build import on
from tests.support.planes import MAKERS, I
from tests.support.tail_walk import WRONG, Model, Walk, layout

PAGE = Path(__file__).parents[1] / "docs" / "strategies.md"


BARE = {"pages": 0, "page_size": 1, "pages_per_row": 0}  # the engine keeps the KV


def played(backend: Backend, name: str, overlap: bool, use: Callable[[Play], object], **settings: Any) -> None:
    """Uses a manager as the model says, and publishes all its rows at the end."""
    play = Play(backend, strategy=name, overlap=overlap, **(BARE | settings))
    use(play)
    play.land()
    play.publish(*play.machine.handles, handles=True)
    if name != "none":
        play.reached("published")
    play.finish()


def decode(play: Play) -> None:
    rows = play.admit(None, None)
    for _ in range(2 * I + 1):
        play.step([*rows, None])


def mixed(play: Play) -> None:
    rows = play.admit(None, None)
    for chunk in (3, 1, 4, 2, 2, 1):
        play.step([None, *rows], [1, 1, chunk])


def prompts(play: Play) -> None:
    (row,) = play.admit(range(14))
    for tokens in (13, 1, 1, 1):
        play.step([row], tokens)
        play.publish(row)
    play.land()
    play.end(row)


def sessions(play: Play) -> None:
    (row,) = play.admit(None)
    for turn in range(1, 4):
        play.run(row, range(turn * I))
        (snap,) = play.end(row, how="publish")
        (row,) = play.admit(None, resume=snap)
        play.drop(snap)
    play.run(row, range(4 * I + 1))


def preallocated(play: Play) -> None:
    here, there = play.admit(None, None)
    play.arrive([there], [2])
    for _ in range(2 * I):
        play.step([here, there])


def forks(play: Play) -> None:
    (row,) = play.admit(None)
    play.run(row, range(I - 1))
    rows = [row, *play.fork(row, "b", "c")]
    for _ in range(I + 2):
        play.step(rows)


def speculation(backend: Backend, name: str, overlap: bool, in_place: bool = False) -> None:
    generator = torch.Generator().manual_seed(0)
    settings = {"slots": 14, "max_requests": 5, "max_batch": 6, "tracking": MAKERS[name](), "overlap": overlap}
    mem = on(backend, layout(3), **settings, forward=ms.Forward(tail=3, in_place=in_place))
    mem.device.scrub_null()
    Walk(mem, Model(backend, generator, WRONG + 1), generator, 3).run(12)


USES: dict[str, Callable[[Backend, str, bool], None]] = {
    "decode": partial(played, use=decode),
    "speculation": speculation,
    "mixed batches": partial(played, use=mixed),
    "prompts in one chunk": partial(played, use=prompts, prefix=True, grid=4, placed=4),
    "sessions": partial(played, use=sessions),
    "preallocated rows": partial(played, use=preallocated, rows=1, preallocated=1),
    "in-place kernels": partial(played, use=decode, in_place=True),
    "speculation in place": partial(speculation, in_place=True),
    "planes written in part": partial(played, use=decode, parts=("fold", "ring")),
    "forks": partial(played, use=forks),
}


SCRIPTS = [feature for feature in FEATURES if "speculation" not in feature.name]
CELLS = [pytest.param(one, id=one.name, marks=[pytest.mark.script] * (one in SCRIPTS)) for one in FEATURES]


@pytest.mark.sample(interpreter=4)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("feature", CELLS)
def test_every_cell_works(backend: Backend, feature: Feature, name: str, overlap: bool) -> None:
    made = cell(MAKERS[name](), feature, overlap)
    USES[feature.name](backend, name, overlap)
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

"""Tests the demo as several kinds of engine, with several kinds of layers and layouts: right and without leaks.

The full matrix has 144 combinations. The cases here have each pair of settings at least once.
"""

import dataclasses
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from memstate.engine.stepping import Stepping
from memstate.kernels.dispatch import Backend
from memstate.requests.steps import Step
from memstate_tools.demo import DemoReport
from memstate_tools.demo.arena import GAP, Arena
from memstate_tools.demo.config import ENGINES, LAYOUTS, MODELS, ORDERS_OF, STRATEGIES
from memstate_tools.demo.engines import DemoEngine
from memstate_tools.demo.mixers import state_layout
from tests.support.demo_talks import TINY, demo, write_talks


def small(**settings: Any) -> DemoReport:
    """Runs a small model with few slots, and returns the report."""
    return demo(**{"requests": 6, "slots": 7, "track_every": 8} | settings)


def require_as_it_must_be(report: DemoReport) -> None:
    """Checks that a run is right and leaks nothing, and that snapshots copy no more bytes than the engine needs."""
    figures = report.to_json()
    assert report.ok and report.identical, report.failure()
    assert (figures["leaked_slots"], figures["double_owned_slots"]) == (0, 0)
    config = report.config
    assert (figures["model"], figures["layout"], figures["engine"]) == (config.model, config.layout, config.engine)
    slot = state_layout(config.size, config.model).bytes_per_slot
    copied, most = figures["snapshot_bytes_copied"], figures["snapshots_taken"] * slot
    if config.engine != "in-place":
        assert copied == 0  # the forward writes snapshots itself
    else:
        kept = figures["snapshots_published"] * slot  # states at ends of chunks are copied when published
        least = most if config.strategy in ("none", "redirect") else slot  # no copy without a forward
        assert least <= copied <= most + kept and copied % slot == 0
    assert (figures["foreign_bytes"] > 0) == (config.engine == "arena") and figures["foreign_bytes_changed"] == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("strategy", "model", "engine", "layout", "overlap"),
    [
        (*chosen, tuple(LAYOUTS)[sum(at) % 2], bool(sum(at) // 2 % 2))
        for chosen, at in zip(product(STRATEGIES, MODELS, ENGINES), product(range(4), range(3), range(3)), strict=True)
    ],
)
def test_every_engine_is_identical_to_uncached(
    strategy: str, model: str, engine: str, layout: str, overlap: bool
) -> None:
    report = small(
        strategy=strategy, model=model, engine=engine, layout=layout, overlap=overlap, fail_claims=0.3, track_every=16
    )
    require_as_it_must_be(report)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("mamba2", {"engine": "in-place", "strategy": "redirect", "fail_claims": 0.3}),
        ("kda", {"engine": "arena", "strategy": "ping-pong", "layout": "slot-major", "overlap": False}),
        ("mamba2", {"engine": "arena", "strategy": "redirect", "sabotage": "stale"}),
        ("kda", {"engine": "in-place", "strategy": "redirect", "plant_leak": True, "requests": 2}),
    ],
    ids=str,
)
def test_engines_on_every_backend(tmp_path: Path, backend: Backend, model: str, settings: dict[str, Any]) -> None:
    talks = write_talks(tmp_path / "talks.jsonl", [17, 20])
    given = {"input": talks, "requests": 3, "backend": backend.name, "device": str(backend.device)}
    report = small(model=model, **given | settings)
    assert report.backend == backend.name
    if report.config.sabotage:
        assert report.ok and report.strikes and not report.identical, report.failure()
    elif report.config.plant_leak:
        assert report.ok and report.planted and report.leaked == [report.planted], report.failure()
    else:
        require_as_it_must_be(report)
        assert report.meter.resumed


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "engine"), [("gdn", "in-place"), ("kda", "arena"), ("mamba2", "own")])
def test_D5_either_order_of_states_is_identical_to_uncached(model: str, engine: str) -> None:
    """Both orders of the state's axes give the same answers, since the reference adds in the same order for both."""
    size = dataclasses.replace(TINY, key=8, value=4)
    answers = []
    for order in ORDERS_OF[model]:
        report = small(model=model, engine=engine, state_order=order, size=size, fail_claims=0.3)
        require_as_it_must_be(report)
        assert report.to_json()["state_order"] == order
        answers.append(report.answers)
    assert answers[0] == answers[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("strategy", "missing"),
    [("redirect", "_copy_around"), ("ping-pong", "_copy_snapshots"), ("lazy", "_copy_snapshots")],
)
def test_in_place_engines_depend_on_the_copies(monkeypatch: pytest.MonkeyPatch, strategy: str, missing: str) -> None:
    monkeypatch.setattr(Stepping, missing, lambda self, *_: None)
    assert small(engine="own", strategy=strategy).ok
    report = small(engine="in-place", strategy=strategy)
    assert not report.ok and "not identical to the uncached run" in report.failure()


def test_in_place_steps_launch_a_copy_where_a_snapshot_is_taken() -> None:
    eager = small(engine="in-place", strategy="ping-pong", requests=12, track_every=16)
    assert {asked.step for asked in eager.meter.decode} == {1} and {asked.syncs for asked in eager.meter.decode} == {0}
    assert {asked.copies for asked in eager.meter.decode} == {0, 1}
    assert eager.to_json()["device_launches_per_decode_step"]["max"] == 2
    own = small(engine="own", strategy="ping-pong", requests=12, track_every=16)
    assert {asked.copies for asked in own.meter.decode} == {0} and own.answers == eager.answers


def arena(order: str) -> Arena:
    states = state_layout(TINY, "mamba2", LAYOUTS[order])
    return Arena(states, 5, TINY.page_layout(3), 7, torch.device("cpu"))


@pytest.mark.parametrize("order", LAYOUTS)
def test_an_arena_tells_its_own_bytes_from_states_and_pages(order: str) -> None:
    made = arena(order)
    whole, foreign = made.memory, made.foreign()
    taken = torch.zeros(len(whole), dtype=torch.int64)
    for place in made.places:
        for index in range(place.highest + 1):
            start = place.offset + index * place.stride
            taken[start : start + place.plane.nbytes] += 1
            assert foreign[start - GAP : start].all() and foreign[start + place.plane.nbytes :][:GAP].all()
    assert taken.max() == 1 and torch.equal(taken == 0, foreign)
    assert {place.highest for place in made.places} == {5, 7} and made.changed() == []

    for tensors in (made.states, made.kv):
        for one in (layer for plane in tensors.values() for layer in plane):
            one.fill_(float("nan"))
    assert made.changed() == []
    whole[~foreign] ^= 0xFF
    assert made.changed() == []
    for offset in (0, int(foreign.nonzero()[len(whole) % 97]), len(whole) - 1):
        whole[offset] ^= 1
        assert made.changed() == [offset]
        whole[offset] ^= 1


def test_a_byte_between_states_and_pages_that_changes_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    true = DemoEngine.slots

    def slots(self: DemoEngine, step: Step) -> Any:
        self.arena.memory[3] = 0  # type: ignore[union-attr]
        return true(self, step)

    monkeypatch.setattr(DemoEngine, "slots", slots)
    report = small(engine="arena", requests=2)
    assert report.identical and not report.ok
    assert report.to_json()["foreign_bytes_changed"] == 1
    says = f"1 of {report.foreign_bytes} bytes between states and pages changed, the first at offset 3 of the engine's"
    assert says in report.failure()

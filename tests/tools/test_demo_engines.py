"""Tests the demo as several kinds of engine, layers and layouts, and with guessed tokens: right and without leaks.

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
from memstate_tools.demo.trees import FORKED, DeviceTree, DraftTree, StepTree, chain
from tests.support.demo_talks import TINY, demo, require_right, right, write_talks


def small(**settings: Any) -> DemoReport:
    """Runs a small model with few slots, and returns the report."""
    return demo(**{"requests": 6, "slots": 7, "track_every": 8} | settings)


def require_as_it_must_be(report: DemoReport) -> None:
    """Checks that a run is right, and that snapshots copy no more bytes than the engine needs."""
    figures, config = require_right(report).to_json(), report.config
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


# -- guessed tokens -------------------------------------------------------------------------------


WITH: dict[str, dict[str, Any]] = {
    "slots alone": {},
    "sessions": {"sessions": 3},
    "storage": {"storage": "file", "host_slots": 8, "slots": 8},
    "an arena": {"engine": "arena", "layout": "slot-major"},
    "claims that fail": {"fail_claims": 0.5},
    "few pages": {"pages": 40, "chunk": 24},
    "kernels in place": {"engine": "in-place"},
    "deferred states": {"tail": 5},
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("with_", WITH)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T6_guesses_change_nothing(strategy: str, model: str, overlap: int, with_: str, tree: bool) -> None:
    speculate = "tree" if tree else str(1 + len(with_) % 4)
    report = right(strategy=strategy, model=model, overlap=overlap, speculate=speculate, **WITH[with_])
    assert speculate == "1" or 0 < report.meter.right < report.meter.guessed


def test_T6_takes_fewer_steps() -> None:
    plain, guessing, forked = (right(speculate=each, overlap=0) for each in ("0", "4", "tree"))
    assert plain.answers == guessing.answers == forked.answers
    assert forked.meter.steps < guessing.meter.steps < 0.7 * plain.meter.steps


@pytest.mark.parametrize("tree", [chain(1), chain(5), FORKED])
def test_the_device_walks_a_tree_as_the_host_does(tree: DraftTree) -> None:
    draw, width = torch.Generator().manual_seed(0), len(tree) + 2
    of = DeviceTree(tree, torch.device("cpu"))
    for drafts in range(len(tree)):
        for root in range(width - drafts):
            sampled = torch.randint(0, 3, (64, len(tree)), generator=draw)
            sides = torch.randint(0, 3, (64, 1 + tree.depth), generator=draw)
            guesses = (sides[:, of.depths] + of.sides) % 3  # guesses that have the same parent differ
            last = of.walk(guesses, sampled, torch.full((64,), drafts))
            tokens = StepTree(of, torch.full((64,), root)).path(last).tolist()
            for row in range(64):
                path = tree.walk(guesses[row, 1 : drafts + 1].tolist(), sampled[row].tolist())
                assert last[row] == path[-1] and tree.paths[path[-1]] == tuple(path)
                right = [*range(root), *(root + node for node in path)][: len(tree)]
                assert tokens[row][: len(right)] == right


@pytest.mark.parametrize(
    ("most", "depth", "has"), [(6, 3, 6), (6, 9, 6), (6, 2, 5), (6, 1, 2), (6, 0, 0), (4, 3, 4), (0, 3, 0), (-2, -1, 0)]
)
def test_a_tree_with_less_room_is_cut_by_depth(most: int, depth: int, has: int) -> None:
    assert FORKED.fit(most, depth) == has
    assert chain(7).fit(most, depth) == max(0, min(most, depth))


@pytest.mark.sample
@pytest.mark.parametrize("tail", [1, 4])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T16_deferred_states_change_nothing(strategy: str, engine: str, tail: int) -> None:
    right(strategy=strategy, engine=engine, tail=tail)

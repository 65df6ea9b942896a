"""Tests the demo with guessed tokens: tokens, logits and states equal those of the uncached run."""

from typing import Any

import pytest
import torch

from memstate_tools.demo.config import ENGINES, MODELS, STRATEGIES
from memstate_tools.demo.trees import FORKED, DeviceTree, DraftTree, StepTree, chain
from tests.support.demo_talks import demo

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
    report = demo(strategy=strategy, model=model, overlap=overlap, speculate=speculate, **WITH[with_])
    assert report.ok, report.failure()
    assert speculate == "1" or 0 < report.meter.right < report.meter.guessed


def test_T6_takes_fewer_steps() -> None:
    plain, guessing, forked = (demo(speculate=each, overlap=0) for each in ("0", "4", "tree"))
    assert plain.ok and guessing.ok and forked.ok and plain.answers == guessing.answers == forked.answers
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
    report = demo(strategy=strategy, engine=engine, tail=tail)
    assert report.ok, report.failure()

"""Tries every schedule of a few calls on a small manager; `make proof` tries longer schedules."""

import pytest

from tests.proof.exhaustive.checkpoint import Checkpoint
from tests.proof.exhaustive.search import Search
from tests.proof.exhaustive.state import name
from tests.proof.exhaustive.world import CASES, World
from tests.proof.stateful.operations import NO_LIMIT
from tests.support.processes import python

# PingPong has few states, because one row takes 3 of the 5 slots. So its search goes deeper. Cases in SHORT resemble
# other cases.
SHORT = (
    "Redirect, pages of 2", "Redirect, copied hits", "Redirect, in place", "Redirect, rows and a grid",
    "LazyPingPong, skipping",
)  # fmt: skip
DEPTHS = dict.fromkeys(SHORT, 1) | dict.fromkeys(("PingPong", "PingPong, direct hits"), 3)
WIDE = ("Redirect, tails", "Redirect, tails, overlap")  # so many calls to try that only full runs have the time
CALLS = {
    "admit", "fork", "plan", "replay", "forward", "launched", "submit", "settle", "cancel", "abort", "release",
    "publish", "drop",
}  # fmt: skip


@pytest.fixture(autouse=True)
def poison() -> None:
    """Replaces the fixture `poison` of all tests, because the model poisons slots itself."""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.proof if case in WIDE else ()) for case in CASES]
)
def test_no_schedule_reaches_a_wrong_state(case: str) -> None:
    depth = DEPTHS.get(case, 2)
    result = Search(case, CASES[case]).run(depth, 600)
    assert not result.difference, result.difference
    assert result.depth == depth and result.transitions > result.states > 50
    more = {"draft"} if CASES[case].tail else set()
    if more and depth > 1:
        more |= {"accept"} | ({"sample"} if CASES[case].overlap else set())
    assert set(result.calls) == CALLS | more


def test_a_checkpoint_brings_a_state_back() -> None:
    world = World(CASES["Redirect"])
    world.warm_up()
    here, before = Checkpoint(world), name(world)
    world.apply(("plan", ((1, 1), (2, 1)), NO_LIMIT))
    world.apply(("abort", 1))
    assert name(world) != before
    here.restore()
    assert name(world) == before
    world.at.look()


def test_states_that_differ_in_numbers_only_have_one_name() -> None:
    one, other = World(CASES["Redirect"]), World(CASES["Redirect"])
    for world, first in ((one, 1), (other, 2)):
        for move in (("admit", 0), ("admit", 0), ("plan", ((first, 2),), NO_LIMIT), ("settle", (False,))):
            world.apply(move)
    assert name(one) == name(other)
    other.apply(("abort", 1))
    assert name(one) != name(other)


def test_a_wrong_rule_is_told_with_the_shortest_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstate.slots.commands.CommandBuffer.fence", lambda buffer, registers, unwritten=None: None)
    result = Search("no fence", CASES["Redirect"]).run(3, 60)
    assert "slot" in result.difference and result.difference.count("\n") >= 3, result


@pytest.mark.proof
def test_the_program_prints_a_line_for_each_case() -> None:
    lines = python("-m", "tests.proof.exhaustive", "--depth", 1, "--workers", 1, "Redirect, in").splitlines()
    assert lines[0].split() == ["case", "depth", "states", "transitions", "seconds", "differences"]
    assert lines[1].startswith("Redirect, in place") and lines[2].split()[:2] == ["all", "1"]

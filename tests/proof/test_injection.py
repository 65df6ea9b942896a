"""Raises exceptions inside calls of a few random programs; with MEMSTATE_PROOF=1 of many programs and of all scripts.

See `tests/proof/injection`; `python -m tests.proof.injection` prints the result of each program.
"""

import os
import random
from collections import Counter
from unittest import mock

import pytest

from memstate.engine import stepping
from memstate.guard import Guard
from tests.proof.injection.torn import KINDS, PUBLIC, Outcome, Places, scripts, torn_program, torn_script
from tests.proof.injection.verdict import ERRORS
from tests.proof.stateful.program import Program
from tests.support.sampling import PROOF

SEED = int(os.environ.get("MEMSTATE_SEED", "1"))
OFTEN = 2 if PROOF else 12  # one of so many calls is ended
LENGTH = 60 if PROOF else 20  # operations of a program
# no program or script calls them through the machine: they only read, or end the manager; are called in other calls;
# belong to a pool alone, or to a stream; test_parked_injection.py and test_a_trip_ends_at_any_moment end the last three
ELSEWHERE = {
    "close", "sheet", "info", "wait", "infos", "stats", "ready",
    "find", "offer", "admitted", "bring", "save", "added", "used", "require_own", "reset", "miscounts",
    "copy", "zero", "release", "run_data", "keep_path", "use_stream",
    "clear", "read", "write",
}  # fmt: skip

pytestmark = pytest.mark.script


@pytest.fixture(scope="module")
def called() -> Counter[str]:
    """The public calls that were ended so far."""
    return Counter()


def some(seed: str) -> Places:
    """Returns a function that chooses a place in some calls."""
    chance = random.Random(seed)
    return lambda: [] if chance.randrange(OFTEN) else [chance.random()]


def require_sound(outcomes: list[Outcome]) -> None:
    assert [one for one in outcomes if one.kind == "wrong"] == []


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(5)
def test_a_call_is_done_or_undone_or_noticed(called: Counter[str], kind: str, error: str) -> None:
    for seed in range(SEED, SEED + (8 if PROOF else 1)):
        outcomes = torn_program(Program.random(seed, LENGTH, **KINDS[kind]), error, some(f"{kind} {error} {seed}"))
        require_sound(outcomes)
        called.update(one.call for one in outcomes)


@pytest.mark.proof
@pytest.mark.parametrize("name", scripts() if PROOF else ())
def test_a_call_of_a_script_is_done_or_undone_or_noticed(called: Counter[str], name: str) -> None:
    script = scripts()[name]
    error, case = random.Random(name).choice(list(ERRORS)), random.Random(name).choice(script.cases)
    outcomes = torn_script(script, case, error, some(f"{name} {SEED}"))
    require_sound(outcomes)
    called.update(one.call for one in outcomes)


@pytest.mark.proof
def test_every_public_call_was_ended(called: Counter[str]) -> None:
    """If this fails alone, it ran without the tests before it."""
    assert PUBLIC - set(called) - ELSEWHERE == set()


def test_without_the_guard_wrong_states_go_unnoticed() -> None:
    """Switches off the guard that raises `Broken`: at some point a wrong state must follow."""
    for seed in range(SEED, SEED + 20):
        with mock.patch.object(Guard, "require_whole"), mock.patch.object(stepping, "PER_ROW", 3):
            outcomes = torn_program(Program.random(seed, LENGTH), "MemoryError", some(f"{seed}"))
        if any(one.kind == "wrong" for one in outcomes):
            return
    raise AssertionError("every call was done, undone or noticed")

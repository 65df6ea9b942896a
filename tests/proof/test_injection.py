"""Raises exceptions inside calls of a few random programs; with MEMSTATE_PROOF=1 of many programs and of all scripts.

See `tests/proof/injection`; `python -m tests.proof.injection` prints the result of each program.
"""

import os
import random
from unittest import mock

import pytest

from memstate.engine import stepping
from memstate.guard import Guard
from tests.proof.injection.torn import KINDS, PUBLIC, Outcome, Places, scripts, torn_program, torn_script
from tests.proof.injection.verdict import ERRORS
from tests.proof.stateful.program import Program
from tests.proof.stateful.script import Script
from tests.support.sampling import PROOF

SEED = int(os.environ.get("MEMSTATE_SEED", "1"))
OFTEN = 2 if PROOF else 12  # one of so many calls is ended
LENGTH = 60 if PROOF else 20  # operations of a program
SEEDS = range(SEED, SEED + (8 if PROOF else 1))
# no program or script calls them through the machine: they only read, or end the manager; are called in other calls;
# belong to a pool alone, or to a stream; test_parked_injection.py and test_a_trip_ends_at_any_moment end the last three
ELSEWHERE = {
    "close", "sheet", "info", "wait", "infos", "stats", "ready",
    "find", "offer", "admitted", "bring", "save", "added", "used", "require_own", "reset", "miscounts",
    "copy", "zero", "release", "run_data", "keep_path", "use_stream",
    "clear", "read", "write",
}  # fmt: skip

pytestmark = pytest.mark.script


def some(seed: str) -> Places:
    """Returns a function that chooses a place in some calls."""
    chance = random.Random(seed)
    return lambda: [] if chance.randrange(OFTEN) else [chance.random()]


def torn(name: str, script: Script, error: str, chosen: Places) -> list[Outcome]:
    """Runs a case of a script; see `torn_script`."""
    return torn_script(script, random.Random(name).choice(script.cases), error, chosen)


def require_sound(outcomes: list[Outcome]) -> None:
    assert [one for one in outcomes if one.kind == "wrong"] == []


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(5)
def test_a_call_is_done_or_undone_or_noticed(kind: str, error: str) -> None:
    for seed in SEEDS:
        program = Program.random(seed, LENGTH, **KINDS[kind])
        require_sound(torn_program(program, error, some(f"{kind} {error} {seed}")))


@pytest.mark.proof
@pytest.mark.parametrize("name", scripts() if PROOF else ())
def test_a_call_of_a_script_is_done_or_undone_or_noticed(name: str) -> None:
    error = random.Random(name).choice(list(ERRORS))
    require_sound(torn(name, scripts()[name], error, some(f"{name} {SEED}")))


@pytest.mark.proof
def test_programs_and_scripts_make_every_public_call() -> None:
    """So the tests above can end it."""
    programs = [Program.random(seed, LENGTH, **given) for seed in SEEDS for given in KINDS.values()]
    whole = [torn_program(program, "MemoryError", list) for program in programs]
    whole += [torn(name, script, "MemoryError", list) for name, script in scripts().items()]
    assert PUBLIC - {one.call for outcomes in whole for one in outcomes} - ELSEWHERE == set()


def test_without_the_guard_wrong_states_go_unnoticed() -> None:
    """Switches off the guard that raises `Broken`: at some point a wrong state must follow."""
    for seed in range(SEED, SEED + 20):
        with mock.patch.object(Guard, "require_whole"), mock.patch.object(stepping, "PER_ROW", 3):
            outcomes = torn_program(Program.random(seed, LENGTH), "MemoryError", some(f"{seed}"))
        if any(one.kind == "wrong" for one in outcomes):
            return
    raise AssertionError("every call was done, undone or noticed")

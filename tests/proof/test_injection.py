"""Raises exceptions at a few points of some public calls; with MEMSTATE_PROOF=1 at more points of every call.

See `tests/proof/injection`; `python -m tests.proof.injection` prints the result of each call.
"""

import os
import random
from functools import partial
from itertools import cycle
from unittest import mock

import pytest

import memstate as ms
from memstate.engine import stepping
from memstate.guard import Guard
from tests.proof.injection.scene import SCENES, calls, scene
from tests.proof.injection.verdict import ERRORS, outcomes
from tests.support.sampling import PROOF

SEED = int(os.environ.get("MEMSTATE_SEED", "1"))
POINTS = 24 if PROOF else 2
EACH = [(name, error) for name in SCENES for error in ERRORS]
CASES = EACH if PROOF else list(zip(SCENES, cycle(ERRORS), strict=False))
NAMES, WITH_KEYS = list(calls(scene("redirect"))), list(calls(scene("keyed")))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "error"), CASES)
def test_a_call_is_done_or_undone_or_noticed(name: str, error: str) -> None:
    turn = (list(SCENES).index(name) + SEED) % len(SCENES)
    require_sound(name, NAMES if PROOF else NAMES[turn :: len(SCENES)], error)


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", ERRORS)
def test_a_call_with_keys_is_done_or_undone_or_noticed(error: str) -> None:
    require_sound("keyed", WITH_KEYS, error)


def require_sound(name: str, names: list[str], error: str) -> None:
    """Raises an error at a few points of calls, and asserts that no state is wrong after it."""
    rng, results = random.Random(SEED), []
    for call in names:
        some = outcomes(scene(name), call, error, lambda count: rng.sample(range(1, count + 1), min(count, POINTS)))
        results += [(call, one) for one in some]
    assert [(call, one.place, one.text) for call, one in results if one.kind == "wrong"] == []
    assert {one.kind for _, one in results} >= {"undone", "noticed"}


def test_every_public_call_has_its_points() -> None:
    public = {
        name
        for kind in (ms.StateManager, ms.engine.pool.StatePool)
        for name in dir(kind)
        if not name.startswith("_") and callable(getattr(kind, name))
    }
    words = {word.split(" ")[0] for word in NAMES + WITH_KEYS}
    elsewhere = {"close", "run_data", "zero", "copy", "sheet"}
    named = words | {"info", "chunk", "claim", "release", "check"}
    assert public - named - elsewhere == set()


def test_without_the_guard_wrong_states_go_unnoticed() -> None:
    """Switches off the guard that raises `Broken`: at some point a wrong state must follow. Tries every 7th point."""
    for start in range(0, 49, 7):
        with mock.patch.object(Guard, "require_whole"), mock.patch.object(stepping, "PER_ROW", 3):
            results = outcomes(scene("redirect"), "plan", "MemoryError", partial(every_49th, start))
        if any(one.kind == "wrong" for one in results):
            return
    raise AssertionError("every 7th point was done, undone or noticed")


def every_49th(start: int, count: int) -> range:
    return range(1 + start, count + 1, 49)

"""Figures of parts that a manager does not have."""

import copy
import dataclasses
import json
import pickle
import re

import pytest

import memstate as ms
from tests.support.planes import LAYOUT

ABSENT = [
    ("prefix", "hit_tokens", "this manager has no prefix cache: build it with prefix=ms.Prefix()"),
    ("prefix", "prompts", "prefix=ms.Prefix()"),
    ("tiers", "host_states", "this manager has no tiers: build it with tiers=ms.Tiers()"),
    ("tiers", "prefetch", "tiers=ms.Tiers()"),
    ("chaos", "polls", "no faults are injected: call ms.testing.Faults"),
]


@pytest.mark.parametrize(("part", "figure", "why"), ABSENT)
def test_figures_of_what_a_manager_does_not_have_are_a_named_error(part: str, figure: str, why: str) -> None:
    absent = getattr(ms.StateManager(LAYOUT, slots=2, max_requests=2).stats(), part)
    with pytest.raises(ms.ConfigurationError, match=f"^{figure}: .*{re.escape(why)}"):
        getattr(absent, figure)
    assert not absent and repr(absent) == f"No{part.capitalize()}()"
    assert not hasattr(absent, "no_such_figure") and not hasattr(absent, "_ipython_display_")


def test_figures_with_absent_parts_are_copied_compared_and_shown_as_nothing() -> None:
    stats = ms.StateManager(LAYOUT, slots=2, max_requests=2).stats()
    for other in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert other == stats and not other.prefix and repr(other) == repr(stats)
    plain = json.loads(json.dumps(dataclasses.asdict(stats)))
    assert plain["prefix"] == plain["tiers"] == plain["chaos"] == {}
    assert not {"prefix cache", "tiers", "injected faults"} & {each.title for each in stats.sheet().sections}
    assert stats.prefix.sheet().title == "this manager has no prefix cache: build it with prefix=ms.Prefix()"
    assert stats.prefix != stats.tiers

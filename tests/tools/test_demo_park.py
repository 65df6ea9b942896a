"""The demo parks the requests that it would send back: tokens, logits and states stay those of the uncached run."""

from collections import Counter
from typing import Any

import pytest

from memstate_tools.demo import DemoReport, sentences
from tests.support.demo_talks import right

FORMS: dict[str, dict[str, Any]] = {
    "redirect": {"strategy": "redirect"},
    "ping-pong": {"strategy": "ping-pong"},
    "lazy": {"strategy": "lazy"},
    "none": {"strategy": "none"},
    "redirect at once": {"strategy": "redirect", "overlap": False},
    "redirect in place": {"strategy": "redirect", "engine": "in-place"},
    "lazy in place": {"strategy": "lazy", "engine": "in-place"},
    "arena": {"strategy": "redirect", "engine": "arena"},
    "mamba2": {"model": "mamba2"},
    "kda": {"model": "kda", "layout": "slot-major"},
    "drafts": {"speculate": "4"},
    "drafts at once": {"speculate": "4", "overlap": False},
    "trees": {"speculate": "tree"},
    "tails": {"tail": 8},
    "tails and lanes": {"tail": 8, "strategy": "ping-pong"},
    "long tails": {"tail": 16, "model": "mamba2"},
    "drafts in place": {"speculate": "4", "model": "kda", "engine": "in-place"},
    "sessions": {"sessions": 4},
    "files": {"storage": "file", "write": "back"},
    "failing claims": {"write": "selective", "fail_claims": 0.3},
    "few slots": {"slots": 9, "host_slots": 200},
    "one record": {"host_slots": 1},
}
FIGURES = ("parked", "parked_inside_a_page", "parked_behind_the_fence")
# forms of `make test`, and whether requests are sent back although they could park: turns, and without a free record
NEAR = {"redirect": False, "tails and lanes": False, "drafts": False, "sessions": True, "one record": True}


def parked(form: str, seed: int, requests: int) -> DemoReport:
    """Runs a form of the demo, and checks that it is right, that nothing waited, and that requests parked."""
    report = right(**{"park": True, "host_slots": 60, "requests": requests, "seed": seed} | FORMS[form])
    figures = report.to_json()
    assert figures["host_syncs_per_decode_step"]["max"] == 0 and figures["parked"] > 0
    assert not report.tiers or report.tiers.leaked_records == 0
    return report


@pytest.mark.parametrize(("form", "returns"), NEAR.items())
def test_requests_park_instead_of_going_back(form: str, returns: bool) -> None:
    """With drafts on their way, they are left out of the next plans first."""
    report = parked(form, seed=1, requests=10)
    figures = report.to_json()
    times, inside, behind = (figures[name] for name in FIGURES)
    assert times >= inside > 0 and times >= behind and (behind > 0 or form == "drafts")
    assert f"parked requests {times} times, {inside} inside a page, {behind} behind a forward" in sentences(report)[0]
    assert any("retracted, at random" in how for how in figures["ended"]) == returns
    assert (figures["refused"].get("records", 0) > 0) == (form == "one record")


@pytest.mark.proof
def test_all_forms_park_inside_pages_and_behind_forwards() -> None:
    total = Counter[str]()
    for seed, form in enumerate(FORMS, 1):
        figures = parked(form, seed, requests=24).to_json()
        total.update({name: figures[name] for name in FIGURES})
    assert all(0.3 * total["parked"] <= total[name] < total["parked"] for name in FIGURES[1:]), total


def test_without_park_no_request_parks() -> None:
    figures = right(host_slots=60, requests=5).to_json()
    assert [figures[name] for name in FIGURES] == [0, 0, 0]

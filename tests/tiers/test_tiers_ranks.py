"""Several ranks over tiers of their own start every request from the same length, whatever each of them has lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import memstate as ms
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.dispatch import Backend
from tests.support.serving import PAGE
from tests.support.tiered import Tiered, whole

ROOT = Path(__file__).parents[2]


def lives(ranks: int, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank did in its two lives."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.tiers_rank", str(rank), str(ranks), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    assert [len(each) for each in lines] == [2] * ranks, "\n".join(error for _, error in outputs)
    return lines


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_start_alike_with_host_memory_and_storage_that_differ(ranks: int, tmp_path: Path) -> None:
    found = lives(ranks, tmp_path)
    print(found[0])
    for life in range(2):
        assert all(rank[life]["starts"] == found[0][life]["starts"] for rank in found)
        assert any(start for start, _ in found[0][life]["starts"])
    assert found[0][1]["stored"] > 0  # the second life begins with an empty device


class Alone:
    """A group of one, so that what ranks do can be seen in one process."""


@pytest.fixture
def lonely(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> Tiered:
    """A rank of two, whose fellow always agrees."""
    from memstate.tiers import manager
    from memstate.tiers.prefetch import agreement

    monkeypatch.setattr(manager, "Ranks", lambda group: agreement.Alone())
    return Tiered(backend, tiers={"rank": 0, "ranks": 2, "group": Alone()}, every=PAGE)


@pytest.fixture
def keyed(lonely: Tiered) -> Tiered:
    from memstate.tiers.keys import Keys, fingerprint
    from tests.support.planes import LAYOUT
    from tests.support.tiered import KV

    lonely._keys = Keys(fingerprint("toy", LAYOUT, KV, lonely.page, 0, 2), lonely.page)
    return lonely


def fetched(at: Tiered, prompt: list[int]) -> ms.Fetch:
    fetch = at.mem.prefetch(prompt)
    while not fetch.done:
        at.mem.poll()
    at.mem.poll()
    return fetch


def test_what_was_agreed_on_stays_until_its_request_comes(keyed: Tiered) -> None:
    at, prompt = keyed, [*whole(1, 4), 7]
    at.cache_prompts(prompt)
    at.give_up(pages=60)
    fetch = fetched(at, prompt)
    assert fetch.length == 4 * PAGE
    at.below.host.states.evict(99)
    assert at.below.host.kv is not None
    at.below.host.kv.evict(99)
    row = at.start(prompt, fetch=fetch)
    assert at.mem.length(row) == 4 * PAGE
    at.prefill(row)
    at.end([row])
    at.empty()


def test_host_memory_without_an_agreement_is_not_used(keyed: Tiered) -> None:
    at, prompt = keyed, [*whole(1, 4), 7]
    at.cache_prompts(prompt)
    at.give_up(pages=60)
    row = at.start(prompt)
    assert at.mem.length(row) == 0
    at.mem.abort([row])
    at.empty()


def test_a_prefetch_given_up_keeps_nothing(keyed: Tiered) -> None:
    at, prompt = keyed, [*whole(1, 4), 7]
    at.cache_prompts(prompt)
    at.give_up(pages=60)
    at.below.cancel(fetched(at, prompt))
    at.empty()


def test_the_prefetch_of_another_prompt_is_refused(keyed: Tiered) -> None:
    at = keyed
    at.cache_prompts([*whole(1, 4), 7])
    at.give_up(pages=60)
    fetch = fetched(at, [*whole(1, 4), 7])
    at.note([*whole(2, 4), 7])
    with pytest.raises(InvalidArgument, match="begun for other tokens"):
        at.mem.admit([ms.Request("r", tokens=[*whole(2, 4), 7], fetch=fetch)])
    with pytest.raises(InvalidArgument, match="is not what this manager"):
        at.mem.admit([ms.Request("r", tokens=[*whole(2, 4), 7], fetch="fetch")])
    at.below.cancel(fetch)
    at.empty()


def test_kv_that_the_device_lost_meanwhile_is_not_taken_for_granted(keyed: Tiered) -> None:
    """It was not fetched, because the device had it then: every rank sees that alike, and starts without."""
    at, prompt = keyed, [*whole(1, 4), 7]
    at.cache_prompts(prompt)
    at.cache.evict_states(99)
    fetch = fetched(at, prompt)
    assert fetch.kv_pages == 4 and fetch.length == 4 * PAGE
    at.give_up(pages=60)
    row = at.start(prompt, fetch=fetch)
    assert at.mem.length(row) == 0
    at.mem.abort([row])
    at.empty()


def test_dense_records_are_for_one_rank() -> None:
    with pytest.raises(ConfigurationError, match="dense_slots=2 with 2 ranks"):
        ms.Tiers("toy", host_slots=2, ranks=2, group=Alone(), dense_slots=2)

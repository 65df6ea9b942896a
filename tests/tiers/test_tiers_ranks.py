"""Several ranks over tiers of their own start every request from the same length, whatever each of them has lost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memstate as ms
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.tiers import manager
from memstate.tiers.keys import Keys, fingerprint
from memstate.tokens import Prompt, encode
from tests.support.build import on
from tests.support.planes import LAYOUT
from tests.support.processes import run_ranks
from tests.support.serving import PAGE
from tests.support.tiered import KV, Tiered, whole
from tests.support.virtual import ByHand, MemoryStore

PROMPT = [*whole(1, 4), 7]


def lives(ranks: int, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank did in its two lives; how a prefetch ended then, on all ranks but the last, which went away."""
    outputs = run_ranks("tests.support.tiers_rank", ranks, folder)
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    assert [len(each) for each in lines] == [3] * (ranks - 1) + [2], "\n".join(error for _, error in outputs)
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
    assert [rank[2] for rank in found[:-1]] == [{"outcome": "lost"}] * (ranks - 1)


def test_ranks_without_a_group_are_refused() -> None:
    with pytest.raises(ms.ConfigurationError, match="init_process_group"):
        manager.Ranks()


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch, plain: Backend) -> Tiered:
    """A rank of two, whose fellow always agrees; a prompt of four pages and one token has gone down."""
    monkeypatch.setattr(manager, "Ranks", lambda group: None)
    at = Tiered(plain, tiers={"rank": 0, "ranks": 2, "group": object()}, every=PAGE)
    at._keys = Keys(fingerprint("toy", LAYOUT, KV, at.page, 0, 2), at.page)
    at.cache_prompts(PROMPT)
    at.cache.evict_states(99)
    return at


def test_what_was_agreed_on_stays_until_its_request_comes(keyed: Tiered) -> None:
    at = keyed
    at.give_up(pages=60)
    fetch = at.fetch(PROMPT)
    assert fetch.length == 4 * PAGE
    at.below.host.states.evict(99)
    assert at.below.host.kv is not None
    at.below.host.kv.evict(99)
    row = at.hit(4 * PAGE, PROMPT, fetch=fetch)
    at.prefill(row)
    at.end([row])


def test_host_memory_without_an_agreement_is_not_used(keyed: Tiered) -> None:
    at = keyed
    at.give_up(pages=60)
    row = at.hit(0, PROMPT)
    at.mem.end([row])
    at.below.cancel(at.fetch(PROMPT))  # and keeps nothing


def test_the_prefetch_of_another_prompt_or_manager_is_refused(keyed: Tiered) -> None:
    at, other = keyed, [*whole(2, 4), 7]
    at.give_up(pages=60)
    mine = at.fetch(PROMPT)
    storing = Tiered(Backend("reference"), tiers={"store": MemoryStore()})
    plain = on(Backend("reference"), LAYOUT, slots=4, max_requests=2, prefix=ms.Prefix(), page_size=PAGE)
    before = plain.stats()
    for call, says in (
        (lambda: at.mem.admit([ms.Request("r", tokens=other, fetch=mine)]), "begun for other tokens"),
        (lambda: at.mem.admit([ms.Request("r", tokens=other, fetch="fetch")]), "is not what this manager"),
        (
            lambda: plain.admit([ms.Request("r", tokens=PROMPT, fetch=mine)]),
            "this manager has no storage to fetch from",
        ),
        (lambda: plain.admit([ms.Request("r", fetch=mine)]), "this manager has no storage to fetch from"),
        (lambda: storing.below.ready(mine), "not what this manager's prefetch"),
        (lambda: storing.below.cancel(None), "not what this manager's prefetch"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match=says):
            call()
    assert plain.stats() == before
    at.below.cancel(mine)


def test_kv_that_the_device_lost_meanwhile_is_not_taken_for_granted(keyed: Tiered) -> None:
    """It was not fetched, because the device had it then: every rank sees that alike, and starts without."""
    at = keyed
    fetch = at.fetch(PROMPT)
    assert fetch.kv_pages == 4 and fetch.length == 4 * PAGE
    at.give_up(pages=60)
    at.hit(0, PROMPT, fetch=fetch)


def test_what_was_agreed_on_is_nothing_once_a_record_is_gone(keyed: Tiered) -> None:
    at = keyed
    at.give_up(pages=60)
    host = at.below.host
    keys = at._keys.of(Prompt(encode(PROMPT), None))
    assert host.kv is not None
    hit = host.agreed_hit(4 * PAGE, keys, 1)
    assert hit is not None and len(hit.pages) == 3
    host.kv.evict(1)
    assert host.agreed_hit(4 * PAGE, keys, 1) is None
    assert host.agreed_hit(4 * PAGE, keys, 4) is not None, "the device has all KV"
    host.states.evict(99)
    assert host.agreed_hit(4 * PAGE, keys, 4) is None


@pytest.fixture
def stocked(plain: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiered]:
    """A rank whose fellow always agrees, with room for one prompt in host memory; two lie in storage."""
    monkeypatch.setattr(manager, "Ranks", lambda group: None)
    place = {"rank": 0, "ranks": 2, "group": object(), "store": MemoryStore()}
    keys = Keys(fingerprint("toy", LAYOUT, KV, PAGE, 0, 2), PAGE)
    first = Tiered(plain, tiers=place)
    first._keys = keys
    first.cache_prompts(whole(1), whole(2))
    first.mem.close()
    at = Tiered(plain, tiers=place | {"host_slots": 1, "host_pages": 2, "executor": ByHand()})
    at._keys = keys
    yield at
    at.empty()


@pytest.mark.parametrize("late", range(4))
def test_B63_what_was_agreed_on_is_pinned_before_anything_takes_its_place(stocked: Tiered, late: int) -> None:
    """The other prompt's answer comes in any of the polls around the one that ends the first prefetch."""
    at, prompts = stocked, ([*whole(1), 1], [*whole(2), 1])
    for prompt in prompts:
        at.note(prompt)
    fetches = [at.mem.prefetch(prompt) for prompt in prompts]
    executor = at.below.settings.executor
    assert isinstance(executor, ByHand)
    held = [job for job in executor.jobs if not job.future.done()][1:]
    for poll in range(12):
        for job in [job for job in executor.jobs if not job.future.done()]:
            if (job not in held or poll >= late) and job.begin():
                job.finish()
        at.mem.poll()
    assert [fetch.length for fetch in fetches].count(2 * PAGE) >= 1
    for prompt, fetch in zip(prompts, fetches, strict=True):
        (row,) = at.admit(ms.Request("r", tokens=prompt, fetch=fetch))
        assert at.mem.info(row).length == fetch.length
        at.mem.end([row])

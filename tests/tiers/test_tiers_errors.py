"""Calls that tiers refuse, what a closed manager does, and what is left where something raises."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import memstate as ms
from memstate.errors import Asleep
from memstate.kernels.dispatch import Backend
from memstate.tiers import manager
from memstate.tiers.keys import Keys, fingerprint
from memstate.tiers.prefetch import agreement
from memstate.tiers.settings import Tiers
from memstate.tiers.stores.base import NoStore, Outcome
from memstate.tokens import Prompt
from tests.support.build import build
from tests.support.planes import LAYOUT
from tests.support.serving import PAGE
from tests.support.tiered import KV, Tiered, whole
from tests.support.virtual import ByHand, MemoryStore


def test_a_closed_manager_goes_on_without_tiers(plain: Backend) -> None:
    at = Tiered(plain, tiers={"store": MemoryStore()}, slots=4)
    prompts = [[*whole(n, 2), 7] for n in range(6)]
    at.cache_prompts(*prompts)
    at.mem.close()
    at.mem.close()
    for prompt in prompts:
        assert at.turn(prompt) in (0, 2 * PAGE)
        at.mem.poll()
    assert at.tiers.host_states == at.tiers.host_pages == 0
    with pytest.raises(ms.ConfigurationError, match="the manager is closed"):
        at.mem.prefetch(prompts[0])
    assert at.mem.match(prompts[0]).host_length == 0
    at.below.flush()


def test_kv_that_sleeps_is_not_filed(plain: Backend) -> None:
    """The engine's KV is not put to sleep by the manager; what cannot be packed is not there."""
    store = MemoryStore()
    at = Tiered(plain, tiers={"store": store, "write": "back"})
    at.cache_prompts(whole(1))
    assert at.pages_kv is not None
    at.mem.submit()
    at.pages_kv.sleep()
    with pytest.raises(Asleep):
        at.cache.evict_states(1)
    for call in (at.below.flush, at.mem.close):
        with pytest.raises(Asleep):
            call()
    assert at.tiers.host_pages == 0
    assert at.below.host.kv is not None and at.below.host.kv.pool.free == at.below.host.kv.pool.records
    at.pages_kv.wake()
    at.give_up(pages=60)
    at.pages_kv.sleep()
    before = at.mem.free_slots, at.mem.free_pages
    with pytest.raises(Asleep):
        at.mem.admit([ms.Request("r", tokens=[*whole(1), 1])])
    assert (at.mem.free_slots, at.mem.free_pages) == before
    at.pages_kv.wake()
    assert at.turn([*whole(1), 1], publish=False) == 2 * PAGE


@pytest.mark.parametrize("answer", [None, [], [Outcome.DONE] * 99, KeyError("x")])
def test_whatever_put_answers_is_a_failure_at_most(answer: Any, plain: Backend) -> None:
    store = MemoryStore()
    store.put = Mock(side_effect=[answer] * 9)  # type: ignore[method-assign]
    at = Tiered(plain, tiers={"store": store, "executor": ByHand()})
    at.cache_prompts(whole(1))
    at.mem.submit()
    at.mem.poll()
    at.drain()
    assert at.tiers.write_failed == 3 and at.tiers.written == 0  # a state and two pages


def test_an_executor_that_was_shut_down_loses_writes_alone(plain: Backend) -> None:
    executor = ByHand()
    at = Tiered(plain, tiers={"store": MemoryStore(), "executor": executor})
    at.cache_prompts(whole(1))
    executor.submit = Mock(side_effect=RuntimeError("shut down"))  # type: ignore[method-assign]
    at.mem.submit()
    at.mem.poll()
    at.mem.poll()
    assert at.tiers.write_failed == 3


@pytest.fixture
def stocked(plain: Backend, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiered]:
    """A rank whose fellow always agrees, with room for one prompt in host memory; two lie in storage."""
    monkeypatch.setattr(manager, "Ranks", lambda group: agreement.Alone())
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
        assert at.mem.length(row) == fetch.length
        at.mem.abort([row])


def test_records_of_one_axis_are_strangers_to_another(tmp_path: Path) -> None:
    """Both axes of a square plane leave scales of the same size. Exact records are others too."""
    layout = ms.StateLayout((ms.Plane("ssm", (2, 8, 8), torch.float32),), layers=1)
    marks, usual = set(), {"slots": 2, "max_requests": 1, "page_size": PAGE}
    for int8 in ({}, {"ssm": 0}, {"ssm": 1}, {"ssm": 2}):
        mem = build(layout, **usual, prefix=ms.Prefix(), tiers=Tiers("toy", 2, int8=int8, store=ms.FileStore(tmp_path)))
        assert mem.tiers is not None
        marks.add(mem.tiers.host.digests(Prompt(bytes(8 * PAGE), None), mem.match(range(PAGE)))[0])
        mem.close()
    assert len(marks) == 4


def test_no_store_keeps_nothing() -> None:
    store, memory = NoStore(), torch.zeros(4, dtype=torch.uint8)
    store.register(memory)
    assert store.exists(["a", "b"]) == [False, False]
    assert store.get(["a"], [memory.numpy()]) == [Outcome.MISSING]
    assert store.put(["a"], [memory.numpy()]) == [Outcome.FAILED]
    store.discard(["a"])
    store.close()

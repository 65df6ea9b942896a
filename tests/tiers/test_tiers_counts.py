"""Costs of saves and loads: submits, uploads and launches, and no wait for the device.

A save takes one upload and one launch for each batch that fits in staging. A load takes one upload
in all. In these tests, the staging of KV has room for all pages.
"""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.endings import unchecked
from tests.support.tiered import Tiered, whole
from tests.support.watch import Watch, real_launches

pytestmark = pytest.mark.sample


class Spent:
    """Counts what a manager spends; each call returns the costs since the last call."""

    def __init__(self, at: Tiered) -> None:
        self.at = at
        at.mem.submit()
        self()

    def __call__(self) -> tuple[int, int, dict[str, int]]:
        """Returns submits, uploads, and launches by name."""
        counts, submits = self.at.mem.backend.counts, self.at.mem.stats().packets
        assert counts.syncs == 0 and self.at.mem.stats().upload_waits == 0
        spent = submits - getattr(self, "_submits", 0), counts.uploads, dict(counts.launches)
        counts.reset()
        self._submits = submits
        return spent


@pytest.fixture
def poison() -> None:
    """Does nothing: poison would count as work of the device."""


def cached(backend: Backend, n: int, write: str, staging: int) -> tuple[Tiered, Spent]:
    """Returns a manager with n cached states of two pages each, and the count of what it spends."""
    tiers = {"write": write, "staging": staging, "host_slots": 32, "host_pages": 64}
    at = Tiered(backend, slots=40, rows=10, pages=60, tiers=tiers)
    rows = at.admit(*[ms.Request(i, tokens=whole(i + 1)) for i in range(n)])
    at.run(rows, publish=False)
    at.end(rows)
    unchecked()
    return at, Spent(at)


def batches(records: int, staging: int) -> int:
    return -(-records // staging)


EACH_SIZE = pytest.mark.parametrize(("n", "staging"), [(1, 1), (8, 1), (8, 2), (8, 16)])


@EACH_SIZE
def test_an_eviction_of_states_that_host_memory_lacks(n: int, staging: int, plain: Backend) -> None:
    at, spent = cached(plain, n, "back", staging)
    at.cache.evict_states(n)
    packs = batches(n, staging) + 1
    assert spent() == (0, packs, {"pack_slots": packs})
    at.mem.submit()
    assert spent() == (1, 1, {"ownership": 1}), "the slots are free: one packet for all"
    at.mem.poll()
    assert at.mem.match([*whole(1), 1]).host_length == 8 and spent() == (0, 0, {})


@EACH_SIZE
def test_a_poll_that_writes_through_and_an_admission_of_hits(n: int, staging: int, plain: Backend) -> None:
    at, spent = cached(plain, n, "through", staging)
    at.mem.poll()
    packs = batches(n, staging) + 1
    assert spent() == (0, packs, {"pack_slots": packs})
    at.mem.poll()
    at.cache.evict_states(n)
    assert spent() == (0, 0, {}), "host memory has all of it"
    at.cache.evict_pages(60)
    spent = Spent(at)
    rows = at.admit(*[ms.Request(i, tokens=[*whole(i + 1), 1]) for i in range(n)])
    assert [at.mem.info(row).length for row in rows] == [8] * n
    assert spent() == (1, 1 + 2, {"ownership": 1, "unpack_slots": packs})
    at.mem.plan(rows, 1)
    assert spent() == (1, 1, {"ownership": 1, "plan": 1}), "from there on a hit like any other"


def busy(at: Tiered) -> None:
    """Saves states, loads them and saves them again, with requests that end in all ways."""
    unchecked()
    first = 1 + 10 * len(at.known)
    prompts = [whole(first + i) for i in range(3)]
    rows = at.admit(*[ms.Request(i, tokens=tokens) for i, tokens in enumerate(prompts)])
    at.mem.settle(at.step(rows, run=False))
    at.end(rows)
    at.mem.submit()
    at.mem.poll()
    at.cache.evict_states(3)
    at.cache.evict_pages(60)
    rows = at.admit(*[ms.Request(i, tokens=[*tokens, 1]) for i, tokens in enumerate(prompts)])
    assert all(at.mem.info(row).length for row in rows)
    at.mem.settle(at.step(rows, run=False))
    at.mem.end(rows)
    at.cache.evict_states(9)
    at.mem.submit()
    at.mem.poll()


@pytest.mark.parametrize("write", ["through", "back"])
def test_nothing_but_launches_uploads_and_copies_reaches_the_device(write: str, backend: Backend) -> None:
    """The copies are between staging and host memory, one for each batch."""
    at = Tiered(backend, slots=12, tiers={"write": write})
    busy(at)  # a first run creates what later runs use again
    watch = Watch()
    rings = [ring for each in at.below.host.sets for ring in each.transfers._rings]
    watch.let_pass(at.mem, *rings)
    moved = at.moved
    with watch:
        busy(at)
    out_states, in_states, out_pages, in_pages = (now - then for now, then in zip(at.moved, moved, strict=True))
    assert (out_states, in_states, out_pages, in_pages) == (3, 3, 6, 6)
    assert dict(watch.seen) == {"copy_": 2 * (batches(3, 2) + 1)}
    assert at.mem.backend.counts.syncs == 0


def test_counted_launches_are_the_launches(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Tiered(backend, slots=12)
    with real_launches(monkeypatch) as seen:
        busy(at)
    assert len(seen) == (0 if backend.name == "reference" else at.mem.backend.counts.total_launches)
    assert at.mem.backend.counts.total_launches > 10

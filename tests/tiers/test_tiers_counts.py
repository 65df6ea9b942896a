"""Costs of saves and loads: submits, uploads and launches, and no wait for the device.

A save takes one upload and one launch for each batch that fits in staging. A load takes one upload
in all. In these tests, the staging of KV has room for all pages.
"""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.tiered_small import CPU, MOVED, push_down, run, tiered, whole
from tests.support.watch import Watch, real_launches

pytestmark = pytest.mark.sample


class Spent:
    """Counts what a manager spends; each call returns the costs since the last call."""

    def __init__(self, mem: ms.StateManager) -> None:
        self.mem, self.submits = mem, 0
        mem.submit()
        self()

    def __call__(self) -> tuple[int, int, dict[str, int]]:
        """Returns submits, uploads, and launches by name."""
        counts, before, stats = self.mem.backend.counts, self.submits, self.mem.stats()
        assert counts.syncs == 0 and stats.upload_waits == 0
        self.submits, spent = stats.packets, (counts.uploads, dict(counts.launches))
        counts.reset()
        return self.submits - before, *spent


@pytest.fixture
def poison() -> None:
    """Does nothing: poison would count as work of the device."""


def cached(n: int, write: str, staging: int) -> tuple[ms.StateManager, Spent]:
    """Returns a manager with n cached states of two pages each, and the count of what it spends."""
    tiers = {"write": write, "staging": staging, "host_slots": 32, "host_pages": 64}
    mem = tiered(CPU, tiers, slots=40, max_requests=10)
    run(mem, [whole(i + 1) for i in range(n)])
    return mem, Spent(mem)


def batches(records: int, staging: int) -> int:
    return -(-records // staging)


EACH_SIZE = pytest.mark.parametrize(("n", "staging"), [(1, 1), (8, 1), (8, 2), (8, 16)])


@EACH_SIZE
def test_an_eviction_of_states_that_host_memory_lacks(n: int, staging: int) -> None:
    mem, spent = cached(n, "back", staging)
    mem.prefix.evict_states(n)
    packs = batches(n, staging) + 1
    assert spent() == (0, packs, {"pack_slots": packs})
    mem.submit()
    assert spent() == (1, 1, {"ownership": 1}), "the slots are free: one packet for all"
    mem.poll()
    assert mem.match([*whole(1), 1]).host_length == 8 and spent() == (0, 0, {})


@EACH_SIZE
def test_a_poll_that_writes_through_and_an_admission_of_hits(n: int, staging: int) -> None:
    mem, spent = cached(n, "through", staging)
    mem.poll()
    packs = batches(n, staging) + 1
    assert spent() == (0, packs, {"pack_slots": packs})
    mem.poll()
    mem.prefix.evict_states(n)
    assert spent() == (0, 0, {}), "host memory has all of it"
    mem.prefix.evict_pages(60)
    spent = Spent(mem)
    rows = mem.admit([ms.Request(i, tokens=[*whole(i + 1), 1]) for i in range(n)])
    assert [mem.info(row).length for row in rows] == [8] * n
    assert spent() == (1, 1 + 2, {"ownership": 1, "unpack_slots": packs})
    mem.plan(rows, 1)
    assert spent() == (1, 1, {"ownership": 1, "plan": 1}), "from there on a hit like any other"


def busy(mem: ms.StateManager, first: int = 1) -> None:
    """Saves states, loads them and saves them again."""
    prompts = [whole(first + i) for i in range(3)]
    push_down(mem, *prompts, together=True)
    assert run(mem, [[*prompt, 1] for prompt in prompts], keep=False) == [8] * 3
    push_down(mem)


@pytest.mark.parametrize("write", ["through", "back"])
def test_nothing_but_launches_uploads_and_copies_reaches_the_device(write: str, backend: Backend) -> None:
    """The copies are between staging and host memory, one for each batch."""
    mem = tiered(backend, {"write": write}, slots=12)
    busy(mem)  # a first run creates what later runs use again
    watch = Watch()
    rings = [ring for each in mem.tiers.host.sets for ring in each.transfers._rings]
    watch.let_pass(mem, *rings)
    before = mem.stats().tiers
    with watch:
        busy(mem, 11)
    after = mem.stats().tiers
    assert [getattr(after, name) - getattr(before, name) for name in MOVED] == [3, 3, 6, 6]
    assert dict(watch.seen) == {"copy_": 2 * (batches(3, 2) + 1)}
    assert mem.backend.counts.syncs == 0


def test_counted_launches_are_the_launches(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    mem = tiered(backend, slots=12)
    with real_launches(monkeypatch) as seen:
        busy(mem)
    assert len(seen) == (0 if backend.name == "reference" else mem.backend.counts.total_launches)
    assert mem.backend.counts.total_launches > 10

"""Saves never make the work stream wait, on the fake devices of `tests/support/fake_cuda.py`.

The streams that copy to the host lag behind: they do their work when the test says so, or when somebody waits for them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.prefix.policies import Lru, LruPages
from memstate.prefix.tree import Node
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.host.transfers import COPIES, Transfers
from tests.support import inside, owners
from tests.support.fake_cuda import FakeCuda, fake_cuda

DEVICE = "cuda:1"
LAYOUT = ms.StateLayout([ms.Plane("s", (4,), torch.float32)], layers=2)
KV = ms.StateLayout([ms.Plane("k", (2,), torch.int64)], layers=2)
PAGE = 2
BURST = 64


@pytest.fixture
def poison() -> None:
    """Does nothing: poison reads the device, so that the host would wait."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as fake:
        yield fake


class Burst:
    """A manager whose prefix cache holds states of prompts of one length, each with bytes of its own."""

    def __init__(self, cuda: FakeCuda, n: int = BURST, pages: int = 1, over: bool = True, **tiers: Any) -> None:
        total = n * pages + 8
        self.cuda, self.kv = cuda, Planes(KV, total, ms.Backend("reference", DEVICE))
        usual = {"model": "toy", "host_slots": n + 8, "host_pages": total, "kv": self.kv, "write": "back", "ahead": 0}
        self.mem = ms.StateManager(
            LAYOUT, device=DEVICE, backend="reference", slots=n + 2, max_requests=n, tracking=ms.Redirect(pages * PAGE),
            pages=ms.Pages(count=total, size=PAGE, per_row=pages + 1), prefix=ms.Prefix(Lru(), LruPages()),
            tiers=ms.Tiers(**(usual | tiers)),
        )  # fmt: skip
        self.host, self.main = self.mem.tiers.host, cuda.current_stream(1)  # type: ignore[union-attr]
        self.sets = self.host.sets
        self.down = [each.transfers._streams[0] for each in self.sets]  # type: ignore[union-attr]
        self.prompts = [[1000 * i + at for at in range(pages * PAGE)] for i in range(n)]
        self.rows = self.mem.admit([ms.Request(i, tokens=prompt) for i, prompt in enumerate(self.prompts)])
        self.mem.settle(self.mem.plan(self.rows, pages * PAGE))
        if over:
            self.mem.end(self.rows, keep="cache", tokens=self.prompts)
        self.mem.submit()
        self.number = dict[Node, int]()
        slots = inside.registers(self.mem).table.slots.tolist()
        for number, (register, node) in enumerate(owners.nodes(self.mem.prefix).items(), 1):  # type: ignore[union-attr]
            self.number[node] = number
            self.mem.planes["s"][:, slots[register]] = float(number)
            for at, page in enumerate(self.mem.prefix.tree.pages_to(node)):  # type: ignore[union-attr]
                self.kv["k"][:, page] = 1000 * number + at
        cuda.lag(*self.down)
        cuda.work.clear()
        cuda.waits.clear()

    @property
    def stats(self) -> Any:
        return self.mem.stats().tiers

    @property
    def waits(self) -> int:
        """Returns how often the work stream was made to wait."""
        return self.cuda.waits.count(self.main)

    def evict(self, n: int = BURST) -> None:
        """Evicts states, and overwrites their slots and pages right after."""
        if n:
            assert self.mem.prefix.evict_states(n) == n  # type: ignore[union-attr]
        self.mem.submit()
        self.mem.planes["s"].fill_(-1.0)
        self.kv["k"].fill_(-1)

    def land(self) -> None:
        """Lets all copies arrive."""
        self.cuda.synchronize(1)
        self.mem.poll()

    def kept(self) -> set[int]:
        """Returns the numbers of the states in host memory; checks their bytes, and those of all KV up to their
        lengths.
        """
        numbers = set()
        for node, number in self.number.items():
            digests = self.mem.tiers.keys.of_node(self.host.tree, node)
            if (entry := self.host.states.get(digests[-1])) is None:
                continue
            numbers.add(number)
            assert set(body(self.host.states.pool, entry.record, torch.float32)) == {float(number)}
            for at, digest in enumerate(digests):
                page = self.host.kv.get(digest)  # type: ignore[union-attr]
                assert set(body(self.host.kv.pool, page.record, torch.int64)) == {1000 * number + at}  # type: ignore[union-attr]
        return numbers


def body(pool: RecordPool, record: int, dtype: torch.dtype) -> list[float]:
    values: list[float] = torch.from_numpy(pool.buffer(record)[-32:].copy()).view(dtype).tolist()
    return values


@pytest.mark.parametrize("staging", [1, 2, BURST])
def test_an_eviction_of_64_states_adds_no_wait(cuda: FakeCuda, staging: int) -> None:
    """States that find room in staging are saved.

    The others are lost, and counted. In this test KV always finds room.
    """
    at = Burst(cuda, staging=staging)
    at.evict()
    assert at.waits == 0
    assert (at.stats.states_out, at.stats.unstaged, at.stats.refused) == (staging, BURST - staging, 0)
    at.land()
    assert at.kept() == set(range(1, staging + 1)) and at.waits == 0
    at.mem.audit().raise_if_leaking()


def test_staging_is_free_again_when_the_host_hears_of_it(cuda: FakeCuda) -> None:
    at = Burst(cuda, n=8, staging=2)
    for arrived, saved, lost in ((0, 2, 0), (0, 2, 2), (1, 4, 2)):  # states that are saved together are one copy
        cuda.advance(at.down[0], arrived)
        at.evict(2)
        assert (at.stats.states_out, at.stats.unstaged, at.waits) == (saved, lost, 0)


def test_a_save_that_waits_for_a_forward_keeps_its_staging(cuda: FakeCuda) -> None:
    at = Burst(cuda, n=5, over=False, staging=2)
    at.mem.extend(at.rows[:1], [2 * PAGE])
    step = at.mem.plan(at.rows[:1], 1)
    at.mem.end(at.rows[:1])  # this release waits for the forward, and so do later changes
    at.mem.end(at.rows[1:], keep="cache", tokens=at.prompts[1:])
    for lost in (0, 2):
        assert at.mem.prefix.evict_states(2) == 2  # type: ignore[union-attr]
        assert (at.stats.states_out, at.stats.unstaged) == (0, lost)
    at.mem.submit(step)
    assert at.stats.states_out == 2 and at.waits == 0
    at.land()
    states, kv = (each.transfers for each in at.sets if each)
    assert (states.room, kv.room) == (2, kv.staging)


def test_states_go_down_before_their_eviction(cuda: FakeCuda) -> None:
    """Each poll saves as many states as fit in staging; a later burst finds them in host memory."""
    at = Burst(cuda, staging=4, ahead=16)
    for poll in range(1, 9):
        at.mem.poll()
        assert at.stats.states_out == min(4 * poll, 16)
        for stream in at.down:
            cuda.advance(stream, 99)
    packs = len(cuda.given("pack_slots"))
    at.evict(16)
    assert len(cuda.given("pack_slots")) == packs and at.waits == 0
    assert at.stats.unstaged == 0 and at.kept() == set(range(1, 17))


@pytest.mark.parametrize(
    ("write", "ahead", "free", "ahead_of_time"),
    [("back", 8, 8, 0), ("back", 8, 7, 8), ("selective", 8, 7, 0), ("back", 0, 2, 0)],
)
def test_states_go_ahead_only_while_slots_are_short(
    cuda: FakeCuda, write: str, ahead: int, free: int, ahead_of_time: int
) -> None:
    """Polls save states while fewer than `ahead` slots are free; "selective" saves only states with a hit."""
    at = Burst(cuda, n=16, write=write, ahead=ahead, staging=16)
    at.evict(free - at.mem.free_slots)
    out = at.stats.states_out
    for _ in range(2):
        at.mem.poll()
        assert at.stats.states_out - out == ahead_of_time


def test_the_default_is_a_sixteenth_of_host_memory(cuda: FakeCuda) -> None:
    defaults = []
    for host_slots, write in ((15, "back"), (40, "back"), (40, "selective"), (40, "through"), (5000, "back")):
        at = Burst(cuda, n=2, host_slots=host_slots, write=write, ahead=None)
        defaults.append(at.mem.tiers._ahead)  # type: ignore[union-attr]
    assert defaults == [0, 2, 2, 0, 64]


def test_what_is_due_waits_for_staging_and_nothing_waits_for_it(cuda: FakeCuda) -> None:
    """A poll writes through as many states as fit in staging; in the end all are saved."""
    at = Burst(cuda, write="through", staging=4)
    polls = 0
    while len(at.mem.tiers._due):  # type: ignore[union-attr]
        at.mem.poll()
        polls += 1
        assert at.stats.states_out == min(4 * polls, BURST)
        at.mem.poll()
        assert at.stats.states_out == min(4 * polls, BURST), "staging is full"
        for stream in at.down:
            cuda.advance(stream, 99)
    assert (polls, at.waits, at.stats.unstaged) == (BURST // 4, 0, 0)
    at.land()
    assert at.kept() == set(range(1, BURST + 1))


def test_kv_beyond_staging_goes_down_in_several_polls(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging has room for 3 of a prompt's 8 pages, and the state comes last. Without polls, an eviction loses it."""
    monkeypatch.setattr("memstate.tiers.sizing.KV_STAGING", 0)
    for polls, saved in ((((3, 0), (6, 0), (8, 1), (8, 1)), {1}), ((), set())):
        at = Burst(cuda, n=1, pages=8, write="through", staging=3)
        for pages, states in polls:
            at.mem.poll()
            assert (at.stats.pages_out, at.stats.states_out) == (pages, states)
            for stream in at.down:
                cuda.advance(stream, 99)
        at.evict(1)
        assert (at.stats.unstaged, at.waits) == (1 - len(saved), 0)
        at.land()
        assert at.kept() == saved


def test_flush_waits_on_the_host_and_loses_nothing(cuda: FakeCuda) -> None:
    at = Burst(cuda, n=9, staging=2)
    at.mem.tiers.flush()  # type: ignore[union-attr]
    assert at.stats.states_out == 9 and at.stats.unstaged == 0 and at.waits == 0
    assert at.kept() == set(range(1, 10))


ENDINGS: dict[str, Callable[[ms.StateManager], object]] = {
    "sleep": lambda mem: mem.device.sleep(), "recover": lambda mem: mem.recover(keep=False),
    "clear": lambda mem: mem.tiers.clear(), "flush": lambda mem: mem.tiers.flush(), "close": lambda mem: mem.close(),
}  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_whatever_is_on_its_way_arrives_first(cuda: FakeCuda, ending: str) -> None:
    at = Burst(cuda, n=4, staging=4)
    cache: Any = at.mem.prefix
    cache.evict_states(2)
    cache.evict_pages(2)
    at.land()
    cache.evict_states(1)  # the save is on its way
    at.mem.end(at.mem.admit([ms.Request(0, tokens=[*at.prompts[0], 1])]))  # the load is on its way
    at.mem.poll()
    assert at.host.loads and at.host.backups
    ENDINGS[ending](at.mem)
    assert not at.host.loads and not at.host.backups
    assert [each.cache._pinned for each in at.sets if each] == [0, 0]
    entries = [*at.host.states.entries()]
    bodies = {value for entry in entries for value in body(at.host.states.pool, entry.record, torch.float32)}
    assert bodies >= ({1.0, 2.0, 3.0} if ending in ("sleep", "flush") else set())


def test_a_load_is_waited_for_by_the_step_that_uses_it(cuda: FakeCuda) -> None:
    at = Burst(cuda, n=4, pages=2, staging=4)
    at.evict(4)
    at.mem.prefix.evict_pages(99)  # type: ignore[union-attr]
    at.land()
    rows = at.mem.admit([ms.Request(i, tokens=[*prompt, 1]) for i, prompt in enumerate(at.prompts)])
    assert [at.mem.info(row).length for row in rows] == [2 * PAGE] * 4
    loads = cuda.given("unpack_slots")
    assert loads and at.waits == 0
    at.mem.plan(rows, 1)
    assert at.waits > 0 and all(cuda.given("plan")[-1].behind(load) for load in loads)


def test_a_load_waits_for_bytes_that_are_still_leaving(cuda: FakeCuda) -> None:
    at = Burst(cuda, n=2, staging=2)
    at.evict(2)
    at.mem.prefix.evict_pages(99)  # type: ignore[union-attr]
    (row,) = at.mem.admit([ms.Request(0, tokens=[*at.prompts[0], 1])])
    step = at.mem.plan([row], 1)
    assert at.mem.info(row).length == PAGE + 1 and (at.mem.planes["s"][:, step.read.long()] == 1.0).all()
    assert (at.kv["k"][:, owners.pages_of(at.mem, row)[0]] == 1000).all()


# -- pages in batches ------------------------------------------------------------------------------


def moved(cuda: FakeCuda, records: Sequence[int], staging: int) -> tuple[list[str], list[str]]:
    """Saves pages 1, 2 .. to these records, loads them into other pages, and checks the bytes.

    Returns the work of the save and of the load.
    """
    planes = Planes(KV, 2 * len(records), ms.Backend("reference", DEVICE))
    pool = RecordPool(256, planes.layout.bytes_per_slot + 64)
    transfers = Transfers(Packing(planes), pool, staging)
    pages = list(range(1, len(records) + 1))
    for page in pages:
        planes["k"][:, page] = page
    cuda.work.clear()
    transfers.out(pages, records)
    out = [work.what for work in cuda.work if work.stream is transfers._streams[0]]
    pool.memory[:, :64] = 7
    transfers.into([page + len(pages) for page in pages], records)
    into = [work.what for work in cuda.work if work.stream is transfers._streams[1]]
    for page, record in zip(pages, records, strict=True):
        assert set(body(pool, record, torch.int64)) == {page}
        assert (planes["k"][:, page + len(pages)] == page).all()
    return out, into[1:]  # the first work is the upload


SCATTERED = [(7 * i) % 256 for i in range(64)]


RUNS = {n: list(range(0, 2 * n, 2)) for n in (COPIES, COPIES + 1)}
# numbers of the records, records that fit in staging, bytes of a large record, work of the save, work of the load
MOVES: list[tuple[list[int], int, int, list[str], list[str]]] = [
    (list(range(9, 73)), 64, 2**23, ["copy_"], ["copy_", "unpack_slots"]),
    ([*range(30), *range(40, 74)], 64, 2**23, ["copy_"] * 2, ["copy_", "copy_", "unpack_slots"]),
    (SCATTERED, 64, 2**23, ["pack_slots"], ["unpack_slots"]),
    (RUNS[COPIES], 64, 2**23, ["copy_"] * COPIES, [*["copy_"] * COPIES, "unpack_slots"]),
    (RUNS[COPIES + 1], 64, 2**23, ["pack_slots"], ["unpack_slots"]),
    (SCATTERED, 24, 2**23, ["pack_slots"] * 3, ["unpack_slots"]),
    (SCATTERED, 64, 64, ["copy_"] * 64, [*["copy_"] * 64, "unpack_slots"]),
]


@pytest.mark.parametrize(("records", "staging", "large", "out", "into"), MOVES)
def test_a_batch_is_one_launch_or_a_few_copies(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, records: list[int], staging: int, large: int, out: list[str],
    into: list[str],
) -> None:  # fmt: skip
    """A few runs of neighbouring records take one copy per run; many runs take one launch.

    Large records are always copied.
    """
    monkeypatch.setattr("memstate.tiers.host.transfers.LARGE", large)
    assert moved(cuda, records, staging) == (out, into)


@pytest.mark.parametrize("turn", range(2))
def test_no_staged_record_is_overwritten_on_its_way(cuda: FakeCuda, generator: torch.Generator, turn: int) -> None:
    """Saves batches of every size that fits to neighbouring or scattered records, while copies lag behind at random."""

    def chance(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    planes = Planes(KV, 200, ms.Backend("reference", DEVICE))
    pool = RecordPool(400, planes.layout.bytes_per_slot + 64)
    transfers = Transfers(Packing(planes), pool, 16)
    down, main = transfers._streams[0], cuda.current_stream(1)
    cuda.lag(down)
    records, number = torch.randperm(400, generator=generator).tolist(), 0
    cuda.waits.clear()
    while number < 100:
        n = min(transfers.room, 1 + chance(16), 100 - number)
        pages, targets = list(range(number + 1, number + n + 1)), records[number : number + n]
        for page in pages:
            planes["k"][:, page] = page
        if n:
            transfers.out(pages, sorted(targets) if chance(2) else targets)
        planes["k"].fill_(-1)
        assert transfers.room == 16 - sum(len(of) for _, of in transfers._leaving)
        number += n
        cuda.advance(down, chance(4))
    assert main not in cuda.waits
    cuda.synchronize(1)
    numbers = sorted(int(body(pool, record, torch.int64)[0]) for record in records[:100])
    assert numbers == list(range(1, 101))


@pytest.mark.parametrize("policy", [ms.policies.ReturnRate, ms.policies.Lru])
def test_states_go_ahead_before_the_first_eviction(policy: type[ms.policies.StatePolicy]) -> None:
    """A policy that ranks only at evictions must still say which states come next."""
    layout = ms.StateLayout(planes=(ms.Plane("ssm", (4,), torch.float32),), layers=1)
    mem = ms.StateManager(
        layout, slots=20, max_requests=20, tracking=ms.Redirect(8), pages=ms.Pages(size=4),
        prefix=ms.Prefix(states=policy()), tiers=ms.Tiers("toy", host_slots=64, write="back", ahead=8),
    )  # fmt: skip
    texts = [[i] * 9 for i in range(18)]
    rows = mem.admit([ms.Request(i, tokens=text) for i, text in enumerate(texts)])
    mem.settle(mem.plan(rows, 8))
    mem.end(rows, keep="cache", tokens=texts)
    mem.submit()
    mem.poll()
    assert mem.stats().tiers.states_out == 8 and mem.stats().prefix.evicted_states == 0

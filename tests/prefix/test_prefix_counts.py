"""Costs of a scheduler step with a prefix cache: one submit and one upload for everything, and no wait."""

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from memstate.slots.journal import Change
from tests.support import inside
from tests.support.build import build
from tests.support.scan import scan_registers

LAYOUT = ms.StateLayout([ms.Plane("s", (4,), torch.float32)], layers=1)
KINDS = {
    "none": (ms.NoTracking(8), False),
    "ping-pong": (ms.PingPong(8), False),
    "lazy": (ms.LazyPingPong(8), False),
    "redirect, read": (ms.Redirect(8), True),
    "redirect, copied": (ms.Redirect(8), False),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def poison() -> None:
    """Does nothing: poison would count as work of the device."""


def prompt(n: int, length: int = 14) -> list[int]:
    return [1000 * n + i for i in range(length)]


def manager(backend: Backend, kind: str, n: int, **more: object) -> ms.StateManager:
    tracking, direct = KINDS[kind]
    sizes = {"slots": 20 * n, "max_requests": 24 * n, "pages": 40 * n, "page_size": 4, "pages_per_row": 40 * n}
    policies = {"prefix": ms.Prefix(states=Lru(), pages=LruPages()), "tracking": tracking, "direct_hits": direct}
    return build(LAYOUT, device=backend.device, backend=backend.name, **sizes, **policies, **more)


def text(mem: ms.StateManager, row: ms.Row, first: int) -> list[int]:
    return prompt(first, mem.info(row).length + 1)


def prefilled(mem: ms.StateManager, numbers: range, length: int = 14) -> ms.Rows:
    """Returns requests that have read their prompts, with snapshots on the way."""
    rows = mem.admit([ms.Request(n, tokens=prompt(n, length)) for n in numbers])
    while mem.info(rows[0]).length < length:
        mem.extend(rows, [20] * len(rows))
        mem.settle(mem.plan(rows, [min(mem.info(row).next_boundary, length) - mem.info(row).length for row in rows]))
    return rows


@pytest.mark.parametrize("n", [1, 12])
@every_kind
def test_any_mix_with_a_cache_is_one_submit(kind: str, n: int, backend: Backend) -> None:
    """Mixes ends with and without publication, matches, hits, insertions, evictions of states and pages, and a plan."""
    mem = manager(backend, kind, n)
    assert mem.prefix
    length = 12 if kind == "none" else 14  # without tracking, the only state is at the end
    for numbers in (range(n), range(n, 2 * n)):
        mem.end(
            prefilled(mem, numbers, length), keep="cache", lengths=[12] * n, tokens=[prompt(i, length) for i in numbers]
        )
    rows = prefilled(mem, range(2 * n, 6 * n), length)
    keys = [text(mem, row, 2 * n + i) for i, row in enumerate(rows)]
    mem.submit()
    if backend.device.type == "cuda":
        torch.cuda.synchronize()
    before, submits = mem.stats().prefix, mem.stats().packets
    mem.backend.counts.reset()

    per_request = 1 + mem.tracking.lanes_at_admission(True)
    mem.publish(rows[:n], keep="cache", tokens=keys[:n])
    mem.end(rows[n : 2 * n], keep="cache", tokens=keys[n : 2 * n])
    mem.end(rows[2 * n : 3 * n], keep="cache", tokens=keys[2 * n : 3 * n])
    mem.end(rows[3 * n :])
    going = [number for number in range(6 * n) if mem.match(prompt(number)).length]
    hits = [ms.Request(f"again {number}", tokens=prompt(number)) for number in going[-2 * n :]]
    fresh = max(1, mem.free_slots // per_request - len(hits) + 1)
    new = mem.admit(hits + [ms.Request(f"new {i}", tokens=prompt(100 + i, 2)) for i in range(fresh)])
    mem.extend(new[-1:], [4 * (mem.free_pages + 3)])
    batch = [*rows[:n], *new]
    mem.plan(batch, [min(mem.info(row).next_boundary - mem.info(row).length, 2) for row in batch])

    after = mem.stats().prefix
    assert before and after and mem.stats().packets - submits == 1
    counts = mem.backend.counts
    assert (counts.uploads, counts.syncs) == (1, 0)
    assert dict(counts.launches) == {"ownership": 1, "run_data": 1, "plan": 1}
    assert after.inserted > before.inserted and len(hits) == 2 * n
    assert after.hit_tokens - before.hit_tokens == 12 * 2 * n
    assert after.evicted_states > before.evicted_states and after.evicted_pages > before.evicted_pages
    assert scan_registers(inside.registers(mem)).problems == []
    mem.audit().raise_if_leaking()
    mem.device.check()


def test_the_journal_names_every_change_of_owners(backend: Backend) -> None:
    mem = manager(backend, "redirect, copied", 1, journal=50, overlap=False)
    (row,) = mem.admit([ms.Request("of 8", length=8)])
    live = 3 * row.index
    mem.settle(mem.plan([row], 8))
    (kept,) = mem.end([row], keep="cache", tokens=[prompt(0, 8)])
    assert kept and mem.prefix and mem.prefix.evict_states(1)
    changes: list[Change] = mem.journal.changes
    assert [change.serial for change in changes] == list(range(1, len(changes) + 1))
    told = [(change.what, change.register, change.source, change.label) for change in changes]
    assert told == [("claim", live, 0, 0), ("move", kept.register, live, 8), ("release", kept.register, 0, 8)]
    assert changes[0].owner == changes[1].source_owner == f"row {row.index} (request 'of 8') live"
    assert str(kept.register) in changes[2].owner
    # move and release share the next packet
    assert [change.submit for change in changes] == [1, 2, 2] and mem.stats().packets == 1
    for n in range(60):
        mem.end(mem.admit([ms.Request(n)]))
    assert len(mem.journal.changes) == 50 and mem.journal.changes[-1].serial == 3 + 2 * 60


@pytest.mark.sample(8)
@pytest.mark.parametrize("n", [1, 4, 150])
@pytest.mark.parametrize("calls", ["lists", "one by one"])
@pytest.mark.parametrize("place", ["same rows", "other rows", "same sessions"])
@every_kind
def test_turns_that_end_and_turns_that_come_are_one_upload(
    kind: str, place: str, calls: str, n: int, backend: Backend
) -> None:
    """States move from the rows to holders, and others from holders to the rows. 150 turns move up to 900 states."""
    tracking, direct = KINDS[kind]
    sizes = {"slots": 6 * n, "max_requests": 2 * n if place == "other rows" else n}
    mem = build(LAYOUT, device=backend.device, backend=backend.name, tracking=tracking, direct_hits=direct, **sizes)
    sessions, size = [mem.sessions.open(at) for at in range(2 * n)], n if calls == "lists" else 1
    first, others = range(n), range(2 * n - 1, n - 1, -1)
    rows, going = list[ms.Row](), range(0)
    for turn, coming in enumerate((first, others, first, first if place == "same sessions" else others)):
        ended, rows = rows, []
        mem.backend.counts.reset()
        for at in range(0, n, size):
            part = slice(at, at + size)
            tokens = [prompt(of, mem.info(row).length) for of, row in zip(going[part], ended[part], strict=True)]
            mem.end(ended[part], keep="cache", tokens=tokens)
            rows += mem.admit([ms.Request(at, tokens=prompt(at, 99), session=sessions[at]) for at in coming[part]])
        before = [mem.info(row).length for row in rows]
        for t in range(3):  # so that lanes get states, too
            step = mem.plan(rows, [8] * n)
            if turn > 1 and not t:
                counts = mem.backend.counts
                assert (counts.uploads, dict(counts.launches)) == (1, {"ownership": 1, "plan": 1})
                assert mem.planes["s"][0, step.read, 0].tolist() == [*coming]
                assert before == [48 if coming == going else 24] * n
                scan_registers(inside.registers(mem))
            for slots in (step.write, step.snapshot):
                mem.planes["s"][0, slots] = torch.tensor(coming, dtype=torch.float32, device=backend.device)[:, None]
            mem.settle(step)
        going = coming
    mem.audit().raise_if_leaking()
    mem.device.check()

"""Tests rules that no other quick test checks: mutants of them had survived."""

import random
from pathlib import Path

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.levels import bitmap_ints, bitmap_words
from memstate.kernels.tables import COUNTERS, HEADER_INTS, Count, Rules
from memstate.slots import commands
from tests.kernels.test_plan_kernel import (
    NO_LIMIT,
    VARIANTS,
    RandomFile,
    batch_packet,
    copy_of,
    random_batch,
    same,
    set_free,
    stale_marks,
    stale_record,
)
from tests.support.kernel_runs import not_interpreted

ROOT = Path(__file__).parents[2]

# A program, because a process that interprets kernels cannot compile them.
COUNT_BARRIERS = """
import json
from memstate_tools.calls import all_calls
from memstate_tools.compile import compile_calls
names = ("claim", "ownership", "audit", "plan[none]", "plan[redirect]")
calls = [call for call in all_calls() if call.name in names]
print(json.dumps({report.kernel: report.source_barriers for report in compile_calls(calls, ("sm_90",))}))
"""


def manager(backend: Backend, tracking: ms.Tracking, **forward: int) -> ms.StateManager:
    """Returns a manager with four slots for two requests."""
    layout = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), 1)
    return ms.StateManager(
        layout, slots=4, max_requests=2, tracking=tracking, overlap=False,
        forward=ms.Forward(**forward), backend=backend.name, device=backend.device,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.proof  # other runs compare the barriers with the compile records
def test_barriers_stand_between_what_phases_write_and_read() -> None:
    assert not_interpreted("-c", COUNT_BARRIERS) == {
        "claim": 2, "ownership": 8, "audit": 2, "plan[none]": 1, "plan[redirect]": 3,
    }  # fmt: skip


@pytest.mark.sample(interpreter=1)
def test_a_claim_passes_over_words_that_no_level_has(backend: Backend) -> None:
    """The last word of the summary also has bits for words that do not exist; at their places lies the summary."""
    capacity, free = 3_000, [5, 2_999]
    bitmap = torch.zeros(bitmap_ints(capacity), dtype=torch.int32, device=backend.device)
    for slot in free:
        bitmap[slot // 32] = 1 << slot % 32
    first = bitmap_words(capacity)
    bitmap[first], bitmap[first + 2] = 1, -1
    counters = torch.zeros(COUNTERS, dtype=torch.int32, device=backend.device)
    counters[Count.FREE] = len(free)
    assert backend.claim(bitmap, 40, counters).tolist() == [*free, *[0] * 38]


@pytest.mark.sample(interpreter=1)
def test_the_device_keeps_to_the_limit_of_a_plan(backend: Backend) -> None:
    mem = manager(backend, ms.Redirect(1))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows))
    mem.settle(mem.plan(rows, limit=1))
    assert (mem.stats().snapshots, mem.stats().degraded) == (1, 1)
    mem.audit().raise_if_leaking()
    mem.device.check()


def test_a_warm_up_leaves_the_batch_of_no_step(backend: Backend) -> None:
    """`warm_up` plans null rows, so the next plan must upload its batch, even if it equals the last one."""
    mem = manager(backend, ms.NoTracking(4))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows))
    ms.warm_up(mem)
    step = mem.plan(rows)
    assert step.rows.tolist() == [row.index for row in rows] and step.write.all()


def test_changes_that_do_not_fit_beside_a_batch_go_before_it(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "STEP_ROOM", HEADER_INTS)
    mem = manager(backend, ms.Redirect(1))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    before = mem.backend.counts.uploads
    for replay in (None, lambda: mem.launch(2)):
        step = mem.plan(rows, replay=replay)
        assert step.rows.tolist() == [row.index for row in rows] and step.write.all()
        mem.settle(step)
    assert mem.backend.counts.uploads - before == 2  # the second batch equals the first one, so it is not uploaded
    mem.audit().raise_if_leaking()


def test_drafts_of_a_row_given_up_say_nothing_of_its_next_request(backend: Backend) -> None:
    mem = manager(backend, ms.NoTracking(4), tail=2)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    step = mem.plan([a, b], 2, drafts=2)
    mem.submit(step)
    mem.end([b])
    (c,) = mem.admit([ms.Request("c")])
    assert c.index == b.index
    mem.accept(step, [1, 2])
    assert [mem.info(row).length for row in (a, c)] == [1, 0]
    step = mem.plan([a, c])
    assert step.before.tolist() == [1, 0] == step.lengths.tolist()
    mem.audit().raise_if_leaking()


def test_a_batch_is_looked_up_again_once_a_row_has_ended(backend: Backend) -> None:
    """A plan keeps the rows that it has looked up. A next plan with the same batch uses them, unless one has ended."""
    mem = manager(backend, ms.NoTracking(4))
    a, b = rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows), [True, False])
    step = mem.plan(rows)
    assert step.rows.tolist() == [0, b.index]
    mem.settle(step)
    mem.end([b])
    with pytest.raises(ms.StaleHandle):
        mem.plan(rows)
    assert mem.info(a).length == 1


@pytest.mark.sample(interpreter=1)
@pytest.mark.parametrize("variant", ["none", "lazy in place", "redirect"])
def test_more_rows_than_lanes_follow_the_rules(backend: Backend, variant: str) -> None:
    """A program plans 1024 rows at a time. The next 1024 get the slots that are left, and what is left of the limit."""
    batch, rng = 1300, random.Random(variant)
    strategy, lanes, in_place = VARIANTS[variant]
    file = RandomFile(rng, backend, batch, lanes)
    owned = set(file.file.table.slots.tolist())
    set_free(file.file.table, [slot for slot in range(1, file.capacity + 1) if slot not in owned])
    rows, tokens = random_batch(rng, file, batch)
    rules = Rules(strategy, lanes, file.every, in_place)
    for limit in (3, NO_LIMIT):
        here = file.file.table
        there, record = copy_of(here), stale_record(batch, here.cells)
        other = stale_record(batch, here.cells)
        packet = batch_packet((rows, tokens), limit, here.cells)
        marks = stale_marks(1, here.cells)
        backend.plan(here, packet.clone(), record, marks, rules)
        Backend("reference", backend.device).plan(there, packet, other, marks, rules)
        assert same(here, there) and all(map(torch.equal, record, other))

"""What broken copies of the library showed that no other test looks at, or none that is quick."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW, Result
from memstate.requests.steps import StepLog
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import RegisterFile

ROOT = Path(__file__).parents[2]

# Run as a program, because kernels that are interpreted in a process cannot be compiled in it.
COUNT_BARRIERS = """
import json
from memstate.cli.compile import compile_cases
from memstate.kernels.catalog import all_cases
names = ("claim", "ownership", "audit", "settle", "plan[none]", "plan[redirect]", "accept[none]", "accept[redirect]")
cases = [case for case in all_cases() if case.name in names]
print(json.dumps({report.kernel: report.source_barriers for report in compile_cases(cases, ("sm_90",))}))
"""


def manager(backend: Backend, tracking: ms.Tracking, reserve: int, overlap: bool = False) -> ms.StateManager:
    """Four slots for two requests."""
    layout = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), 1)
    return ms.StateManager(
        layout, slots=4, max_requests=2, tracking=tracking, reserve=reserve, overlap=overlap,
        backend=backend.name, device=backend.device,
    )  # fmt: skip


def test_barriers_stand_between_what_phases_write_and_read() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-c", COUNT_BARRIERS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "claim": 2, "ownership": 8, "audit": 2, "settle": 2,
        "plan[none]": 1, "plan[redirect]": 3, "accept[none]": 1, "accept[redirect]": 3,
    }  # fmt: skip


def test_settle_skips_steps_that_meant_nothing(backend: Backend) -> None:
    """The labels above K of a row that had ended are of a dead step; they may not supersede what is real."""
    for result, kept in ((Result.DEAD, [True, True, True]), (Result.ALIVE, [True, False, True])):
        file = RegisterFile(SlotAllocator(8, backend), rows=2, snapshots=0)
        commands = CommandBuffer(file)
        row = REGISTERS_PER_ROW * 2 + np.arange(REGISTERS_PER_ROW)  # live, and lanes of which the second is dead
        commands.claim(row)
        commands.write(file.address("labels", row), [9, 4, 8])
        commands.submit()
        record = StepLog(1, 1, backend.device).next_record(1)
        record.rows.fill_(2)
        record.after.fill_(9)
        file.settle(record, torch.tensor([result], dtype=torch.int32, device=backend.device))
        assert (file.table.slots[row] > 0).tolist() == kept


def test_the_device_keeps_to_the_limit_of_a_plan(backend: Backend) -> None:
    mem = manager(backend, ms.Redirect(1), 0)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows))
    mem.settle(mem.plan(rows, limit=1))
    assert (mem.stats().snapshots, mem.stats().degraded) == (1, 1)
    mem.audit().raise_if_leaking()
    mem.check()


def test_the_shortfall_counts_the_reserve(backend: Backend) -> None:
    """A slot that is free and kept for admissions is none that a snapshot can have."""
    for reserve in (0, 1, 2):
        mem = manager(backend, ms.Redirect(1), reserve)
        rows = mem.admit([ms.Request("a"), ms.Request("b")])
        mem.settle(mem.plan(rows))
        assert (mem.free_slots, mem.shortfall(rows)) == (2, reserve)
        mem.settle(mem.plan(rows))
        assert mem.stats().degraded == reserve


def test_a_batch_planned_after_a_cancel_is_its_own(backend: Backend) -> None:
    """The device has the rows and tokens of a batch where the step before had the same; a cancelled one is none."""
    mem = manager(backend, ms.NoTracking(4), 0, overlap=True)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    first = mem.plan([a])
    mem.cancel(mem.plan([b]))
    (c,) = mem.admit([ms.Request("c")])
    assert c.index == b.index
    mem.submit()
    step = mem.plan([c])
    assert step.rows.tolist() == [c.index] and first.rows.tolist() == [a.index]
    mem.settle(first)
    mem.settle(step)
    mem.audit().raise_if_leaking()

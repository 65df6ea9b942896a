"""Checks that a launch gives the same bits every time, and that a row's bits do not depend on the other rows.

Every operation, every kind of decode step, claims and plans are repeated from the same memory. Delta steps run with
tiles of several numbers of values, which a file may choose by the batch. To see whether other rows matter, a layer of
a model runs on a large batch, then on rows of it alone, in small batches and in another order.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import StepRecord
from memstate.state.presets import qwen3_next
from memstate_tools.bench.copy import TOY
from memstate_tools.bench.forward import BenchForward
from memstate_tools.bench.track import _TrackedRows
from tests.kernels.test_decode_steps import KINDS
from tests.proof.gpu.machine import Machine, Result
from tests.proof.gpu.proved import newest_first
from tests.support import one_order, op_cases
from tests.support.decode_case import Case, check_rows_alone, same_bits

TIMES, TOY_TIMES, SMALL_TIMES = 100, 2, 20  # numbers of launches of each case
BATCH, TOY_BATCH = 256, 4
LAST = 1.5  # seconds that must be left to begin another case
PER_ROW = ("x", "decay", "beta", "mixed", "out")  # tensors of a forward with an axis of rows

CASES: dict[str, Callable[..., Case]] = {kind: made.make for kind, made in KINDS.items()}
CASES["gdn, bf16"] = partial(KINDS["gdn"].make, state=torch.bfloat16, inputs=torch.bfloat16)


def repeated(what: str, times: int, act: Callable[[], Sequence[Tensor]]) -> str:
    """Repeats what starts from the same memory. Returns the first difference of what it leaves, "" for none."""
    first = [tensor.clone() for tensor in act()]
    for turn in range(1, times):
        if not all(map(same_bits, act(), first)):
            return f"{what} {turn} of {times} differs from the first"
    return ""


def repeated_op(op: str, machine: Machine, times: int) -> str:
    """Repeats small launches of an operation, with all optional arguments. Returns the first difference or ""."""
    backend = Backend(machine.backend, machine.device)
    launches = (op_cases.moved(case, machine.device) for case in op_cases.several(op))
    return next(filter(None, (repeated("launch", times, partial(one.run, backend)) for one in launches)), "")


def repeated_step(case: Case, backend: Backend, times: int) -> str:
    """Repeats a decode step on copies of the same memory. Returns the first difference, "" for none."""

    def act() -> Sequence[Tensor]:
        twin = case.twin()
        return twin.step(backend), twin.memory.whole

    return repeated("launch", times, act)


def repeated_plans(machine: Machine, tracking: ms.Tracking, batch: int, times: int) -> str:
    """Repeats from the same registers a plan in which all rows are due. Returns the first difference, "" for none."""
    rows = _TrackedRows(Backend(machine.backend, machine.device), tracking, batch, drafts=False)
    for _ in range(2):
        rows.plan()  # gives each lane of the rows a slot
    device = (rows.file.cells, rows.file.allocator.bitmap, rows.file.allocator.counters)
    before = [tensor.clone() for tensor in device]

    def act() -> Sequence[Tensor]:
        for tensor, was in zip(device, before, strict=True):
            tensor.copy_(was)
        rows.plan()
        return *device, *rows.record

    return repeated("plan", times, act)


def repeated_claims(machine: Machine, times: int) -> str:
    """Claims scattered slots and releases them, again and again. Returns the first difference, "" for none."""
    capacity = 64 if machine.toy else 8192
    allocator = ms.SlotAllocator(capacity, Backend(machine.backend, machine.device))
    ids = allocator.claim(capacity)
    allocator.release(ids[torch.rand(capacity, device=ids.device) < 0.5])
    allocator.check()

    def act() -> Sequence[Tensor]:
        given = allocator.claim(min(allocator.free, 300))
        allocator.release(given)
        allocator.check()
        return [given]

    return repeated("claim", times, act)


def rows_of(forward: BenchForward, chosen: Tensor, planes: dict[str, Tensor]) -> BenchForward:
    """Returns a copy of a forward, which has only the chosen rows and works on `planes`."""
    part = copy(forward)
    part.planes = planes
    for name in PER_ROW:
        setattr(part, name, getattr(forward, name)[chosen].contiguous())
    return part


def beside_others(machine: Machine) -> list[str]:
    """Runs a layer on a batch and on parts of it. Returns the parts whose bits differ from those of the batch.

    Every row writes to its own slot, and every third row also writes a snapshot.
    """
    batch = TOY_BATCH if machine.toy else BATCH
    layout = ms.StateLayout(TOY.planes if machine.toy else qwen3_next().planes, 1)
    storage = ms.Planes(layout, 3 * batch, Backend("reference", machine.device))
    for plane in storage.values():
        plane.normal_()
    storage.scrub_null()
    before = {name: plane.clone() for name, plane in storage.items()}
    forward = BenchForward(Backend(machine.backend, machine.device), storage, batch)
    row = torch.arange(batch, dtype=torch.int32, device=machine.device)
    zero = torch.zeros_like(row)
    columns = {"read": row + 1, "write": batch + row + 1, "tokens": zero + 1}
    columns["snapshot"] = torch.where(row % 3 == 0, 2 * batch + row + 1, zero)
    record = StepRecord(rows=row + 1, **columns)
    forward(record)
    order = torch.randperm(batch, device=machine.device)
    parts = {"one row": order[:1], "another": order[-1:], "seven rows": order[:7], "half": order[: batch // 2]}
    failures = []
    for name, chosen in (parts | {"all in another order": order}).items():
        planes = {plane: tensor.clone() for plane, tensor in before.items()}
        part = rows_of(forward, chosen, planes)
        some = StepRecord(*(column[chosen].contiguous() for column in record))
        part(some)
        same = all(same_bits(getattr(part, at), getattr(forward, at)[chosen]) for at in ("mixed", "out"))
        written = torch.cat([some.write, some.snapshot[some.snapshot > 0]]).long()
        same &= all(same_bits(planes[at][:, written], storage[at][:, written]) for at in planes)
        kept = torch.ones(3 * batch + 1, dtype=torch.bool, device=machine.device)
        kept[written] = False
        same &= all(same_bits(planes[at][:, kept], before[at][:, kept]) for at in planes)
        failures += [] if same else [f"{name}: bits differ from those in a batch of {batch}"]
    return failures


def prove(machine: Machine, result: Result) -> None:
    """Runs all checks, with new random inputs."""
    times = TOY_TIMES if machine.toy or machine.compiling else TIMES
    failures: list[str] = result["failures"]
    backend, generator = Backend(machine.backend, machine.device), torch.Generator().manual_seed(torch.seed() % 2**31)
    result |= {"seed": generator.initial_seed(), "times": times, "repeated": []}

    def note(name: str, wrong: str) -> None:
        result["repeated"].append(name)
        if wrong:
            failures.append(f"{name}: {wrong}")

    for op in machine.mine(newest_first()):
        machine.go_on(f"before {op}", LAST)
        note(op, repeated_op(op, machine, min(times, SMALL_TIMES)))
    failures += beside_others(machine)
    for name, build in machine.mine(list(CASES.items())):
        machine.go_on(f"before {name}", LAST)
        machine.keep(result)
        case: Any = build(backend, generator)
        note(name, repeated_step(case, backend, times))
        try:
            check_rows_alone(case, backend)
        except AssertionError:
            note(f"{name}, rows alone", "bits differ from those in the batch")
    # an interpreter adds in an order of its own
    steps, blocks = (one_order.OFTEN[:1], (16,)) if machine.toy else (one_order.OFTEN, one_order.BLOCKS)
    for step in machine.mine(steps):
        machine.go_on(f"before {one_order.name_of(step)}", LAST)
        note(one_order.name_of(step), one_order.differing(backend, step, generator.initial_seed(), blocks))
    batch = TOY_BATCH if machine.toy else BATCH
    for tracking in machine.mine([ms.NoTracking(1), ms.PingPong(1), ms.LazyPingPong(1), ms.Redirect(1)]):
        machine.go_on(f"before plans of {type(tracking).__name__}", LAST)
        note(f"plan, {type(tracking).__name__}", repeated_plans(machine, tracking, batch, times))
    note("claims", repeated_claims(machine, times))

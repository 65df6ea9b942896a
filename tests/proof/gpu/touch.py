"""Runs every operation once, small, on initialised memory, for tools that check memory accesses.

It compares no results, because the tool watches the accesses.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing
from tests.kernels.test_decode_steps import KINDS
from tests.proof.gpu.machine import Machine, Result
from tests.proof.gpu.proved import newest_first
from tests.support import op_cases
from tests.support.build import build
from tests.support.op_case import every

LAYOUT = ms.StateLayout((ms.Plane("conv", (3, 40), torch.bfloat16), ms.Plane("ssm", (2, 16, 8), torch.float32)), 2)


def small(machine: Machine) -> Backend:
    """Runs every operation with all optional arguments in poisoned, guarded memory, and every kind of decode step."""
    backend, generator = Backend(machine.backend, machine.device), torch.Generator().manual_seed(torch.seed() % 2**31)
    for op in newest_first():
        for case in machine.mine(list(op_cases.several(op))):
            op_cases.moved(case, machine.device).run(backend)
    for kind in machine.mine(list(KINDS.values())):
        kind.make(backend, generator, **kind.small).step(backend)
    return backend


def hold(machine: Machine) -> Backend:
    """Packs slots into records and unpacks them, without and with a plane in int8."""
    backend = Backend(machine.backend, machine.device)
    storage = Planes(LAYOUT, 3, backend)
    for arena in storage.arenas:
        arena.random_(0, 256)
    storage["ssm"].normal_()
    ids = torch.tensor([1, 2], dtype=torch.int32, device=machine.device)
    for int8 in ({}, {"ssm": 2}):
        packing = Packing(storage, int8)
        records = torch.zeros(2, packing.nbytes, dtype=torch.uint8, device=machine.device)
        packing.pack(None, ids, ids - 1, records)
        packing.unpack(None, ids + 1, ids - 1, records)
    return backend


def serve(machine: Machine, tracking: ms.Tracking, speculation: bool) -> Backend:
    """Serves requests with snapshots at boundaries. Copies, gathers and scatters slots."""
    mem = build(
        LAYOUT, slots=24, max_requests=5, tracking=tracking, backend=machine.backend, device=machine.device,
        overlap=not speculation, tail=2 * speculation, in_place=not speculation,
    )  # fmt: skip
    for arena in mem.planes.arenas:
        arena.random_(0, 256)
    mem.device.scrub_null()
    rows = mem.admit([ms.Request(i) for i in range(3)])
    for _ in range(3):
        if speculation:
            mem.accept(mem.plan([*rows, None], 2, drafts=1), [1, 2, 1, 0])
        else:
            mem.settle(mem.plan([*rows, None]))
    kept = [snap for snap in mem.publish(rows) if snap]
    if kept:
        again = mem.admit([ms.Request("again", resume=kept[0])])
        if not speculation:
            mem.settle(mem.plan(again))
    mem.device.read_slots(rows).wait()
    ids = mem.pool.claim(2)
    mem.planes.scatter("ssm", ids, mem.planes.gather("ssm", ids))
    mem.pool.copy(ids[:1], ids[1:])
    mem.pool.release(ids)
    mem.end(rows)
    mem.audit().raise_if_leaking()
    mem.device.check()
    return mem.backend


def fork(machine: Machine) -> Backend:
    """Forks a row that has memory of its own."""
    rows = ms.StateLayout((ms.Plane("last", (24,), torch.float32),), 1)
    mem = build(
        replace(LAYOUT, rows=rows), slots=8, max_requests=3, tracking=ms.NoTracking(), backend=machine.backend,
        device=machine.device,
    )  # fmt: skip
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row]))
    forked = mem.fork(row, ["b"])
    mem.settle(mem.plan([row, *forked.rows]))
    return mem.backend


def prefill(machine: Machine) -> Backend:
    """Computes a prompt in one chunk. States are stored at two marks inside it and at its end."""
    mem = build(
        LAYOUT, slots=12, max_requests=2, tracking=ms.PingPong(64), backend=machine.backend, device=machine.device,
        pages=0, page_size=2, grid=2,
    )  # fmt: skip
    (row,) = mem.admit([ms.Request("prompt", snapshot_at=[2, 4, 6])])
    step = mem.plan([row], 6)
    sources = {
        "conv": torch.randn(2, 6, 40, dtype=torch.bfloat16, device=machine.device),
        "ssm": torch.randn(2, 3, 2, 16, 8, device=machine.device),
    }
    starts, first = (torch.tensor([0, n], dtype=torch.int32, device=machine.device) for n in (6, 3))
    mem.planes.scatter_states(sources, step.marks, starts, step.read, step.write, first=first, chunk=2)
    mem.settle(step)
    assert step.marked == 3 and [snap and snap.length for snap in mem.end([row], keep="handle")] == [6]
    mem.audit().raise_if_leaking()
    return mem.backend


def prove(machine: Machine, result: Result) -> None:
    """Runs all functions above. It is a failure if an operation was not launched."""
    with shadowed() if "--gsan" in sys.argv else nullcontext():
        _prove(machine, result)


def shadowed() -> AbstractContextManager[object]:
    """Returns a context manager. In its block, tensors get memory that GSan watches."""
    from triton.experimental.gsan import create_mem_pool

    return torch.cuda.use_mem_pool(create_mem_pool())


def _prove(machine: Machine, result: Result) -> None:
    backends = [small(machine), hold(machine), prefill(machine), fork(machine)]
    for tracking in (ms.NoTracking(2), ms.PingPong(2), ms.LazyPingPong(2), ms.Redirect(2)):
        for speculation in (False, True):
            backends.append(serve(machine, tracking, speculation))
    launched = {op for backend in backends for op in backend.counts.launches}
    machine.wait()
    result["touched"] = sorted(launched)
    missing = sorted(set(every()) - launched)
    if missing and not machine.compiling:  # a process that compiles has a share of the operations
        result["failures"].append(f"never launched: {', '.join(missing)}")

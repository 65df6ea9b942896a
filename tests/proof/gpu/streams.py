"""Checks that copies, gathers and transfers on a second stream beside decode give the same bytes as on one stream.

    main    plan forward  plan forward  plan forward publish ..      drop    wait for the lane, then free the slots
    lane                    cold slots -> batch -> host -> slots       snapshots -> batch -> host

The lane is the second stream. It works on slots that decode does not use: *cold* slots, which are claimed but belong to
no row, and published snapshots, which the main stream drops only after an event of the lane.
"""

import numpy as np
import torch
from torch import Tensor

import memstate as ms
from memstate.state.presets import qwen3_next
from memstate_tools.bench.copy import TOY
from memstate_tools.bench.forward import BenchForward
from tests.proof.gpu.machine import Lane, Machine, Result
from tests.support import inside
from tests.support.decode_case import same_bits

EVERY = 4
STEPS, TOY_STEPS = 60, 6
ROWS, TOY_ROWS = 16, 2
LAYERS = 2  # 64 MiB per batch; a run keeps 74 batches in pinned memory
AGE = 2  # number of publications after which an older snapshot is dropped


class Run:
    """One decode loop with random numbers from a seed. Its lane is a second stream or the main one."""

    def __init__(self, machine: Machine, seed: int, beside: bool) -> None:
        self.machine, self.lane = machine, Lane(machine, beside)
        torch.manual_seed(seed)  # seeds all devices
        rows = TOY_ROWS if machine.toy else ROWS
        layout = TOY if machine.toy else ms.StateLayout(qwen3_next().planes, LAYERS)
        self.mem = ms.StateManager(
            layout, slots=8 * rows, max_requests=rows, tracking=ms.Redirect(EVERY), backend=machine.backend,
            device=machine.device,
        )  # fmt: skip
        for plane in self.mem.planes.values():
            plane.normal_()
        self.mem.device.scrub_null()
        self.rows = list(self.mem.admit([ms.Request(i) for i in range(rows)]))
        self.cold = self.mem.pool.allocator.claim(2 * rows)
        self.forward = BenchForward(self.mem.backend, self.mem.planes, rows)
        self.batches = [torch.empty_like(self.mem.planes["ssm"][:, :rows]) for _ in range(2)]
        self.host: list[Tensor] = []
        self.outs: list[Tensor] = []
        self.published: list[tuple[list[ms.Snapshot], torch.cuda.Event | None]] = []
        self.alive: list[Tensor] = []  # tensors of the lane; kept, so that their memory is not reused

    def to_host(self, batch: Tensor) -> Tensor:
        target = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=not self.machine.toy)
        return target.copy_(batch, non_blocking=True)

    def move_cold(self, turn: int) -> None:
        """Copies one half of the cold slots through host memory to the other half. Then copies or zeroes slots."""
        half = len(self.cold) // 2
        of, to = (self.cold[:half], self.cold[half:])[:: 1 if turn % 2 == 0 else -1]
        storage = self.mem.planes
        with self.lane:
            storage.gather("ssm", of, out=self.batches[0])
            self.host.append(self.to_host(self.batches[0]))
            self.batches[1].copy_(self.host[-1], non_blocking=True)
            storage.scatter("ssm", to, self.batches[1])
            storage.copy(of, to, due=half) if turn % 3 == 0 else storage.zero(of[:1], due=1)

    def publish(self) -> None:
        """Publishes snapshots, which the lane reads, and drops old ones after an event of the lane."""
        snapshots = [snap for snap in self.mem.publish(self.rows) if snap]
        slots = self.mem.device.read_slots(snapshots).wait()
        ids = torch.from_numpy(np.ascontiguousarray(slots)).to(self.machine.device)
        self.alive.append(ids)
        self.lane.after_main()
        with self.lane:
            self.alive.append(self.mem.planes.gather("ssm", ids))
            self.host.append(self.to_host(self.alive[-1]))
        self.published.append((snapshots, self.lane.mark()))
        if len(self.published) > AGE:
            old, mark = self.published.pop(0)
            self.lane.main_after(mark)
            self.mem.drop(old)

    def go(self, steps: int) -> dict[str, Tensor]:
        """Decodes `steps` steps. Returns all tensors that were computed or moved, by name."""
        mem = self.mem
        self.lane.after_main()  # cold slots are claimed now, and batches are allocated
        for t in range(1, steps + 1):
            step = mem.plan(self.rows)
            self.move_cold(t)
            self.forward(step.record)
            self.outs.append(self.forward.out.clone())
            mem.settle(step)
            if t % EVERY == 1 and t > 1:
                self.publish()
        self.machine.wait()
        mem.device.check()
        live = mem.device.live_slots[[row.index for row in self.rows]]
        owned = {"cold": self.cold, "live": live}
        tensors = {f"host {number}": tensor for number, tensor in enumerate(self.host)}
        tensors |= {f"output {number}": tensor for number, tensor in enumerate(self.outs)}
        tensors |= {
            f"{name} {what}": plane[:, ids.long()] for what, ids in owned.items() for name, plane in mem.planes.items()
        }
        return tensors | {"owners": inside.registers(mem).owners()}


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Returns the names of the tensors in which both runs differ."""
    both = a.keys() & b.keys()
    return [*(a.keys() ^ b.keys()), *(name for name in both if not same_bits(a[name], b[name]))]


def prove(machine: Machine, result: Result) -> None:
    """Compares a run on two streams with a run on one stream from the same seed."""
    seed, steps = torch.seed() % 2**31, TOY_STEPS if machine.toy or machine.compiling else STEPS
    one, two = (Run(machine, seed, beside).go(steps) for beside in (False, True))
    result |= {"seed": seed, "steps": steps, "compared": len(one)}
    if wrong := differing(one, two):
        result["failures"].append(f"seed {seed}: {len(wrong)} of {len(one)} differ: {', '.join(sorted(wrong)[:8])}")

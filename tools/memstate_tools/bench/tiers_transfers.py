"""Benchmarks transfers between slots of the device and records of host memory, compared with one plain copy.

"out" packs states into staging and copies them to the host. "in" copies records to staging and unpacks them. On a GPU
the peer is its copy engine. On a CPU a copy replaces the engine and the reference replaces the kernels; these figures
say little about a GPU.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.host.transfers import Transfers
from memstate.tiers.records import RecordFormat
from memstate_tools.bench.task import Measured, Setting, Task, differing
from memstate_tools.bench.tiers_turns import TurnSide, cases, rates, sized

LAYERS, TOY_LAYERS = 16, 4
STAGING = 2  # staging buffers, the default of `Tiers`


def layout_of(nbytes: int, layers: int) -> StateLayout:
    """Returns the layout of a state of `nbytes` bytes. A sixteenth of them is convolution."""
    part = nbytes // layers // 16
    planes = (Plane("conv", (part // 2,), torch.bfloat16), Plane("ssm", (15, part // 4), torch.float32))
    return StateLayout(planes, layers)


class _Ways:
    """States in slots, records for them in host memory, and the transfers between them."""

    def __init__(self, setting: Setting, records: int, nbytes: int) -> None:
        self.setting, self.case, self.total = setting, sized(records, nbytes), records * nbytes
        layout = layout_of(nbytes, setting.sizes(LAYERS, TOY_LAYERS))
        self.planes = Planes(layout, records, setting.make_backend())
        form = RecordFormat("state", layout, bytes(32))
        on_gpu = setting.device.type == "cuda"
        self.pool = RecordPool(records, form.nbytes, pinned=on_gpu)
        self.records = self.pool.claim(records)
        self.bodies = self.pool.memory[:, form.header_bytes :]
        slots = torch.cat(
            [
                torch.zeros(1, dtype=torch.int32, device="cpu"),
                torch.randperm(records, dtype=torch.int32, device="cpu") + 1,
            ]
        )
        self.slots, self.registers = slots.to(self.planes.device), list(range(1, records + 1))
        self.transfers = Transfers(Packing(self.planes), self.pool, STAGING, self.slots)

    def out(self) -> None:
        self.transfers.out(self.registers, self.records).synchronize()

    def into(self) -> None:
        self.transfers.into(self.registers, self.records).synchronize()

    def states(self) -> Tensor:
        """Returns the expected bytes of the records, made plane by plane: uint8 `register byte`."""
        slots = self.slots[1:].long()
        parts = [
            plane[layer][slots].flatten(1).contiguous().view(torch.uint8)
            for layer in range(self.planes.layout.layers)
            for plane in self.planes.values()
        ]
        return torch.cat(parts, 1)

    def check(self) -> str:
        """Returns what is wrong: records that differ from states, or states that came back changed; else empty."""
        for arena in self.planes.arenas:
            arena.random_(0, 256)
        self.planes.scrub_null()
        states = self.states()
        self.out()
        differ = differing([("records", self.bodies, states.cpu())])
        for arena in self.planes.arenas:
            arena.bitwise_not_()
        self.into()
        self.planes.scrub_null()
        return differ or differing([("states", self.states(), states)])

    def measure(self) -> list[Measured]:
        on_gpu = self.setting.device.type == "cuda"
        host = torch.empty(self.total, dtype=torch.uint8, device="cpu", pin_memory=on_gpu).random_(0, 256)
        device = torch.empty(self.total, dtype=torch.uint8, device=self.setting.device).random_(0, 256)

        def copy(to: Tensor, of: Tensor) -> None:
            if on_gpu:
                to.copy_(of, non_blocking=True)
                torch.cuda.synchronize(self.setting.device)
            else:
                np.copyto(to.numpy(), of.numpy())

        each = partial(rates, self.setting, case=self.case, nbytes=self.total)
        peer = "pinned-copy" if on_gpu else "memory-copy"
        return [
            *each("transfer out", ours=TurnSide(self.out), peers={peer: TurnSide(partial(copy, host, device))}),
            *each("transfer in", ours=TurnSide(self.into), peers={peer: TurnSide(partial(copy, device, host))}),
        ]


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields the tasks that transfer batches of states out of slots and into them."""
    for records, nbytes in cases(setting):
        ways = _Ways(setting, records, nbytes)
        yield Task(f"transfers, {ways.case}", ways.check, ways.measure)

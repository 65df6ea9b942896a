"""Times calls, and keeps the lines of `decode`."""

import json
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate_tools.bench.clock import DeviceClock, HostTimer, host_seconds
from tests.proof.gpu.decode_inputs import Inputs, evicting
from tests.proof.gpu.machine import Machine, Result

MANY = 64  # rows of what the bars compare
CALLS, TOY_CALLS = 200, 2  # calls whose host time is taken
Act = Callable[[], object]


class Run:
    """The operations, a clock, and the lines that are written so far."""

    def __init__(self, machine: Machine, result: Result, folder: Path) -> None:
        self.machine, self.folder, self._result = machine, folder, result
        self.ops: Any = Backend(machine.backend, machine.device)
        self.inputs = Inputs(machine.device, machine.toy)
        self.clock = HostTimer() if machine.toy or machine.compiling else DeviceClock(machine.device)
        self.many = 1 if machine.toy or machine.compiling else MANY  # rows of what the bars compare
        self.figures: dict[str, float] = {}  # and its figures
        self._copies: dict[int, float] = {}
        self._slots: dict[tuple[int, int], float] = {}

    def us(self, act: Act) -> float:
        """Returns the microseconds of a call on the device."""
        return round(self.clock.alone(act).device * 1e6, 2)

    def graph_us(self, act: Act) -> float:
        """Returns the microseconds of one of many calls in a graph, which follow each other as layers do."""
        return round(self.clock.in_graph(act) * 1e6, 2)

    @cached_property
    def evicting(self) -> Callable[..., Tensor] | None:
        return evicting(self.folder)

    def host_us(self, act: Act, before: Act | None = None) -> float:
        """Returns the median of the host's microseconds of a call. before: called before each, not timed."""
        times = []
        for _ in range(TOY_CALLS if self.machine.toy or self.machine.compiling else CALLS):
            if before:
                before()
            times.append(host_seconds(act, self.machine.device))
        return round(median(times) * 1e6, 2)

    def line(self, what: str, **figures: object) -> None:
        """Keeps a line, and prints it."""
        line = {"what": what} | {name: str(x)[6:] if isinstance(x, torch.dtype) else x for name, x in figures.items()}
        self._result["lines"].append(line)
        self.machine.keep(self._result)
        print(json.dumps(line), flush=True)

    def differs(self, why: str) -> None:
        """Counts other bits as a failure, but not in an interpreter, whose sums and products are rounded otherwise."""
        self.failed("" if self.machine.backend == "interpreter" else why)

    def failed(self, why: str) -> None:
        self._result["failures"] += [why] if why else []

    def copy_us(self, moved: int) -> float:
        """Returns the microseconds of a plain copy that reads and writes so many bytes together."""
        if moved not in self._copies:
            of = torch.empty(moved // 2, dtype=torch.uint8, device=self.machine.device).random_(0, 256)
            self._copies[moved] = self.us(partial(torch.empty_like(of).copy_, of))
        return self._copies[moved]

    def slots_us(self, rows: int, dtype: torch.dtype) -> float:
        """Returns the microseconds of `copy_slots` of as many states as a gated delta step moves."""
        heads, _, keys, values = self.inputs.delta_shape
        if (rows, dtype.itemsize) not in self._slots:
            layout = ms.StateLayout([ms.Plane("ssm", (heads, keys, values), dtype)], layers=1)
            planes, slots = ms.Planes(layout, 2 * rows, self.ops), self.inputs.slots(rows, 1, False)
            act = partial(planes.copy, slots["write"], slots["read"], due=rows)
            self._slots[rows, dtype.itemsize] = self.us(act)
        return self._slots[rows, dtype.itemsize]

    def beside_copies(self, moved: int, us: float) -> dict[str, float]:
        """Returns the rate of a call, and that of a plain copy of as many bytes, which is measured here."""
        copy = self.copy_us(moved)
        rates = {"TBs": round(moved / us / 1e6, 3), "TBs_copy": round(moved / copy / 1e6, 3)}
        return {"bytes": moved, "us_copy": copy, **rates, "share_of_copy": round(copy / us, 3)}

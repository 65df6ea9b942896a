"""Tests kept kernels: compiled kernels that memstate remembers, and launches without Triton's handling of arguments.

Run as a program, this file compares all kept launches with launches through Triton. A kept launch launches the compiled
kernel of an earlier launch again, without Triton's code. Triton compiles for a GPU that need not exist. A stub of
Triton's driver records each launch, and runs nothing.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

from triton import knobs
from triton.runtime.driver import driver

from memstate.kernels import dispatch
from memstate.kernels.kept import KeptLaunch
from memstate.kernels.tables import Rules, Strategy
from memstate.requests.steps import StepLog
from memstate.slots.allocator import SlotAllocator
from memstate.slots.packet import Packet
from memstate.slots.registers import RegisterFile
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from tests.support.kernel_runs import not_interpreted
from tests.support.launch_keys import NoDevice

KEPT: list[tuple[Any, str]] = [
    (module, name)
    for module in (import_module(f"memstate.kernels.{name}") for name in dict.fromkeys(dispatch.OPS.values()))
    for name, kept in vars(module).items()
    if isinstance(kept, KeptLaunch)
]
LAUNCHED: list[list[Any]] = []
BATCHES = (1, 33)
RULES = (Rules(Strategy.LAZY, 2, 4, True), Rules(Strategy.LAZY, 2, 4, False))


def test_a_kept_kernel_is_launched_as_triton_would_launch_it() -> None:
    """Both ways launch the same kernel with the same grid, stream and arguments, for two batch sizes, twice."""
    said = not_interpreted(__file__)
    assert said["differ"] == said["never"] == [] and not said["interpreted"]
    # A launch without a kept kernel goes through Triton every time. With kept kernels, only the first launch of each
    # compiled kernel does.
    compiled = 2 * 2 + 1 + 2 + 2 + 1 + 1 + 1  # plan, ownership, claim, release, data, filled data, rows
    assert said["runs"] == 2 * 7 * 4 and said["handled"] == said["runs"] + compiled


def _seen(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.data_ptr()
    return repr(arg) if isinstance(arg, int | tuple) else type(arg).__name__


class Launcher:
    """Records the values that launches pass: of a tensor its address, of metadata and hooks only the type."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        LAUNCHED.append([_seen(arg) for arg in args])


class Stub(NoDevice):
    """A driver that loads every kernel under a new number, and launches none."""

    launcher_cls = Launcher

    def __init__(self) -> None:
        super().__init__("sm_90")
        self.loaded = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 2**17}, load_binary=self._load
        )

    def _load(self, name: str, *_: Any) -> tuple[int, int, int, int, int]:
        self.loaded += 1
        return self.loaded, self.loaded, 32, 0, 1024


@contextmanager
def through_triton() -> Iterator[None]:
    """Replaces all kept launches by empty ones during the block, so that the next launch goes through Triton."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in KEPT:
            usual = getattr(module, name)
            patch.setattr(module, name, KeptLaunch(usual._kernel, usual._options))
        yield


def main() -> None:
    """Prints the differences between kept launches and those through Triton, and the numbers of launches."""
    driver.set_active(Stub())
    dispatch.choose = lambda name, device: name  # chooses the kernels, although on a CPU
    backend = dispatch.Backend("interpreter")
    file = RegisterFile(SlotAllocator(900, backend), 300, 10)
    plain, filled = (
        Planes(StateLayout((Plane("ssm", (40, 9), torch.float32, fill=fill),), 3), 900, backend).plane_map
        for fill in (0, 1)
    )
    log = StepLog(256, 1, backend.device)
    differ, handled = [], 0
    runs = 0

    def hook(*_: Any, **__: Any) -> None:
        nonlocal handled
        handled += 1

    for kernel in {getattr(module, name)._kernel for module, name in KEPT}:
        kernel.add_pre_run_hook(hook)  # runs at each launch through Triton

    def both(op: str, *args: Any) -> None:
        nonlocal runs
        launches = []
        for way in (nullcontext, through_triton):
            LAUNCHED.clear()
            with way():
                made = getattr(backend, op)(*args)
            fresh = made.data_ptr() if op == "claim" else 0
            launches.append([["fresh" if seen == fresh else seen for seen in launch] for launch in LAUNCHED])
        runs += 1
        if launches[0] != launches[1] or len(launches[0]) != 1:
            differ.append(f"{op} {args[-1]}: {launches}")

    work = [(batch, rules) for batch in BATCHES for rules in RULES]
    for _ in range(2):
        random.Random(3).shuffle(work)
        for batch, rules in work:
            rows = np.arange(1, batch + 1)
            packet = torch.from_numpy(Packet().encode((rows, rows), 9)).clone()
            record = log.record(batch)
            both("plan", file.table, packet, record, log.marks, rules)
            both("ownership", file.table, packet)
            both("claim", file.table.bitmap, batch, file.table.counters)
            both("release", file.table.bitmap, torch.ones(batch, dtype=torch.int32), 900, file.table.counters)
            both("run_data", plain, file.table.slots, packet)
            both("run_data", filled, file.table.slots, packet)
            both("run_rows", plain, packet)
    never = [f"{module.__name__}.{name}" for module, name in KEPT if not getattr(module, name)._launches]
    found = {"differ": differ[:3], "never": never, "runs": runs, "handled": handled}
    print(json.dumps(found | {"interpreted": knobs.runtime.interpret}))


if __name__ == "__main__":
    main()

"""The GPU that Triton believes in: an sm_90 whose launches run on the CPU.

Triton's own JIT, specialisation and cache run as they are, and so do launches that memstate keeps. Only the assembler
is left out. `install` must run before kernels are defined, so before memstate is imported.
"""

import linecache
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.support.ptx.program import ORDERS, Fault, Program
from tests.support.ptx.races import harmless, told

LAUNCHED: Counter[str] = Counter()  # name of a kernel -> launches
FRONT: list[Callable[[], None]] = []  # runs the last launch, if that lets the next one begin
BUILD = Path(__file__).parents[3] / "build"
LIMITS = {"max_shared_mem": 232_448, "multiprocessor_count": 2, "max_num_regs": 65_536, "warpSize": 32}  # of an sm_90


def install(order: str) -> None:
    """Makes this process compile kernels for an sm_90 and run them on the CPU. Their backend is still "interpreter".

    Args:
        order: in which order warps and programs run, see `Program.run`.

    Raises:
        ValueError: there is no such order.
    """
    if order not in ORDERS and not order.isdecimal():
        raise ValueError(f"MEMSTATE_COMPILED is {order!r}, but an order of warps is {', '.join(ORDERS)} or a seed")
    os.environ |= {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    knobs.cache.dir = str(BUILD / "ptx" / triton.__version__)  # never a GPU's: a kernel is stored as text here

    def unassembled(self: Any, text: str, metadata: Any, *options: Any) -> bytes:
        return text.encode()

    def load(name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, program(kernel.decode()), 0, 0, 1024

    def launcher(source: Any, metadata: Any) -> "Launcher":
        return Launcher(source, metadata, order)

    device = Device()
    device.utils, device.launcher_cls = Device(), launcher
    device.utils.load_binary, device.utils.get_device_properties = load, lambda index: LIMITS
    device.get_current_target = lambda: GPUTarget("cuda", 90, 32)
    device.get_current_device, device.get_current_stream = lambda: 0, lambda index=None: 0
    device.get_active_torch_device = lambda: torch.device("cpu")
    program = cache(Program)
    CUDABackend.make_cubin = unassembled
    driver.set_active(device)
    from memstate.kernels import interpreter

    interpreter.interpreted = lambda: True


class Device:
    """A driver of Triton, whose attributes `install` sets."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Triton asks its driver for {name!r}, which is not known here")


class Launcher:
    """Launches one compiled kernel, as Triton's own launcher does. Raises a Fault for a race that is not known."""

    def __init__(self, source: Any, metadata: Any, order: str) -> None:
        kinds = list(source.signature.values())
        self._taken = [number for number, kind in enumerate(kinds) if kind != "constexpr"]
        self._whole = {path[0] for path, hints in source.attrs.items() if ["tt.divisibility", 16] in hints}
        self._constants = {path[0]: value for path, value in source.constants.items() if len(path) == 1}
        self._names, self._warps, self._shared, self._order = (
            list(source.signature), metadata.num_warps, metadata.shared, order
        )  # fmt: skip
        self._early = metadata.launch_pdl

    def __call__(
        self, x: int, y: int, z: int, stream: int, program: Program, packed: Any, metadata: Any, enter: Any, leave: Any,
        *args: Any,
    ) -> None:  # fmt: skip
        for number, given in enumerate(args):
            at = given.data_ptr() if hasattr(given, "data_ptr") else given
            if number in self._whole and at % 16:
                raise Fault(f"{program.name}: {self._names[number]} is {at:#x}, but was compiled as a multiple of 16")
            if number in self._constants and at != self._constants[number]:
                was = self._constants[number]
                raise Fault(f"{program.name}: {self._names[number]} is {at!r}, but was compiled as {was!r}")
        if x >= 2**31 or max(y, z) >= 2**16:
            raise Fault(f"{program.name}: a GPU launches no grid of {x} x {y} x {z} programs")
        taken = [getattr(args[number], "base", args[number]) for number in self._taken]
        LAUNCHED[program.name] += 1
        front = [FRONT.pop() for _ in FRONT[:]]
        while front and not self._early:
            front.pop()()
        given = (x, y, z), taken, self._warps, self._shared, self._order
        if program.signals:
            FRONT.append(lambda: _orderly(program, program.run_now(*given)))
        else:
            _orderly(program, program.run(*given, front))


def _orderly(program: Program, raced: Counter[tuple[str, str]]) -> None:
    """Raises a Fault for a race that is not known."""
    new = {key: cells for key, cells in raced.items() if not harmless(key[0], *_source(program, key[1]))}
    if new:
        advice = "put a barrier before (programs have none), or list it in races.py"
        raise Fault(f"{program.name}: race: {told(new)}; {advice}")


def _source(program: Program, place: str) -> tuple[str, str]:
    """Returns the file and the text of a line of source."""
    file, _, number = place.partition(":")
    return file, linecache.getline(str(program.listing.files.get(file)), int(number)).strip()

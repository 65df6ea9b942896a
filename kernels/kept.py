"""Launches a kernel of one program again without Triton's handling of its arguments. Knows no kernel.

`kernel[grid](..)` looks at each argument, and searches for the compiled kernel with what it found: tens of microseconds
for the many columns of a plan. Where every launch passes tensors of the same kind, the compiled kernel of the first
launch is the one to call.
"""

from collections.abc import Mapping
from typing import Any

import torch

from memstate.kernels.warps import alone


class Kept:
    """A kernel, and what it was compiled to: by device, warps and constants.

    Args:
        kernel: a kernel of one program. Its constants come last, and it specialises on no integer.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], Any] = {}

    def launch(
        self, args: tuple[object, ...], constants: Mapping[str, int], warps: int, device: torch.device, alike: bool
    ) -> None:
        """Launches the kernel on the current stream of the current device.

        Args:
            args: everything but the constants, in order.
            constants: by name, in the order of the kernel's arguments.
            warps: of the program.
            device: the current device.
            alike: whether all such launches pass int32 tensors on 16-byte boundaries and integers that fit int32.
        """
        key = (device, warps, *constants.values())
        if alike and (compiled := self._compiled.get(key)) is not None:
            compiled[1, 1, 1](*args, *constants.values())
            return
        made = self._kernel[(1,)](*args, **constants, num_warps=warps, **alone())
        if alike and made is not None:  # the interpreter compiles nothing
            self._compiled[key] = made

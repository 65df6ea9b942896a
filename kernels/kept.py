"""Launches a kernel again without Triton's handling of its arguments. Knows no kernel.

`kernel[grid](..)` inspects each argument to choose the compiled kernel, which takes tens of microseconds for the many
columns of a plan. If every launch passes tensors of the same kind, `KeptLaunch` calls the compiled kernel of the first
launch again.
"""

from collections.abc import Mapping
from typing import Any

import torch

from memstate.kernels.warps import ALONE, limit


class KeptLaunch:
    """A kernel and its compiled launches, by device, programs, warps and constants.

    Args:
        kernel: a kernel whose constants come last, and which specialises on no integer.
        options: launch options for `limit`; the default is for a program that runs alone.
    """

    def __init__(self, kernel: Any, options: Mapping[str, int] = ALONE) -> None:
        self._kernel, self._options = kernel, dict(options)
        self._launches: dict[tuple[object, ...], Any] = {}

    def launch(
        self, args: tuple[object, ...], constants: Mapping[str, Any], warps: int, device: torch.device, alike: bool,
        programs: int = 1,
    ) -> None:  # fmt: skip
        """Launches the kernel on the current stream of the current device.

        Args:
            args: all arguments except the constants, in order.
            constants: name -> value, in the order of the kernel's arguments.
            warps: warps of a program.
            device: the current device.
            alike: whether all launches with the same constants, warps and programs pass tensors of the same dtypes on
                16-byte boundaries, and integers that fit int32.
            programs: number of programs.
        """
        key = (device, programs, warps, *constants.values())
        if alike and (launch := self._launches.get(key)) is not None:
            launch(*args, *constants.values())
            return
        made = self._kernel[(programs,)](*args, **constants, num_warps=warps, **limit(self._options))
        if alike and made is not None:  # the interpreter compiles nothing
            self._launches[key] = made[programs, 1, 1]

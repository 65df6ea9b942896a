"""Says what a kernel specialises on, and launches it again without Triton's handling of its arguments. Knows no kernel.

`kernel[grid](..)` inspects each argument to choose the compiled kernel, which takes tens of microseconds for the many
columns of a plan. If every launch passes tensors of the same kind, `KeptLaunch` calls the compiled kernel of the first
launch again. A decode step does so with `launch_step` for each kind of call that has passed its check.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl

from memstate.kernels.remembered import Checked
from memstate.kernels.warps import ALONE, limit


def unspecialised(*others: str) -> Callable[[Callable[..., None]], Any]:
    """Returns a `triton.jit` for a kernel that specialises on its constants and on `others` alone.

    All other arguments may differ between two calls of one model. The kernel specialises not even on the alignment of
    inputs. Alignment may change the order in which lanes add up a sum, so the bits of a row would depend on where its
    batch was allocated. If the shape alone gives the alignment, the kernel states it.
    """

    def of(kernel: Callable[..., None]) -> Any:
        kinds = {name: each.annotation for name, each in signature(kernel).parameters.items() if name not in others}
        return triton.jit(kernel, do_not_specialize=[name for name, kind in kinds.items() if kind is not tl.constexpr])

    return of


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


def launched_again(checked: Checked[Any], tensors: tuple[object, ...], form: str = "") -> bool:
    """Launches what an earlier call of the same kind launched, with other tensors. Returns False if there was none."""
    if (launch := checked.launches.get(form)) is None:
        return False
    again, rest = launch
    again(*tensors, *rest)
    return True


def launch_step(
    checked: Checked[Any], kernel: Any, grid: tuple[int, ...], tensors: tuple[object, ...],
    numbers: tuple[object, ...], constants: Mapping[str, object], options: Mapping[str, object], form: str = "",
) -> None:  # fmt: skip
    """Launches a decode step, and keeps the compiled launch for `launched_again`.

    Args:
        checked: result of the check of this call.
        kernel: a kernel that takes tensors, then numbers, then constants.
        grid: programs along up to three axes.
        tensors: tensors of this call.
        numbers: numbers that every call of the kind has.
        constants: name -> value, in the order of the kernel's arguments.
        options: launch options.
        form: name of a launch that differs in what the check does not know.
    """
    made = kernel[grid](*tensors, *numbers, **constants, **options)
    if made is not None:  # the interpreter compiles nothing
        checked.launches[form] = made[(*grid, 1, 1)[:3]], (*numbers, *constants.values())

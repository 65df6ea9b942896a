"""Records the keys under which Triton's JIT would compile launches, without running them and without a GPU.

Triton itself binds and specialises the arguments, and calls a hook before it compiles. The hook records the key and
stops Triton, so nothing is launched. Triton's interpreter must be off in this process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
VALUES = (1, 2, 16, 17, 4096)  # Triton has three kinds of integers: 1, multiples of 16, all others

Keys = dict[str, list[str]]  # kernel -> keys


class NoDevice:
    """A stand-in for Triton's driver, which names a target and has no device."""

    def __init__(self, target: str) -> None:
        self.number, self.target = list(TARGETS).index(target), TARGETS[target]  # Triton caches per device number

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return self.target


class Recorder:
    """Collects the keys of launches by kernel."""

    def __init__(self, target: str) -> None:
        hooked = hasattr(driver, "set_active") and hasattr(knobs.runtime, "jit_cache_hook")
        assert hooked, f"Triton {triton.__version__} has no set_active or no jit_cache_hook: see its keys another way"
        assert not knobs.runtime.interpret, "kernels are interpreted in this process: unset TRITON_INTERPRET"
        self.names: dict[str, list[str]] = {}  # kernel -> names of its arguments
        self._seen: dict[str, set[str]] = {}
        driver.set_active(NoDevice(target))
        knobs.runtime.jit_cache_hook = self._refuse

    def _refuse(self, *, key: str, fn: Any, **_: Any) -> bool:
        kernel = f"{fn.module.split('.')[-1]}.{fn.name}"
        self.names[kernel] = list(fn.jit_function.arg_names)
        self._seen.setdefault(kernel, set()).add(str(key))
        return True

    @contextmanager
    def recorded(self) -> Iterator[Keys]:
        """Yields a dictionary. After the block, it has the keys of all launches in the block."""
        self._seen = {}
        keys: Keys = {}
        yield keys
        keys |= {kernel: sorted(seen) for kernel, seen in self._seen.items()}

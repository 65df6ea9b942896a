"""Interprets or compiles the kernels that a block of code launches, whatever this process does otherwise.

Triton decides for a whole process whether kernels are interpreted. Both contexts replace Triton's launch, so one
process without a GPU checks a kernel and compiles it. The kernel may stand in a notebook.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from threading import RLock
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from memstate.errors import ConfigurationError
from memstate.kernels import interpreter, remembered
from memstate.kernels.dispatch import Backend

TARGETS: dict[str, tuple[str, int | str, int]] = {  # name -> Triton's backend, architecture, lanes of a warp
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}


ONE = RLock()  # one thread at a time: both contexts change Triton for the whole process


@dataclass
class Launch:
    """A launch that was seen and did not run.

    Attributes:
        kernel: The function under `@triton.jit`.
        arguments: Name -> argument, with constants and launch options.
        grid: Programs along each axis.
        target: Name of the target.
        compile: Compiles the kernel for the launch; see `compiled`.
    """

    kernel: Any
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    target: str
    compile: Callable[[], Any]

    @cached_property
    def compiled(self) -> Any:
        """The compiled kernel, with its texts in `.asm`. The first use compiles."""
        with patch.object(_triton_driver(), "_active", _nowhere(self.target)):
            return self.compile()

    def forget(self) -> None:
        """Makes Triton forget what it has compiled of the kernel for the target; texts of many kernels fill memory."""
        self.kernel.device_caches.pop(_nowhere(self.target).number, None)

    @property
    def types(self) -> dict[str, str]:
        """Name -> Triton's type, of the arguments that the compiled kernel takes, in order. The first use compiles."""
        return {name: kind for name, kind in self.compiled.src.signature.items() if kind != "constexpr"}

    def arguments_in(self, memory: Collection[Tensor]) -> list[str]:
        """Returns the names of the arguments that lie in the memory of a tensor, or are tables of addresses in it.

        If the tensor is int8, only arguments count that take its memory as int8: scales may lie beside such values.
        """
        places = [(held.untyped_storage(), held.dtype == torch.int8) for held in memory]

        def inside(address: int, kind: torch.dtype) -> bool:
            near = [as_int8 for held, as_int8 in places if 0 <= address - held.data_ptr() < held.nbytes()]
            return any(kind == torch.int8 or not as_int8 for as_int8 in near)

        bare = {name: getattr(each, "base", each) for name, each in self.arguments.items()}  # of what Triton wraps
        given = {name: (each, self.arguments[name].dtype) for name, each in bare.items() if isinstance(each, Tensor)}
        return [
            name
            for name, (each, kind) in given.items()
            if inside(each.data_ptr(), kind)
            or (each.dtype == torch.int64 and any(inside(address, kind) for address in each.flatten().tolist()))
        ]


@contextmanager
def compiling(target: str) -> Iterator[list[Launch]]:
    """Yields a list of the launches in the block, each of which can be compiled for a target. Nothing runs.

    Args:
        target: Name in `TARGETS`.

    Raises:
        ConfigurationError: This process interprets kernels.

    Example:
        >>> with compiling("sm_90") as launches:
        ...     kernels().claim(bitmap, 3, cursor)
        >>> launches[0].compiled.asm["ptx"]
    """
    from triton.runtime.jit import JITFunction

    require_compiler()
    seen: list[Launch] = []
    launch = getattr(JITFunction.run, "launch", JITFunction.run)  # Triton's own, also inside of another block

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | given
        size = tuple(grid(arguments) if callable(grid) else grid)
        make = lambda: launch(kernel, *args, grid=grid, warmup=True, **given)  # noqa: E731
        seen.append(Launch(kernel, arguments, size, target, make))

    run.launch = launch  # type: ignore[attr-defined]
    with ONE, patch.object(JITFunction, "run", run), patch.object(_triton_driver(), "_active", _nowhere(target)):
        remembered.forget()  # a launch that was made before would be made again, and not be seen
        yield seen


@contextmanager
def interpreting() -> Iterator[None]:
    """Interprets the kernels that are launched in the block, and makes `Backend("interpreter")` possible there."""
    from triton import knobs
    from triton.runtime.interpreter import InterpretedFunction, _patch_lang
    from triton.runtime.jit import JITFunction

    if interpreter.interpreted():
        yield
        return
    interpreter.mend()
    interpreted = cache(InterpretedFunction)

    def run(kernel: Any, *args: Any, **given: Any) -> Any:
        # only here, because what is imported later is to be compiled; the attribute itself would set the environment
        with patch.dict(vars(knobs.runtime), interpret=True):
            return interpreted(kernel.fn).run(*args, **given)

    def call(kernel: Any, *args: Any, **given: Any) -> Any:
        scope = _patch_lang(kernel.fn)
        try:
            return interpreted(kernel.fn).rewrite()(*args, **given)
        finally:
            scope.restore()  # Triton's own call leaves its language patched, for a process that never compiles

    replaced = patch.multiple(JITFunction, run=run, __call__=call)
    somewhere = patch.object(_triton_driver(), "_active", _nowhere("sm_90"))  # launches ask how wide a warp is
    with ONE, _language_kept(), replaced, somewhere, patch.object(interpreter, "interpreted", lambda: True):
        remembered.forget()
        yield


@contextmanager
def _language_kept() -> Iterator[None]:
    """Gives Triton's language back as it was, even if the interpreter was interrupted while it patched it."""
    import triton.language as tl

    owners = tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base
    before = [dict(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, names in zip(owners, before, strict=True):
            for name, value in dict(vars(owner)).items():
                if name not in names:
                    delattr(owner, name)
                elif value is not names[name]:
                    setattr(owner, name, names[name])


def kernels() -> Backend:
    """Returns the kernels on tensors of the CPU, for `compiling`."""
    backend = Backend("reference")
    backend.name = "kernels"
    return backend


def require_compiler() -> None:
    """Raises ConfigurationError if this process interprets kernels, or has no Triton."""
    interpreted = interpreter.interpreted()
    if interpreted is None:
        raise ConfigurationError("compiling kernels needs Triton, which is not installed; it exists for Linux only")
    if interpreted:
        raise ConfigurationError("kernels are interpreted here: unset TRITON_INTERPRET, or leave `interpreting()`")


class _Nowhere(NamedTuple):
    """Stands in for a driver of Triton. It names a target, and has no device to launch on."""

    number: int
    target: Any

    def get_current_device(self) -> int:
        """Returns a number of its own for each target, by which Triton keeps what it has compiled."""
        return self.number

    def get_current_stream(self, device: int) -> int:
        """Returns no stream."""
        return 0

    def get_current_target(self) -> Any:
        """Returns the target."""
        return self.target


@cache
def _nowhere(target: str) -> _Nowhere:
    from triton.backends.compiler import GPUTarget

    return _Nowhere(1000 + list(TARGETS).index(target), GPUTarget(*TARGETS[target]))


def _triton_driver() -> Any:
    from triton.runtime.driver import driver

    return driver

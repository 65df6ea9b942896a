"""Compiles the launches of a configuration for a target, and ranks it among others if nothing can be timed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

from memstate.errors import CompileFailed
from memstate.kernels import tuned
from memstate.kernels.catalog import all_cases
from memstate.kernels.configs import Config
from memstate.kernels.dispatch import Backend
from memstate_tools.compile.accesses import WIDE_BITS, accesses, plane_accesses
from memstate_tools.compile.assembly import resources
from memstate_tools.compile.build import TARGETS, compiling
from memstate_tools.models import Model
from memstate_tools.tune.grid import model_for
from memstate_tools.workload import Workload, make

UNIT = "register bytes per byte moved"


@dataclass(frozen=True)
class Cost:
    """The worst figures of a kernel's launches under a configuration. Each is None if the kernel does not compile.

    Attributes:
        key: Key that the launches ask for.
        registers: Registers of a thread.
        spill_bytes: Spilled bytes of a thread.
        shared_bytes: Shared memory of a program.
        narrowest_bulk_access_bits: Fewest bits of a lane's access to plane bytes.
        why: Reason why the configuration is excluded; empty if it is not.
        weight: Register bytes of a thread for each byte of states that its code loads or stores: less is better. A
            multiprocessor has a fixed number of registers, so this is the reciprocal of the bytes that it can keep in
            flight. It does not say how long a call takes.
    """

    key: str = ""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    narrowest_bulk_access_bits: int | None = None
    why: str = ""
    weight: float | None = None


class Nowhere(NamedTuple):
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


@contextmanager
def launches(target: str) -> Iterator[list[tuple[Any, Any]]]:
    """Yields a list of the launches in the block, as (kernel, its compilation for `target`). Nothing runs."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    seen: list[tuple[Any, Any]] = []
    launch, nowhere = JITFunction.run, Nowhere(1000 + list(TARGETS).index(target), GPUTarget(*TARGETS[target]))

    def run(kernel: Any, *args: Any, grid: object, warmup: bool, **given: Any) -> None:
        seen.append((kernel, lambda: launch(kernel, *args, grid=grid, warmup=True, **given)))

    with patch.object(JITFunction, "run", run), patch.object(driver, "_active", nowhere):
        yield seen


def key_of(kernel: str, states: Model) -> str:
    """Returns the key that a kernel's launches ask for on states of a model; "" if they fail before."""
    with launches(next(iter(TARGETS))), tuned.trying():
        with suppress(Exception):  # each trial says why
            next(iter(_workload(kernel, states).acts.values()))()
        return tuned.last_key(kernel)


@lru_cache(maxsize=1)  # states of a whole model
def _workload(kernel: str, states: Model) -> Workload:
    backend = Backend("reference")
    backend.name = "kernels"  # kernels on memory of a CPU: their launches are seen, and not run
    return make(kernel, states, 1, backend, 0)


def cost(config: Config, model: str, target: str) -> Cost:
    """Compiles the launches of a kernel on states of a model in this process, which must not interpret.

    Args:
        config: The configuration.
        model: Name of the model.
        target: Name of the target.
    """
    free = {axis.name: axis.default for axis in fields(config) if not axis.metadata["compiled"]}
    found, default = (_cost(each, model, target) for each in (replace(config, **free), type(config)()))
    # the bytes of a slot may not be a multiple of 16
    expected = min(WIDE_BITS, default.narrowest_bulk_access_bits or WIDE_BITS)
    narrowest = found.narrowest_bulk_access_bits or 0
    if not found.why and narrowest < expected:
        return replace(found, why=f"moves {narrowest} bits a lane for {target}, expected {expected}")
    return found


@cache
def _cost(config: Config, model: str, target: str) -> Cost:
    planes: dict[Any, set[str]] = {}  # kernel -> arguments that hold states in all of its launches
    for case in all_cases():
        if case.plane_args:
            planes.setdefault(case.kernel, set(case.plane_args)).intersection_update(case.plane_args)
    with launches(target) as seen:
        acts = _workload(config.kernel, model_for(config.kernel, model)[1]).acts
        seen.clear()  # what making planes has launched
        with tuned.trying(config):
            for act in acts.values():
                act()
            key = tuned.last_key(config.kernel)
        moved = [(kernel, compiled) for kernel, compiled in seen if kernel in planes]
        try:
            made = [
                _figures(compiling(kernel.__name__, target, compiled), planes[kernel]) for kernel, compiled in moved
            ]
        except CompileFailed as failure:
            return Cost(key, why=f"does not compile: {failure}")
    return worst(key, target, made)


def worst(key: str, target: str, made: Sequence[tuple[int, int, int, int, float]]) -> Cost:
    """Returns the worst of the figures of several launches; see `_figures`."""
    registers, spilled, shared, narrowest, weight = zip(*made, strict=True)
    why = f"spills {max(spilled)} bytes a thread for {target}" if any(spilled) else ""
    return Cost(key, max(registers), max(spilled), max(shared), min(narrowest), why, max(weight))


def _figures(compiled: Any, planes: set[str]) -> tuple[int, int, int, int, float]:
    """Returns registers, spills, shared memory, bits of the narrowest access to plane bytes, and the weight."""
    signature = compiled.src.signature
    arguments = [name for name, kind in signature.items() if kind != "constexpr"]
    pointers = [name for name in arguments if signature[name].startswith("*")]
    bits = [each.bits for each in plane_accesses(accesses(compiled.asm["llir"], arguments), planes, pointers)]
    used = resources(compiled.asm)
    weight = used.registers * 4 * 8 / sum(bits)
    return used.registers, used.spill_bytes, compiled.metadata.shared, min(bits), weight

"""Compiles the launches of a call for a target, and ranks configurations if nothing can be timed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from typing import NamedTuple

from torch import Tensor

from memstate.errors import CompileFailed, ConfigurationError
from memstate.kernels.configs import Config
from memstate.kernels.tuned import trying
from memstate_tools.compile.accesses import WIDE_BITS, accesses, plane_accesses
from memstate_tools.compile.assembly import resources
from memstate_tools.compile.build import reporting
from memstate_tools.launches import Launch, compiling
from memstate_tools.workload import Workload

UNIT = "register bytes per byte moved"


@dataclass(frozen=True)
class Cost:
    """The worst figures of a kernel's launches under a configuration. Each is None if the kernel does not compile.

    Attributes:
        registers: Registers of a thread.
        spill_bytes: Spilled bytes of a thread.
        shared_bytes: Shared memory of a program.
        narrowest_bulk_access_bits: Fewest bits of a lane's access to bytes of states; None if no launch has one.
        programs: Programs of a launch; None if they depend on the device.
        why: Reason why the configuration is excluded; empty if it is not.
        weight: Register bytes of a thread for each byte of states that its code loads or stores: less is better. A
            multiprocessor has a fixed number of registers, so this is the reciprocal of the bytes that it can keep in
            flight. It does not say how long a call takes. Without an access to states: register bytes of a thread.
    """

    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    narrowest_bulk_access_bits: int | None = None
    programs: int | None = None
    why: str = ""
    weight: float | None = None


class Figures(NamedTuple):
    """Figures of one launch; see `Cost`. `bits` and `weight` are 0 if the launch does not access states."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    bits: int
    programs: int
    weight: float


class Compiler:
    """Compiles the calls of a workload under several configurations. Nothing runs.

    Args:
        workload: The calls, of kernels on tensors of the CPU; see `memstate_tools.launches.kernels`.
        target: Name of the target.
    """

    def __init__(self, workload: Workload, target: str) -> None:
        self._workload, self._target = workload, target
        self._made = cache(self._cost)

    def cost(self, config: Config) -> Cost:
        """Returns the cost of a configuration.

        Raises:
            ConfigurationError: Triton cannot write its cache.
        """
        free = {axis.name: axis.default for axis in fields(config) if not axis.metadata["compiled"]}
        found, default = self._made(replace(config, **free)), self._made(type(config)())
        # the bytes of a slot may not be a multiple of 16
        expected = min(WIDE_BITS, default.narrowest_bulk_access_bits or WIDE_BITS)
        narrowest = found.narrowest_bulk_access_bits
        if not found.why and narrowest is not None and narrowest < expected:
            found = replace(found, why=f"moves {narrowest} bits a lane for {self._target}, expected {expected}")
        return replace(found, programs=None) if free else found

    def _cost(self, config: Config) -> Cost:
        try:
            with compiling(self._target) as seen, trying(config):
                for act in self._workload.acts.values():
                    act()
            made = [_figures(launch, self._workload.states) for launch in seen]
        except CompileFailed as failure:
            return Cost(why=f"does not compile: {failure}")
        except ConfigurationError:
            raise
        except Exception as error:  # own kernels can raise any error
            return Cost(why=f"cannot be launched: {type(error).__name__}: {error}")
        return worst(self._target, made)


def worst(target: str, made: Sequence[Figures]) -> Cost:
    """Returns the worst of the figures of several launches."""
    if not made:
        return Cost(why="launches no kernel")
    registers, spilled, shared, bits, programs, weights = zip(*made, strict=True)
    why = f"spills {max(spilled)} bytes a thread for {target}" if any(spilled) else ""
    narrowest = min(filter(None, bits), default=None)
    weight = max(weights) or 4.0 * max(registers)
    return Cost(max(registers), max(spilled), max(shared), narrowest, max(programs), why, weight)


def _figures(launch: Launch, states: Sequence[Tensor]) -> Figures:
    compiled = reporting(launch.kernel.__name__, launch.target, lambda: launch.compiled)
    pointers = [name for name, kind in launch.types.items() if kind.startswith("*")]
    bits, used = [0], resources(compiled.asm)
    if moved := set(launch.arguments_in(states)).intersection(pointers):
        bits = [
            each.bits for each in plane_accesses(accesses(compiled.asm["llir"], list(launch.types)), moved, pointers)
        ] or [0]
    weight = used.registers * 4 * 8 / sum(bits) if any(bits) else 0.0
    programs = prod(launch.grid)
    return Figures(used.registers, used.spill_bytes, compiled.metadata.shared, min(bits), programs, weight)

"""Which kernel argument does the address of each memory access come from? Knows no instruction set and no plane.

A reader (`ptx`, `amdgcn`) turns compiled text into instructions that say which registers they read and write; this
follows what every register may derive from through all paths of the program, until nothing changes. An address
derives from

    an argument         pointer plus anything          Origin("state_ptr", loaded=False)
    a value loaded      an entry of an address table   Origin("tiles_ptr", loaded=True)

Where two paths meet, a register derives from what it derives from on either. What passes through shared or private
memory is forgotten: an access without a pointer behind it is reported as such and never taken for harmless.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WIDE_BITS = 128  # 16 bytes, the widest access that every target has


class Origin(NamedTuple):
    """What a value derives from: a kernel argument, or something loaded through it."""

    argument: str
    loaded: bool = False


PARAMETERS = Origin("")  # the start of the block of kernel arguments
INSIDE_PARAMETERS = Origin("", True)  # somewhere in it
Origins = frozenset[Origin]
NOTHING: Origins = frozenset()


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction as far as values move.

    Attributes:
        writes: Registers that get a value derived from `reads`.
        reads: Registers.
        copies: Whether it is the very value.
        weak: Whether they may also keep the old one.
        clears: Registers that get a value derived from nothing, such as a predicate.
        address: Registers that the address of an access derives from.
        bits: Width per lane of an access of global memory, 0 for none.
        loads: Whether `writes` get what is there.
        arguments: Per register written, the kernel argument it gets where `address` is the start of the arguments.
        jumps: Instructions that may follow.
        falls: Whether the next one may.
    """

    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    copies: bool = False
    weak: bool = False
    clears: tuple[str, ...] = ()
    address: tuple[str, ...] = ()
    bits: int = 0
    loads: bool = False
    arguments: tuple[str | None, ...] = ()
    jumps: tuple[int, ...] = ()
    falls: bool = True


class Access(NamedTuple):
    """One load, store or atomic of global memory in the compiled text."""

    bits: int
    loads: bool
    origins: Origins


State = dict[str, Origins]


def trace(program: Sequence[Instruction], entry: Mapping[str, Origins]) -> list[Access]:
    """Returns every access of global memory, with all that its address may derive from; nothing where no path leads.

    Args:
        program: The instructions.
        entry: What registers hold when the program starts.
    """
    at_start: dict[int, State] = {0: dict(entry)}
    found = {index: Access(step.bits, step.loads, NOTHING) for index, step in enumerate(program) if step.bits}
    starts = {0} | {target for step in program for target in step.jumps}
    waiting = [0]
    while waiting:
        index = waiting.pop()
        state = dict(at_start[index])
        running = True
        while running and index < len(program):
            step = program[index]
            _carry_out(step, state, found, index)
            running = step.falls and index + 1 not in starts
            followers = step.jumps if running or not step.falls else (*step.jumps, index + 1)
            for target in followers:
                if target < len(program) and _join(at_start, target, state):
                    waiting.append(target)
            index += 1
    return [found[index] for index in sorted(found)]


def _carry_out(step: Instruction, state: State, found: dict[int, Access], index: int) -> None:
    address = _union(state, step.address)
    values = [NOTHING] * len(step.writes)
    if address and address <= {PARAMETERS, INSIDE_PARAMETERS}:
        found.pop(index, None)
        if address == {PARAMETERS} and step.arguments:
            values = [NOTHING if argument is None else frozenset({Origin(argument)}) for argument in step.arguments]
    elif step.bits:
        found[index] = Access(step.bits, step.loads, address)  # a later visit knows more, never less
        values = [frozenset(Origin(origin.argument, True) for origin in address)] * len(step.writes)
    else:
        value = _union(state, step.reads)
        if PARAMETERS in value and not step.copies:
            value = value - {PARAMETERS} | {INSIDE_PARAMETERS}
        values = [value] * len(step.writes)
    for register, value in zip(step.writes, values, strict=True):
        state[register] = value | state.get(register, NOTHING) if step.weak else value
    for register in step.clears:
        state.pop(register, None)


def _union(state: State, registers: Iterable[str]) -> Origins:
    return NOTHING.union(*(state.get(register, NOTHING) for register in registers))


def _join(at_start: dict[int, State], target: int, state: State) -> bool:
    """Adds `state` to what is known where `target` starts; returns whether that was news."""
    if target not in at_start:
        at_start[target] = dict(state)
        return True
    known, news = at_start[target], False
    for register, origins in state.items():
        before = known.get(register, NOTHING)
        if not origins <= before:
            known[register] = before | origins
            news = True
    return news


def plane_accesses(accesses: Sequence[Access], plane_args: Iterable[str], pointers: Iterable[str]) -> list[Access]:
    """Returns the accesses that move plane bytes.

    An argument through which addresses are loaded is a table: what those addresses reach counts, reading the table does
    not. An access whose address derives from no argument in `pointers` counts: it may move plane bytes.
    """
    direct = {Origin(argument) for argument in pointers}
    planes: set[Origin] = set()
    for argument in plane_args:
        table = Origin(argument, True)
        planes.add(table if any(table in access.origins for access in accesses) else Origin(argument))
    return [access for access in accesses if access.origins & planes or not access.origins & direct]

"""Makes random programs of operations, runs them, and shrinks failing ones to a short text that runs them again.

Example:

    run(Program(settings=17, operations=(("admit", 1), ("plan", 0))), backend)
"""

import random
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memstate.kernels.dispatch import Backend
from tests.proof.stateful.operations import BELOW, KEYED, OPERATIONS, Operations
from tests.proof.stateful.settings import Settings

LARGEST = 2**128


@dataclass(frozen=True)
class Program:
    """Settings and operations as plain numbers.

    settings: number from which the settings are drawn. given: settings that are not drawn. operations: (name, number)
    of each; its arguments are drawn from the number.
    """

    settings: int
    operations: tuple[tuple[str, int], ...]
    given: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def random(cls, seed: object, length: int, **given: Any) -> "Program":
        """Draws a program. The same seed gives the same program."""
        chance = random.Random(f"{seed}")
        settings = chance.randrange(LARGEST)
        drawn = Settings.draw(settings, **given)
        shares = OPERATIONS | (BELOW if drawn.tiered else KEYED if drawn.keyed else {})
        names = chance.choices(list(shares), list(shares.values()), k=length)
        numbers = [chance.randrange(LARGEST) for _ in names]
        return cls(settings, tuple(zip(names, numbers, strict=True)), given)

    def drawn(self) -> Settings:
        return Settings.draw(self.settings, **self.given)


class Difference(AssertionError):
    """A program after which manager and model differ, or which raised an unexpected error."""

    def __init__(self, program: Program, at: int, why: str) -> None:
        self.program, self.at, self.why = program, at, why
        super().__init__(f"{program}\n# {program.drawn()}\n# operation {at}: {why}")


def run(program: Program, backend: Backend) -> Operations:
    """Runs a program to its end. Raises: Difference."""
    return carry_out(program, Operations(program.drawn(), Backend(backend.name, backend.device)))


def carry_out(program: Program, machine: Operations) -> Operations:
    """Runs a program with a new machine. Raises: Difference."""
    at = -1
    try:
        for name, number in program.operations:
            at += 1
            machine.run(name, number)
        at += 1
        machine.close()
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno})"
        raise Difference(program, at, why) from error
    return machine


def difference(program: Program, backend: Backend) -> Difference | None:
    try:
        run(program, backend)
    except Difference as error:
        return error
    return None


def shrunk(first: Difference, backend: Backend, tries: int = 1500) -> Difference:
    """Returns the failure of a simpler program: fewer operations, smaller numbers."""
    shorter = replace(first.program, operations=first.program.operations[: first.at + 1])
    best = difference(shorter, backend) or first
    programs = _simpler(best.program)
    for _ in range(tries):
        if (program := next(programs, None)) is None:
            break
        if again := difference(program, backend):
            best, programs = again, _simpler(again.program)
    return best


def _simpler(program: Program) -> Iterator[Program]:
    """Yields simpler programs: first with fewer operations, then with smaller numbers, then with simpler settings."""
    operations = program.operations
    size = len(operations) // 2
    while size:
        for start in range(0, len(operations), size):
            yield replace(program, operations=operations[:start] + operations[start + size :])
        size //= 2
    for i, (name, number) in enumerate(operations):
        for smaller in _smaller(number):
            yield replace(program, operations=(*operations[:i], (name, smaller), *operations[i + 1 :]))
    for smaller in _smaller(program.settings):
        yield replace(program, settings=smaller)


def _smaller(number: int) -> list[int]:
    """Returns smaller numbers: each lacks some of the highest bits, which are the last decisions."""
    bits = number.bit_length()
    kept = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, bits - 2, bits - 1)
    return sorted({number % 2**keep for keep in kept if 0 <= keep < bits} - {number})


def work(seeds: Sequence[int], length: int, name: str, shrink: bool, given: dict[str, Any]) -> tuple[int, str]:
    """Runs the programs of some seeds in a worker process; returns the number of calls, and the first difference."""
    torch.set_num_threads(1)
    backend, calls = Backend(name, "cuda" if name == "cuda" else "cpu"), 0
    for seed in seeds:
        try:
            calls += run(Program.random(seed, length, **given), backend).calls
        except Difference as error:
            return calls, f"{seed}: {shrunk(error, backend) if shrink else error}"
    return calls, ""

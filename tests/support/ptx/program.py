"""Runs the threads of a compiled kernel: many programs at a time, and a basic block at a time.

Of the threads that can go on, those at the lowest block go first, and the others wait: so lanes that have parted meet
again where their ways join. A barrier lets a program go on when all its threads wait there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Final

import numpy as np
import torch

from tests.support.ptx import steps
from tests.support.ptx.memory import ALLOCATIONS, Memory
from tests.support.ptx.races import BARRIER as AT_BARRIER
from tests.support.ptx.races import THREAD
from tests.support.ptx.reading import BARRIER, ENDS, Instruction, read
from tests.support.ptx.reading import Fault as Fault
from tests.support.ptx.steps import LANES, Step, Threads
from tests.support.ptx.values import TYPES

Array = Any
TOGETHER: Final = 16_384  # threads that run at a time
RUNS, WAITS, ENDED = range(3)
ONE_AT_A_TIME: Final = Lock()  # threads launch on one stream
ORDERS: Final = ("together", "warps", "backwards")


class Program:
    """A compiled kernel, ready to run.

    Args:
        text: its PTX.
    """

    def __init__(self, text: str) -> None:
        self.listing = read(text)
        self.name, self.kinds = self.listing.name, self.listing.kinds
        self._blocks: dict[int, list[tuple[Step | None, Instruction]]] = {}
        self.signals = "griddepcontrol.launch_dependents" in text  # whether the next launch may begin before it ends
        self._front: list[Callable[[], None]] = []
        accesses = [one for block in self.listing.blocks for one in block if one.words[0] in steps.ACCESSES]
        self.cells = tuple(
            min((steps.size_of(one) for one in accesses if space in one.words), default=2)
            for space in ("global", "shared")
        )

    def run(
        self, grid: Sequence[int], args: Sequence[torch.Tensor | int | float], warps: int, shared: int = 0,
        order: str = "together", front: Sequence[Callable[[], None]] = (),
    ) -> Counter[tuple[str, str]]:  # fmt: skip
        """Runs all programs of a launch on the memory of its tensors.

        Args:
            grid: number of programs in up to three directions.
            args: arguments in order. An int for a pointer is an address.
            warps: warps of a program.
            shared: bytes of shared memory of a program.
            order: "together", "warps", "backwards", or digits, the seed of a random order of warps and programs.
            front: runs the launch in front of this one, if that has not run. It then runs as late as it may: when
                a program of this launch waits for it. So a program that reads its results too early reads old bytes.

        Returns:
            Number of cells that raced, by (what, place in the source).

        Raises:
            Fault: the kernel does what no kernel may do.
        """
        with ONE_AT_A_TIME:
            self._front = list(front)
            raced = self.run_now(grid, args, warps, shared, order)
            if self._front:
                raise Fault(f"{self.name}: does not wait for the launch in front of it")
            return raced

    def wait(self) -> None:
        """Runs the launch in front of this one, unless it has run."""
        while self._front:
            self._front.pop()()

    def run_now(
        self, grid: Sequence[int], args: Sequence[torch.Tensor | int | float], warps: int, shared: int, order: str
    ) -> Counter[tuple[str, str]]:  # fmt: skip
        """Does what `run` does, without waiting for other threads' launches."""
        ALLOCATIONS.note(each for each in args if isinstance(each, torch.Tensor))
        bits = [_bits(each) for each in args]
        directions = (*grid, 1, 1)[:3]
        count, threads = int(np.prod(directions)), 32 * warps
        size = max(1, TOGETHER // threads)
        memory = Memory(self.cells, threads, shared, order)
        chosen = np.random.default_rng(int(order) if order.isdigit() else 0)
        firsts = list(range(0, count, size))
        if order.isdigit():
            chosen.shuffle(firsts)
        for first in reversed(firsts) if order == "backwards" else firsts:
            memory.begin(min(size, count - first))
            with np.errstate(all="ignore"):
                Machine(
                    self, directions, range(first, min(first + size, count)), threads, bits, memory, order, chosen
                ).go()
        return memory.races

    def block(self, number: int) -> list[tuple[Step | None, Instruction]]:
        """Returns what the instructions of a basic block do. Raises: Fault if one is not known here."""
        if number not in self._blocks:  # many blocks never run
            self._blocks[number] = [(self._step(one), one) for one in self.listing.blocks[number]]
        return self._blocks[number]

    def _step(self, one: Instruction) -> Step | None:
        """Returns what an instruction does; None for one that ends a block."""
        ends, waits = one.words[0] in ENDS, one.words[:2] == BARRIER
        step = None if ends or waits else steps.find(one)
        if (step is None and not ends and not waits) or (waits and (one.guard or one.args != ("0",))):
            raise one.fault(f"{self.name}: this instruction is not known here")
        return step


def _bits(arg: torch.Tensor | int | float) -> Any:
    """Returns an argument of a launch as unsigned bits."""
    if isinstance(arg, float):
        return np.array([arg], "f4").view("u4")[0]
    return np.uint64((arg.data_ptr() if isinstance(arg, torch.Tensor) else arg) % 2**64)


class Machine:
    """Some programs of a launch, with the registers of their threads.

    Attributes:
        registers: name -> bits for each thread. They begin with rubbish.
        params: bits of the arguments.
        moment: for each thread, see `races`.
        program: for each thread the number of its program in this machine.
    """

    def __init__(
        self, of: Program, grid: tuple[int, ...], programs: range, threads: int, params: Sequence[Any], memory: Memory,
        order: str, random: np.random.Generator,
    ) -> None:  # fmt: skip
        self.of, self.params, self.memory, self._order, self._random = of, params, memory, order, random
        self.threads, self._each = len(programs) * threads, threads
        self._number = np.arange(self.threads)
        self.program = self._number // threads
        self.moment = self._number + (programs.start + 1) * threads << THREAD  # never 0
        self._state, self._block = np.zeros(self.threads, "i1"), np.zeros(self.threads, "i4")
        self.registers = _Registers(of.kinds, self.threads)
        x, y, _ = grid
        index = self.program + programs.start
        self._special = {
            "%tid.x": self._number % threads, "%ctaid.x": index % x,
            "%ctaid.y": index // x % y, "%ctaid.z": index // (x * y), "%nctaid.x": np.array(x),
        }  # fmt: skip

    def count(self, at: Threads) -> int:
        """Returns the number of threads."""
        return self.threads if isinstance(at, slice) else len(at)

    def bits_of(self, name: str) -> int:
        """Returns the width of a register; 64 for what is none."""
        return 8 * np.dtype(self.of.kinds.get(name, "u8")).itemsize

    def read(self, text: str, kind: str, at: Threads) -> Array:
        """Returns an operand of some threads as numbers of a type; a wider register is cut. Raises: Fault."""
        dtype = TYPES[kind]
        if text in self.of.kinds:
            bits = self.registers[text][at]
            return (bits if bits.itemsize == dtype.itemsize else bits.astype(f"u{dtype.itemsize}")).view(dtype)
        if text in self._special:
            return np.broadcast_to(self._special[text], self.threads)[at].astype(dtype)
        try:
            return np.broadcast_to(steps.constant(text, kind), self.count(at))
        except ValueError:
            raise Fault(f"{self.of.name}: operand {text} is not known here") from None

    def write(self, name: str, word: Array, at: Threads) -> None:
        """Writes a register of some threads; a wider one gets the sign or 0 in front. Nothing is kept of "_"."""
        if name == "_":
            return
        register = self.registers[name]
        if word.itemsize < register.itemsize:
            word = word if word.dtype.kind == "i" else word.view(f"u{word.itemsize}")
            word = word.astype(f"{word.dtype.kind}{register.itemsize}")
        register[at] = word.view(register.dtype)

    def who(self, at: Threads) -> tuple[Array, Array]:
        """Returns the moments of some threads, and the numbers of their programs."""
        return self.moment[at], self.program[at]

    def meet(self, one: Instruction, at: Threads, ordered: int = 0) -> None:
        """Requires whole warps. ordered: 1 if what their lanes have stored and loaded is in order from then on.

        Raises:
            Fault: a warp is not whole.
        """
        self._whole(one, at)
        if one.args[-1][0] not in "[{" and (self.read(one.args[-1], "u32", at) != 2**32 - 1).any():
            raise one.fault("a mask names a part of a warp")
        self.moment[at] += ordered

    def _whole(self, one: Instruction, at: Threads) -> None:
        if not isinstance(at, slice):
            warps = at.reshape(-1, LANES) if len(at) % LANES == 0 else None
            if warps is None or (warps[:, 0] % LANES).any() or (warps[:, -1] - warps[:, 0] != 31).any():
                raise one.fault("a warp is not whole")

    def _guarded(self, step: Step, one: Instruction, at: Threads) -> None:
        """Runs an instruction for those threads whose guard lets them."""
        if one.guard:
            on = self.registers[one.guard][at] != one.negated
            if not on.all():
                at = np.flatnonzero(on) if isinstance(at, slice) else at[on]
        if self.count(at):
            step(self, one, at)

    def go(self) -> None:
        """Runs to the end."""
        while len(running := np.flatnonzero(self._state == RUNS)):
            chosen = self._chosen(running)
            block = int(self._block[chosen].min())
            at = chosen[self._block[chosen] == block]
            self._run(block, at)
        if (waiting := self._block[self._state == WAITS]).size:
            raise self._barrier(waiting[0]).fault("threads wait at a barrier that others never reach")

    def _chosen(self, running: Array) -> Array:
        """Returns the threads that may go on now: all, or one warp of each program, as the order says."""
        if self._order == "together":
            return running
        program, warp = self.program[running], running // LANES
        starts = np.flatnonzero(np.r_[True, program[1:] != program[:-1]])
        counts = np.diff(np.r_[starts, len(running)])
        picked = starts if self._order == "warps" else starts + counts - 1
        if self._order.isdigit():
            picked = starts + self._random.integers(counts)
        mine = warp == np.repeat(warp[picked], counts)
        if self._order.isdigit() and len(counts) > 1:  # half of the programs pause
            some = mine & np.repeat(self._random.random(len(counts)) < 0.5, counts)
            mine = some if some.any() else mine
        return running[mine]

    def _run(self, block: int, at: Array) -> None:
        """Runs a basic block."""
        threads: Threads = slice(None) if len(at) == self.threads else at
        self._block[at] = block + 1
        for step, one in self.of.block(block):
            if step is not None:
                self._guarded(step, one, threads)
            elif one.words[0] == "bra":
                target = self.of.listing.targets[one.args[0]]
                taken = at[self.registers[one.guard][at] != one.negated] if one.guard else at
                self._block[taken] = target
            else:
                ends = at[self.registers[one.guard][at] != one.negated] if one.guard else at
                if one.words[:2] == BARRIER:
                    self._whole(one, threads)
                self._state[ends] = WAITS if one.words[:2] == BARRIER else ENDED
                self._release()

    def _barrier(self, behind: int) -> Instruction:
        """Returns the barrier before a block."""
        return self.of.listing.blocks[behind - 1][-1]

    def _release(self) -> None:
        """Lets those programs go on of which all threads wait at a barrier."""
        states = self._state.reshape(-1, self._each)
        waits = states == WAITS
        free = waits.all(1)
        if not free.any():
            return
        blocks = self._block.reshape(-1, self._each)[free]
        if (blocks != blocks[:, :1]).any():
            raise self._barrier(blocks[blocks != blocks[0, 0]][0]).fault(
                "warps of a program wait at different barriers"
            )
        states[free] = RUNS
        moments = self.moment.reshape(-1, self._each)
        moments[free] = (moments[free] >> AT_BARRIER) + 1 << AT_BARRIER


class _Registers(dict[str, Array]):
    """Registers, made at their first use. They begin with rubbish."""

    def __init__(self, kinds: dict[str, str], threads: int) -> None:
        super().__init__()
        self._kinds, self._threads = kinds, threads

    def __missing__(self, name: str) -> Array:
        kind = self._kinds[name]
        fresh = np.full(self._threads * np.dtype(kind).itemsize, 0xA5, "u1")
        made = self[name] = fresh > 0 if kind == "?" else fresh.view(kind)
        return made

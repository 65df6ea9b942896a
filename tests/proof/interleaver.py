"""Runs the programs of a launch in any order: threads under Triton's interpreter that take turns at every access.

One program runs at a time, up to its next access to memory. A chooser says which program goes on, and the same choices
give the same run. In every version of Triton, interpreted kernels reach memory through four native functions. During a
run these are replaced by functions that let `tests.support.addresses` check each access first.

Here an access of all lanes of a program is one step, and all programs see its effect at once. On a GPU, lanes and
caches may work in another order. A launch without conflicts does not depend on this order.

A program can have several warps with the same lanes, as in Triton if a tensor has fewer lanes than there are threads.
Here each warp is a thread. Every warp loads for itself, and decides by the values that it has loaded. A random draw
chooses the warp that stores a word; a single value is stored by the first warp, as in Triton. One warp carries out an
atomic, and the others wait for its result. Warps wait for each other only at barriers of the source: in Triton,
reductions are a meeting point only if lanes are spread over warps, not if warps hold copies.
"""

import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.support.addresses import ATOMIC, LOAD, NOTHING, STORE, Access, Bytes, Launch, Limits, Log

Chooser = Callable[[Sequence[int]], int]  # numbers of the programs that can go on, ascending -> one of them
T = TypeVar("T")
NATIVE = ("load", "store", "atomic_rmw", "atomic_cas")
HARMLESS = ("fma_fp32", "fma_fp64", "RMW_OP", "MEM_SEMANTIC")


def stock(ready: Sequence[int]) -> int:
    """Always chooses the first program. So programs run one after the other, as in Triton's own interpreter."""
    return ready[0]


class Seeded:
    """Chooses at random, from a seed. Programs have different speeds, so that some fall far behind."""

    def __init__(self, seed: int) -> None:
        self._random, self._pace = random.Random(seed), dict[int, int]()

    def __call__(self, ready: Sequence[int]) -> int:
        weights = [self._pace.setdefault(program, self._random.choice((1, 4, 16))) for program in ready]
        return self._random.choices(ready, weights)[0]


class Scripted:
    """Chooses as a script says, then always the first program.

    path: for each step so far, which program was chosen, and among how many.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self._script, self.path = script, list[tuple[int, int]]()

    def __call__(self, ready: Sequence[int]) -> int:
        at = len(self.path)
        self.path.append((self._script[at] if at < len(self._script) else 0, len(ready)))
        return ready[self.path[-1][0]]


class Abandoned(BaseException):
    """Raised in the other programs of a launch, after one has failed."""


class Program(threading.Thread):
    """A thread for a program of a launch, or for one of its warps. It runs only between `go_on` and its next pause."""

    def __init__(self, index: tuple[int, ...], body: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.index, self.body, self.error = index, body, None
        self.phase = self.atomics = 0
        self.waits: Callable[[], bool] | None = None
        self.done = self.abandoned = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self._go.acquire()
        try:
            if not self.abandoned:
                self.body()
        except BaseException as error:
            self.error = error
        self.done = True
        self._back.release()

    @property
    def ready(self) -> bool:
        return not self.done and not (self.waits and self.waits())

    def wait(self, waits: Callable[[], bool]) -> None:
        """Pauses until `waits()` is false."""
        if waits():
            self.waits = waits
            self.pause()
            self.waits = None

    def pause(self) -> None:
        self._back.release()
        self._go.acquire()
        if self.abandoned:
            raise Abandoned

    def go_on(self) -> None:
        interpreter.interpreter_builder.grid_idx = self.index  # read by `tl.program_id`
        self._go.release()
        self._back.acquire()


class Session:
    """Launches under one chooser.

    shared: programs pause only before accesses to these bytes; None: before all. warps: number of warps of each
    program, which hold the same lanes. draw: seed by which a warp is chosen to store a word.
    """

    def __init__(self, chooser: Chooser, limits: Limits, shared: Bytes | None, warps: int, draw: int) -> None:
        self.log, self._chooser, self._limits, self._shared = Log(), chooser, limits, shared
        self.warps, self._draw = warps, random.Random(draw)
        self._owners: dict[object, int] = {}  # address of a word, or (program, number of its atomic) -> warp
        self._programs: list[Program] = []
        self._returned: dict[tuple[int, int], Any] = {}  # (program, number of its atomic) -> result
        self._running = 0

    def access(self, kind: str, pointers: Any, mask: Any, size: int) -> None:
        """Pauses the program before an access, then records the access. Skips an access with all lanes masked."""
        at = np.asarray(pointers).astype(np.int64).ravel()
        lane = np.arange(len(at))
        if mask is not None:
            lane = lane[np.broadcast_to(np.asarray(mask, bool), np.shape(pointers)).ravel()]
        if len(lane):
            program = self._programs[self._running]
            access = Access(self._running // self.warps, kind, at[lane], size, lane, len(at), program.phase)
            if self._shared is None or np.isin(access.bytes(), self._shared).any():
                program.pause()
            self.log.launches[-1].add(access)

    def own(self, pointers: Any, mask: Any) -> Any:
        """Returns the mask of the lanes that the running warp stores.

        These are the words that the draw gives to this warp. A single value is stored by warp 0.
        """
        if self.warps == 1:
            return mask
        at, warp = np.asarray(pointers), self._running % self.warps
        own = np.broadcast_to(True if mask is None else np.asarray(mask, bool), at.shape).copy()
        if at.size > 1:
            own[own] = [self._owner(word) == warp for word in at[own].tolist()]
        return own if at.size > 1 or warp == 0 else np.zeros_like(own)

    def _owner(self, of: object) -> int:
        if of not in self._owners:
            self._owners[of] = self._draw.randrange(self.warps)
        return self._owners[of]

    def atomic(self, pointers: Any, mask: Any, size: int, carry_out: Callable[[], Any]) -> Any:
        """Lets one warp, chosen by the draw, carry out an atomic. Returns the result in all warps."""
        program, key = (
            self._programs[self._running],
            (self._running // self.warps, self._programs[self._running].atomics),
        )
        program.atomics += 1
        if self._owner(key) == self._running % self.warps:
            self.access(ATOMIC, pointers, mask, size)
            self._returned[key] = carry_out()
        program.wait(lambda: key not in self._returned)
        return self._returned[key]

    def barrier(self) -> None:
        """Lets the warps of a program wait for each other, except those that have ended."""
        program, first = self._programs[self._running], self._running // self.warps * self.warps
        program.phase += 1
        others = self._programs[first : first + self.warps]
        program.wait(lambda: any(other.phase < program.phase and not other.done for other in others))

    def launch(self, kernel: str, arguments: Mapping[str, Any]) -> None:
        # `triton.reinterpret` returns an object with the tensor in `base`.
        plain = {name: getattr(value, "base", value) for name, value in arguments.items()}
        tensors = {name: value for name, value in plain.items() if isinstance(value, torch.Tensor)}
        self.log.launches.append(Launch(kernel, tensors, self._limits, arguments.get("num_warps", 4)))
        self._returned, self._owners = {}, {}

    def run(self, programs: list[Program]) -> None:
        """Brings each program to its first access, then lets chosen programs go on until all have ended.

        Abandons warps that would wait at a barrier for ever; on a GPU they would hang.
        """
        self._programs, self.log.launches[-1].programs = programs, len(programs) // self.warps
        for program in programs:
            program.start()
        try:
            for number in range(len(programs)):
                self._go_on(number)
            while ready := [number for number, program in enumerate(programs) if program.ready]:
                self._go_on(self._chooser(ready))
            self._look_for_parted()
        finally:
            for program in programs:
                program.abandoned = True
                if not program.done:
                    program.go_on()
                program.join()

    def _look_for_parted(self) -> None:
        for first in range(0, len(self._programs), self.warps):
            warps = self._programs[first : first + self.warps]
            passed = [(warp.phase, warp.atomics, warp.done) for warp in warps]
            if len(set(passed)) > 1 or not warps[0].done:
                told = ", ".join(f"{barriers} and {atomics}" for barriers, atomics, _ in passed)
                self.log.launches[-1].parted.append(f"program {first // self.warps} ({told})")

    def _go_on(self, number: int) -> None:
        self._running = number
        self._programs[number].go_on()
        if self._programs[number].error:
            raise self._programs[number].error


class Body:
    """Replaces the function of a kernel. Collects the calls for all programs of a grid; the last call runs them."""

    def __init__(self, function: Any, session: Session) -> None:
        self.__name__, self.__globals__ = function.__name__, function.__globals__
        self.__signature__ = inspect.signature(function)
        self._function, self._session, self._programs = function, session, list[Program]()

    def __call__(self, **arguments: Any) -> None:
        builder, warps = interpreter.interpreter_builder, self._session.warps
        self._programs += [Program(builder.grid_idx, lambda: self._function(**arguments)) for _ in range(warps)]
        if len(self._programs) == warps * prod(builder.grid_dim):
            self._session.run(self._programs)


@contextmanager
def interleaved(
    chooser: Chooser, limits: Limits | None = None, shared: Bytes | None = None, warps: int = 1, draw: int = 0
) -> Iterator[Log]:
    """Runs the launches of the block in the order of the chooser, and checks every access.

    If a program raises an exception, raises this again. warps: number of warps of each program, which hold the same
    lanes. With more than one, the chooser chooses among warps. draw: seed by which a warp is chosen to store a word. It
    is a conflict if warps take different branches around a barrier or an atomic.
    """
    session = Session(chooser, limits or Limits(), shared, warps, draw)
    native, executor, builder = interpreter._interpreter, interpreter.GridExecutor, interpreter.InterpreterBuilder
    call, barrier = executor.__call__, builder.create_barrier

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        session.access(LOAD, pointers, mask, np.dtype(dtype).itemsize)
        return native.load(pointers, mask, other, dtype)

    def store(pointers: Any, value: Any, mask: Any) -> Any:
        mask = session.own(pointers, mask)
        session.access(STORE, pointers, mask, value.itemsize)
        return native.store(pointers, value, mask)

    def atomic_rmw(operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        return session.atomic(
            pointers, mask, value.itemsize, lambda: native.atomic_rmw(operation, pointers, value, mask, order)
        )

    def atomic_cas(pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        return session.atomic(
            pointers, None, value.itemsize, lambda: native.atomic_cas(pointers, expected, value, order)
        )

    def interleave(launch: Any, *args: Any, **kwargs: Any) -> None:
        session.launch(launch.fn.__name__, dict(zip(launch.arg_names, args, strict=False)) | kwargs)
        launch.fn = Body(launch.fn, session)
        try:
            call(launch, *args, **kwargs)
        except Exception as error:  # the interpreter raises another error from this one
            while error.__cause__:
                error = error.__cause__
            raise error from None

    # A native function of a later version that is not replaced raises AttributeError: no access is missed.
    harmless = {name: getattr(native, name) for name in HARMLESS if hasattr(native, name)}
    interpreter._interpreter = SimpleNamespace(
        **harmless, load=load, store=store, atomic_rmw=atomic_rmw, atomic_cas=atomic_cas
    )
    executor.__call__ = interleave
    builder.create_barrier = lambda _: session.barrier()
    try:
        yield session.log
    finally:
        interpreter._interpreter, executor.__call__, builder.create_barrier = native, call, barrier


def every_order(run: Callable[[Chooser], T]) -> Iterator[T]:
    """Yields the result of `run` under every schedule. The same choices must give the same result."""
    script: list[int] = []
    while True:
        chooser = Scripted(script)
        yield run(chooser)
        path = chooser.path
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        script = [choice for choice, _ in path[:-1]] + [path[-1][0] + 1]


def every_outcome(run: Callable[[Chooser, Bytes], tuple[T, Log]]) -> list[T]:
    """Returns the results of `run` under every order of the accesses to shared bytes. Other orders change no result.

    `run` must use the same memory every time. The log that it returns shows which bytes are shared. If the log of a
    schedule shows more shared bytes, the search starts again with these bytes, too.
    """
    shared = NOTHING
    while True:
        results, grown = [], shared
        for result, log in every_order(lambda chooser, known=shared: run(chooser, known)):
            results.append(result)
            grown = np.union1d(shared, np.concatenate([NOTHING, *(launch.shared() for launch in log.launches)]))
            if len(grown) > len(shared):
                break
        if len(grown) == len(shared):
            return results
        shared = grown


@triton.jit
def _probe(x_ptr, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    old = tl.load(x_ptr + lane, mask=lane < n, other=0)
    tl.store(x_ptr + program * n + lane, old, mask=lane < n)
    tl.debug_barrier()
    tl.atomic_add(x_ptr + lane, 1, mask=lane == program)


def misfit() -> str:
    """Runs two programs as a trial. Returns why this process cannot interleave programs; "" if it can."""
    if not triton.knobs.runtime.interpret:
        return "kernels of this process are compiled, not interpreted"
    memory = torch.zeros(6, dtype=torch.int32)
    at, last = memory.data_ptr(), Scripted([1, 0, 1, 0, 1])
    try:
        with interleaved(last) as log:
            _probe[(2,)](memory, 3, BLOCK=4)
        (launch,) = log.launches
        seen = [(a.program, a.kind, a.phase, (a.at - at).tolist(), a.size) for a in launch.accesses]
    except Exception as error:
        return f"Triton {triton.__version__}: {type(error).__name__}: {error}"
    expected = [
        (1, LOAD, 0, [0, 4, 8], 4), (0, LOAD, 0, [0, 4, 8], 4),
        (1, STORE, 0, [12, 16, 20], 4), (0, STORE, 0, [0, 4, 8], 4),
        (1, ATOMIC, 1, [4], 4), (0, ATOMIC, 1, [0], 4),
    ]  # fmt: skip
    fits = seen == expected and memory.tolist() == [1, 1, 0, 0, 0, 0]
    return "" if fits else f"Triton {triton.__version__}: expected {expected}, saw {seen} and {memory.tolist()}"

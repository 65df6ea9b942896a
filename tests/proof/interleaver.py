"""Runs the programs of a launch in any order: threads under Triton's interpreter that take turns at every access.

One program runs at a time, up to its next access to memory. A chooser says which program goes on, and the same choices
give the same run. In every version of Triton, interpreted kernels reach memory through four native functions. During a
run these are replaced by functions that let `tests.support.addresses` check each access first.

Here an access of all lanes of a program is one step, and all programs see its effect at once. On a GPU, lanes and
caches may work in another order. A launch without conflicts does not depend on this order. The warps of a program are
those of the compiled kernel: see `tests.support.ptx`.
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
    """A thread for a program of a launch. It runs only between `go_on` and its next pause."""

    def __init__(self, index: tuple[int, ...], body: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.index, self.body, self.error = index, body, None
        self.phase = 0
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

    shared: programs pause only before accesses to these bytes; None: before all.
    """

    def __init__(self, chooser: Chooser, limits: Limits, shared: Bytes | None) -> None:
        self.log, self._chooser, self._limits, self._shared = Log(), chooser, limits, shared
        self._programs: list[Program] = []
        self._running = 0

    def access(self, kind: str, pointers: Any, mask: Any, size: int) -> None:
        """Pauses the program before an access, then records the access. Skips an access with all lanes masked."""
        at = np.asarray(pointers).astype(np.int64).ravel()
        lane = np.arange(len(at))
        if mask is not None:
            lane = lane[np.broadcast_to(np.asarray(mask, bool), np.shape(pointers)).ravel()]
        if len(lane):
            program = self._programs[self._running]
            access = Access(self._running, kind, at[lane], size, lane, len(at), program.phase)
            if self._shared is None or np.isin(access.bytes(), self._shared).any():
                program.pause()
            self.log.launches[-1].add(access)

    def barrier(self) -> None:
        self._programs[self._running].phase += 1

    def launch(self, kernel: str, arguments: Mapping[str, Any]) -> None:
        # `triton.reinterpret` returns an object with the tensor in `base`.
        plain = {name: getattr(value, "base", value) for name, value in arguments.items()}
        tensors = {name: value for name, value in plain.items() if isinstance(value, torch.Tensor)}
        self.log.launches.append(Launch(kernel, tensors, self._limits, arguments.get("num_warps", 4)))

    def run(self, programs: list[Program]) -> None:
        """Brings each program to its first access, then lets chosen programs go on until all have ended."""
        self._programs, self.log.launches[-1].programs = programs, len(programs)
        for program in programs:
            program.start()
        try:
            for number in range(len(programs)):
                self._go_on(number)
            while ready := [number for number, program in enumerate(programs) if not program.done]:
                self._go_on(self._chooser(ready))
        finally:
            for program in programs:
                program.abandoned = True
                if not program.done:
                    program.go_on()
                program.join()

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
        builder = interpreter.interpreter_builder
        self._programs.append(Program(builder.grid_idx, lambda: self._function(**arguments)))
        if len(self._programs) == prod(builder.grid_dim):
            self._session.run(self._programs)


@contextmanager
def interleaved(chooser: Chooser, limits: Limits | None = None, shared: Bytes | None = None) -> Iterator[Log]:
    """Runs the launches of the block in the order of the chooser, and checks every access.

    If a program raises an exception, raises this again.
    """
    session = Session(chooser, limits or Limits(), shared)
    native, executor, builder = interpreter._interpreter, interpreter.GridExecutor, interpreter.InterpreterBuilder
    call, barrier = executor.__call__, builder.create_barrier

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        session.access(LOAD, pointers, mask, np.dtype(dtype).itemsize)
        return native.load(pointers, mask, other, dtype)

    def store(pointers: Any, value: Any, mask: Any) -> Any:
        session.access(STORE, pointers, mask, value.itemsize)
        return native.store(pointers, value, mask)

    def atomic_rmw(operation: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
        session.access(ATOMIC, pointers, mask, value.itemsize)
        return native.atomic_rmw(operation, pointers, value, mask, order)

    def atomic_cas(pointers: Any, expected: Any, value: Any, order: Any) -> Any:
        session.access(ATOMIC, pointers, None, value.itemsize)
        return native.atomic_cas(pointers, expected, value, order)

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

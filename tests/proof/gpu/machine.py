"""Runs a part of the proof on a GPU, or at toy sizes on a CPU, without graphs and streams.

A part is a program: `python -m tests.proof.gpu PART --json FILE --seconds N [--toy] [--compile] [--share I/N]`. With
--compile it launches its kernels only to fill the cache of compiled kernels. With --share it does every Nth piece of
its work, from piece I on. --toy needs TRITON_INTERPRET=1; without --toy this variable must not be set.
"""

import argparse
import json
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Act = Callable[[], object]


class Compilations:
    """Numbers of kernels that a process compiles and that it loads from Triton's cache, by name.

    Later launches of a kernel do not count.
    """

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()

    def install(self) -> bool:
        """Begins to count. Returns whether the installed Triton allows it."""
        try:
            from triton import knobs
        except ImportError:
            return False
        if not hasattr(knobs.compilation, "listener"):
            return False
        knobs.compilation.listener = self
        return True

    def __call__(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self.loaded if cache_hit else self.compiled)[str(getattr(src, "name", src))] += 1

    @property
    def all(self) -> Counter[str]:
        """Numbers of compiled and loaded kernels together. In both cases the launch had to wait."""
        return self.compiled + self.loaded


class TimeIsUp(Exception):
    """A part has no time left. Its results so far count."""


class Machine:
    """The device and the time of a part.

    toy: whether it runs at small sizes on the CPU. seconds: time of the part. file: the file that `keep` writes.
    compiling: whether launches only fill Triton's cache. share: (first piece, distance of pieces) of this process.
    only: the part to compile for; see `compiling`.
    """

    def __init__(
        self, toy: bool, seconds: float = 600.0, file: Path | None = None, compiling: bool = False,
        share: tuple[int, int] = (0, 1), only: str = "",
    ) -> None:  # fmt: skip
        self.only = only
        self.toy, self._file, self.compiling, self._share = toy, file, compiling, share
        self.device = torch.device("cpu" if toy else "cuda")
        self.compilations = Compilations()
        self._begun, self._seconds = time.monotonic(), seconds

    @property
    def hurry(self) -> bool:
        """Whether less than a quarter of the time is left."""
        return time.monotonic() - self._begun > 0.75 * self._seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._seconds - (time.monotonic() - self._begun)

    def go_on(self, what: str, needed: float = 0.0) -> None:
        """Raises TimeIsUp if less than `needed` seconds are left. what: says in words how far the part has come."""
        if self.left < needed:
            raise TimeIsUp(what)

    def mine(self, pieces: Sequence[T]) -> Sequence[T]:
        """Returns the pieces that this process does."""
        first, step = self._share
        return pieces[first::step]

    def keep(self, result: "Result") -> None:
        """Writes the results so far, because a part may be ended at any time."""
        if self._file:
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            new.replace(self._file)

    def beside(self, name: str) -> Path:
        """Returns the path of another file in the folder of the results."""
        return (self._file.parent if self._file else Path.cwd()) / name

    @property
    def backend(self) -> str:
        """The name of the backend whose kernels are proved."""
        return "interpreter" if self.toy else "cuda"

    def capture(self, act: Act) -> Act:
        """Captures the launches of `act`, which has run before. Returns a function for the replay; on a CPU `act`."""
        if self.toy:
            return act
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # raises an error if a call waits for the device
            act()
        return graph.replay

    def wait(self) -> None:
        """Waits until the device is idle. Syncs: yes."""
        if not self.toy:
            torch.cuda.synchronize()

    def generator(self, seed: int) -> torch.Generator:
        """Returns a generator of random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)


class Lane:
    """A second stream. With `beside` False, or on a CPU, it is the main stream itself."""

    def __init__(self, machine: Machine, beside: bool) -> None:
        self.stream = torch.cuda.Stream() if beside and not machine.toy else None

    def __enter__(self) -> "Lane":
        self._context: AbstractContextManager[Any] = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def after_main(self) -> None:
        """Makes the lane wait for all work that the main stream has now."""
        if self.stream:
            self.stream.wait_event(torch.cuda.current_stream().record_event())

    def mark(self) -> "torch.cuda.Event | None":
        """Returns an event after all work that the lane has now."""
        return self.stream.record_event() if self.stream else None

    @staticmethod
    def main_after(mark: "torch.cuda.Event | None") -> None:
        """Makes the main stream wait for an event of the lane."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


Result = dict[str, Any]  # figures by name; failures: lines; incomplete: progress until time was up


def main(part: Callable[[Machine, Result], None]) -> None:
    """Runs a part. Writes its result even if it raises an error or is ended. Exits with 1 if there are failures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--gsan", action="store_true", help="in memory that Triton's GSan watches; see `touch`")
    parser.add_argument("--short", action="store_true", help="the sweeps of three minutes; see `sweep`")
    parser.add_argument("--only", default="", help="the part to compile for; see `compiling`")
    given = parser.parse_args()
    result: Result = {"failures": []}
    first, step = map(int, given.share.split("/"))
    machine = Machine(given.toy, given.seconds, given.json, given.compile, (first, step), given.only)
    compilations = machine.compilations
    compilations.install()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        part(machine, result)
    except TimeIsUp as reached:
        result["incomplete"] = str(reached)
    except Exception as error:
        traceback.print_exc()
        result["failures"].append(f"{type(error).__name__}: {error}"[:1000])
    finally:
        result["kernels"] = {"compiled": compilations.compiled.total(), "loaded": compilations.loaded.total()}
        machine.keep(result)
    print(json.dumps(result)[:2000])
    sys.exit(bool(result["failures"]))

"""What a part of the proof runs on: a GPU, or at toy sizes a CPU that takes the same course without graphs and streams.

A part is a program: `python -m tests.proof.gpu.PART --json FILE --seconds N [--toy] [--compile] [--share I/N]`. With
--compile it only launches what it will launch later, so that the kernels are in the cache; with --share it takes every
Nth piece of its work, from piece I on. With --toy TRITON_INTERPRET=1 has to be set, and otherwise not.
"""

import argparse
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.proof.gpu.compilations import Compilations

T = TypeVar("T")
Act = Callable[[], object]


class TimeIsUp(Exception):
    """A part has no time left. What it found until then counts."""


class Machine:
    """toy: small sizes on the CPU. seconds: for the part. file: where `keep` writes.

    compiling: whether launches are made for the sake of Triton's cache alone. share: which piece of how many.
    """

    def __init__(
        self, toy: bool, seconds: float = 600.0, file: Path | None = None, compiling: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
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
        """Seconds."""
        return self._seconds - (time.monotonic() - self._begun)

    def go_on(self, what: str, needed: float = 0.0) -> None:
        """Raises TimeIsUp where less than `needed` seconds are left; `what` says how far the part has come."""
        if self.left < needed:
            raise TimeIsUp(what)

    def mine(self, pieces: Sequence[T]) -> Sequence[T]:
        """Those of the pieces that are this process's share."""
        first, step = self._share
        return pieces[first::step]

    def keep(self, result: "Result") -> None:
        """Writes what is found so far: a part may be ended at any time."""
        if self._file:
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            new.replace(self._file)

    def beside(self, name: str) -> Path:
        """A file beside the one that `keep` writes."""
        return (self._file.parent if self._file else Path.cwd()) / name

    @property
    def backend(self) -> str:
        """The name of the backend whose kernels are proved."""
        return "interpreter" if self.toy else "cuda"

    def capture(self, act: Act) -> Act:
        """Records calls of `act`, which has run before, as a graph; runs nothing. On a CPU `act` itself."""
        if self.toy:
            return act
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # refuses whatever waits for the device
            act()
        return graph.replay

    def wait(self) -> None:
        """Until the device has done everything."""
        if not self.toy:
            torch.cuda.synchronize()

    def generator(self, seed: int) -> torch.Generator:
        """Of the device."""
        return torch.Generator(self.device).manual_seed(seed)


class Lane:
    """A second stream, or the first one again: then the order of calls alone is the order of work."""

    def __init__(self, machine: Machine, beside: bool) -> None:
        self.stream = torch.cuda.Stream() if beside and not machine.toy else None

    def __enter__(self) -> "Lane":
        self._context: AbstractContextManager[Any] = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def after_main(self) -> None:
        """What the lane does next comes after what the main stream was given so far."""
        if self.stream:
            self.stream.wait_event(torch.cuda.current_stream().record_event())

    def mark(self) -> "torch.cuda.Event | None":
        """An event behind what the lane was given so far."""
        return self.stream.record_event() if self.stream else None

    @staticmethod
    def main_after(mark: "torch.cuda.Event | None") -> None:
        """What the main stream does next comes after a mark."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)


Result = dict[str, Any]  # figures by name; `failures`: a list of lines; `incomplete`: how far it came, if time was up


def main(part: Callable[[Machine, Result], None]) -> None:
    """Runs a part, writes what it found, also where it raises or is ended, and exits with 1 if there are failures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--share", default="0/1")
    parser.add_argument("--gsan", action="store_true", help="in memory that Triton's GSan watches; see `touch`")
    given = parser.parse_args()
    result: Result = {"failures": []}
    first, step = map(int, given.share.split("/"))
    machine = Machine(given.toy, given.seconds, given.json, given.compile, (first, step))
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

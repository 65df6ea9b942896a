"""The parts of a benchmark: a check, and a measurement that runs only if the check finds nothing wrong."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch

from memstate.cli.units import measured
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate_tools.bench.clock import Act, DeviceClock, HostTimer, TooSlow, nothing

PEERS = (
    "device-copy", "roofline", "torch-indexing", "fla", "sglang", "memory-copy", "pinned-copy", "plain-file",
    "own-cache", "generate", "plain-step",
)  # fmt: skip
MOST_COPIED = 2 * 2**30  # largest number of bytes of a plain copy
Progress = Callable[[int, int | None], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """A measured value. The last three attributes compare it with a peer of the same run.

    Attributes:
        op: Name of the operation.
        case: Case in which it is measured, such as "R=64".
        value: The measured value.
        unit: Unit of the value.
        peer: The peer, one of `PEERS`.
        peer_value: Value of the peer.
        ratio: value / peer_value, unless given.
    """

    op: str
    case: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.ratio is None and self.peer_value:
            object.__setattr__(self, "ratio", self.value / self.peer_value)

    def row(self) -> dict[str, str | float | None]:
        """Returns the figure as a row for people, with units."""
        return {
            "op": self.op, "case": self.case, "value": measured(self.value, self.unit), "peer": self.peer,
            "its value": measured(self.peer_value, self.unit), "ratio": self.ratio,
        }  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The setting of a benchmark: backend, device and sizes.

    Args:
        backend: Name of the backend.
        device: Where tensors live.
        toy: Whether sizes are so small that an interpreter can run them.
        peer: The only peer to compare with. None: all.
        held: What tasks of a benchmark need open, such as folders and processes. It is closed after the last task, so
            that tasks can be chosen after all have been made.

    Raises:
        InvalidArgument: The peer is unknown.
    """

    backend: str
    device: torch.device
    toy: bool
    peer: str | None = None
    held: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        if self.peer is not None and self.peer not in PEERS:
            raise InvalidArgument(f"peer {self.peer!r}: expected one of {', '.join(PEERS)}")

    def make_backend(self) -> Backend:
        """Returns a backend for the timed operations."""
        return Backend(self.backend, self.device)

    def reference(self) -> Backend:
        """Returns a backend for the expected results."""
        return Backend("reference", self.device)

    @cached_property
    def clock(self) -> HostTimer:
        """Clock for device time on this device."""
        return HostTimer() if self.toy else DeviceClock(self.device)

    def case(self, text: str) -> str:
        """Returns the name of a case. At toy sizes it begins with "toy"."""
        return f"toy {text}" if self.toy else text

    def compares(self, peer: str) -> bool:
        """Returns whether a peer is measured."""
        return self.peer in (None, peer)

    def sizes(self, real: T, toy: T) -> T:
        """Returns `toy` at toy sizes, otherwise `real`."""
        return toy if self.toy else real

    @property
    def free_bytes(self) -> int:
        """Free bytes of the device's memory. At toy sizes it is a large number, because toys always fit."""
        return 2**40 if self.toy else torch.cuda.mem_get_info(self.device)[0]

    def rows(self, op: str, case: str, value: float, unit: str, peers: Mapping[str, float]) -> list[Measured]:
        """Returns one figure per peer, compared with this peer; without peers, a single figure."""
        alone = (op, self.case(case), value, unit)
        return [Measured(*alone, *peer) for peer in peers.items()] or [Measured(*alone)]

    def beside(self, figure: Measured, peer: str, value: Callable[[], float]) -> Measured:
        """Returns a figure with the value of a peer added. The peer is measured only if it is wanted."""
        if not self.compares(peer):
            return figure
        try:
            return replace(figure, peer=peer, peer_value=value())
        except Exception as error:  # a peer that cannot run must not lose our figure
            peer_left(f"{figure.op}, {figure.case}", peer, error)
            return figure

    def alone(self, op: str, case: str, act: Act, before: Act = nothing, **beside: Any) -> list[Measured]:
        """Times a call that is submitted alone, on the device and on the host.

        Args:
            op: Operation of the figures.
            case: Case of the figures.
            act: The call to time.
            before: Called before each run, not timed.
            **beside: The arguments `peer`, `moved` and `zeros` of `_timed`.
        """
        device, host = self.clock.alone(act, before)
        timed = self._timed(op, case, device, lambda act: self.clock.alone(act).device, **beside)
        return [*timed, Measured(op, self.case(case), host * 1e6, "host us")]

    def in_graph(self, op: str, case: str, act: Act, **beside: Any) -> list[Measured]:
        """Times one call among many in a CUDA graph. The arguments are those of `alone`."""
        return self._timed(op, case, self.clock.in_graph(act), self.clock.in_graph, **beside)

    def _timed(
        self,
        op: str,
        case: str,
        seconds: float,
        clock: Callable[[Act], float],
        peer: tuple[str, Act] | None = None,
        moved: int = 0,
        zeros: bool = False,
    ) -> list[Measured]:
        """Returns a device time compared with that of a peer's call, and a rate compared with that of a plain copy.

        Args:
            op: Name of the operation.
            case: Case in which it is measured, such as "R=64".
            seconds: Device time of the operation.
            clock: Clock that times the peer's call and the plain copy.
            peer: (name, call) of the peer.
            moved: Bytes that the operation reads and writes; 0: no rate.
            zeros: Whether the operation only writes zeros.
        """
        figures = [Measured(op, self.case(case), seconds * 1e6, "us")]
        if peer is not None:
            figures = [self.beside(figures[0], peer[0], lambda: clock(peer[1]) * 1e6)]
        if moved:
            # bytes of the plain copy: as many as the operation moves, up to MOST_COPIED
            size = max(1, min(moved if zeros else moved // 2, MOST_COPIED))

            def plain() -> float:
                to, of = torch.empty(2, size, dtype=torch.uint8, device=self.device).random_(0, 256)
                return size / clock(to.zero_) if zeros else 2 * size / clock(partial(to.copy_, of))

            rate = Measured(op, self.case(case), moved / seconds, "bytes/s")
            figures.append(self.beside(rate, "device-copy", plain))
        return figures


class Task(NamedTuple):
    """One check and its measurement.

    Attributes:
        name: Name for messages.
        check: Runs first. Returns what is wrong; empty if nothing is.
        measure: Returns the figures.
    """

    name: str
    check: Callable[[], str]
    measure: Callable[[], list[Measured]]


@dataclass
class BenchResult:
    """The figures, and what could not be measured.

    Attributes:
        entries: The measured figures.
        wrong: Lines about tasks that were not measured because their check failed or they raised.
        too_slow: Lines about tasks that are right but too slow for the clock of the device.
        complete: Whether all tasks had their turn.
    """

    entries: list[Measured] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    too_slow: list[str] = field(default_factory=list)
    complete: bool = True

    @property
    def unmeasured(self) -> list[str]:
        """A line for each task that was not measured, with the reason."""
        wrong = [f"not measured, because its result is wrong: {line}" for line in self.wrong]
        return [*(f"not measured: {line}" for line in self.too_slow), *wrong]


class Differs(Exception):
    """Says that a measured operation gives a wrong result."""


def carry_out(
    tasks: Iterable[Task], outcome: BenchResult, progress: Progress | None = None,
    report: Callable[[BenchResult], None] | None = None, end: float | None = None, measure: bool = True,
) -> None:  # fmt: skip
    """Checks and measures one task after the other, and adds to `outcome`.

    A task that raises counts as wrong, unless it is too slow to time.

    Args:
        tasks: The tasks, in the order in which they run.
        outcome: Gets figures and lines.
        progress: Called with (done, None).
        report: Called with the outcome so far, after each task.
        end: Time, by `time.monotonic`, after which no task begins. None: no limit.
        measure: Whether tasks are measured after their checks.
    """
    done, before = 0, "the first task"
    try:
        for task in tasks:
            if end is not None and time.monotonic() > end:
                outcome.complete = False
                return
            try:
                if why := task.check():
                    raise Differs(why)
                if measure:
                    outcome.entries += task.measure()
            except TooSlow as error:
                outcome.too_slow.append(f"{task.name}: {error}")
            except Exception as error:  # libraries of the device raise any kind of error; the next task may still run
                outcome.wrong.append(f"{task.name}: {_raised(error)}")
            done, before = done + 1, f"the task behind {task.name}"
            if report:
                report(outcome)
            if progress:
                progress(done, None)  # the total is unknown: tasks are made one by one
    except Exception as error:  # making a task failed: no other task can be made
        outcome.wrong.append(f"{before}: {_raised(error)}")


def take_turns(
    ours: Mapping[str, T], peers: dict[str, T], turns: int, act: Callable[[int, str, T], object], what: str
) -> None:
    """Lets every side act in each turn. Each turn begins with another side, so that no side is always disturbed.

    Args:
        ours: Our sides by name. Their errors are raised.
        peers: Peers by name. A peer that raises is removed.
        turns: Number of turns.
        act: Called with the turn, the name and the side.
        what: Name of the measurement, for the line about a peer that left.
    """
    for turn in range(turns):
        sides = [*ours.items(), *peers.items()]
        first = turn % len(sides)
        for name, side in sides[first:] + sides[:first]:
            try:
                act(turn, name, side)
            except Exception as error:
                if name in ours:
                    raise
                del peers[name]
                peer_left(what, name, error)


def peer_left(what: str, peer: str, error: Exception) -> None:
    """Prints to stderr that a peer failed and is not measured; the measurement of the other sides goes on."""
    print(f"{what}: peer {peer} {_raised(error)}", file=sys.stderr)


def _raised(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, Differs) else f"raises {type(error).__name__}: {text}"


def differing(pairs: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> str:
    """Returns the names of tensors that differ in any bit; empty if none does.

    Syncs: yes.
    """
    return ", ".join(name for name, a, b in pairs if not torch.equal(a, b))

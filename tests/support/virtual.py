"""Time that a test turns by hand, threads that run when it says so, ranks in one process, and storage with faults."""

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from memstate.tiers.prefetch.agreement import Words
from memstate.tiers.stores.base import Bytes, Outcome
from memstate.tiers.workers import Job as Handed


class Clock:
    """Seconds, and what is due at which of them; in order of appointment where that is the same."""

    def __init__(self) -> None:
        self.now, self._numbers = 0.0, 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._due, (self.now + seconds, self._numbers, what))

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, what = heapq.heappop(self._due)
            what()
        self.now = until


@dataclass(eq=False)
class Job:
    """Something that was submitted. It writes what it writes when it ends, as late as it can."""

    given: "Future[Any]"
    work: Callable[[], Any]
    handed: Any = None  # the library's job, which it can cancel

    @property
    def future(self) -> "Future[Any]":
        """Its future; cancelled where the library has cancelled the job before it began."""
        if getattr(self.handed, "cancelled", False) and not (self.given.done() or self.given.running()):
            self.given.cancel()
        return self.given

    def begin(self) -> bool:
        """Whether it runs now, and can no longer be cancelled."""
        begun = self.future.set_running_or_notify_cancel()
        if begun and isinstance(self.handed, Handed):
            self.handed.begun = self.handed.claim()
        return begun

    def finish(self) -> None:
        try:
            result = self.work()
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class ByHand(Executor):
    """Jobs that wait until somebody begins and ends them."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []  # in order of submission, those that have ended too

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        job = Job(Future(), lambda: fn(*args, **kwargs), args[0] if args else None)
        self.jobs.append(job)
        return job.given


class Workers(ByHand):
    """So many threads on a clock. latency: seconds of the next job that begins."""

    def __init__(self, clock: Clock, latency: Callable[[], float] = lambda: 1.0, workers: int = 4) -> None:
        super().__init__()
        self._clock, self._latency, self._idle = clock, latency, workers
        self._begun = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future = super().submit(fn, *args, **kwargs)
        self._begin()
        return future

    def _begin(self) -> None:
        while self._idle and self._begun < len(self.jobs):
            job = self.jobs[self._begun]
            self._begun += 1
            if job.begin():
                self._idle -= 1
                self._clock.after(self._latency(), lambda job=job: self._end(job))

    def _end(self, job: Job) -> None:
        job.finish()
        self._idle += 1
        self._begin()


class MemoryStore:
    """Records in a dictionary.

    faults: name -> `vanished` (there, and gone when it is read), `half`, `garbage` (read whole, wrong bytes), `denied`
    (writes too), `raises` (whatever batch it is in). broken: every call raises. calls: what was asked, by whom it was
    answered or not.
    """

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.faults: dict[str, str] = {}
        self.broken = False
        self.forgetful = False  # answers for one name less
        self.calls: list[tuple[str, list[str]]] = []

    def register(self, memory: Tensor) -> None:
        pass

    def close(self) -> None:
        pass

    def discard(self, names: Sequence[str]) -> None:
        """Notes it alone: its records are as they should be, whatever it makes of them."""
        self.calls.append(("discard", list(names)))

    def asked(self, call: str) -> list[str]:
        """All names of one kind of call, in order."""
        return [name for called, names in self.calls if called == call for name in names]

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._called("exists", names)
        return [name in self.records for name in names][int(self.forgetful) :]

    def get(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        self._called("get", names)
        if any(self.faults.get(name) == "raises" for name in names):
            raise ConnectionResetError("storage went away")
        return [self._get(name, buffer) for name, buffer in zip(names, buffers, strict=True)]

    def put(self, names: Sequence[str], buffers: Sequence[Bytes]) -> list[Outcome]:
        self._called("put", names)
        taken = [self.faults.get(name) != "denied" for name in names]
        self.records.update((n, b.tobytes()) for n, b, well in zip(names, buffers, taken, strict=True) if well)
        return [Outcome.DONE if well else Outcome.FAILED for well in taken]

    def _called(self, call: str, names: Sequence[str]) -> None:
        self.calls.append((call, list(names)))
        if self.broken:
            raise OSError("storage is not there")

    def _get(self, name: str, buffer: Bytes) -> Outcome:
        fault, record = self.faults.get(name, ""), self.records.get(name)
        if fault == "denied":
            return Outcome.FAILED
        if fault == "vanished" or record is None:
            return Outcome.MISSING
        if fault == "half" or len(record) != buffer.size:
            half = min(len(record), buffer.size) // 2
            buffer[:half] = np.frombuffer(record[:half], np.uint8)
            return Outcome.DAMAGED
        buffer[:] = np.frombuffer(record, np.uint8)
        if fault == "garbage":
            buffer[-1] ^= 0x5A
        return Outcome.DONE


class Together:
    """Ranks in one process: `of(rank)` is what each of them agrees through."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.rounds: list[list[Words | None]] = []

    def of(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    """One rank's side of `Together`."""

    def __init__(self, together: Together, rank: int) -> None:
        self.ranks, self._together, self._rank, self._next = together.ranks, together, rank, 0

    def exchange(self, words: Words) -> "Meeting":
        rounds = self._together.rounds
        if self._next == len(rounds):
            rounds.append([None] * self.ranks)
        rounds[self._next][self._rank] = words.copy()
        self._next += 1
        return Meeting(rounds[self._next - 1])


class Meeting:
    """What all ranks have sent."""

    def __init__(self, sent: list[Words | None]) -> None:
        self._sent = sent

    @property
    def done(self) -> bool:
        return all(words is not None for words in self._sent)

    def result(self) -> Words:
        assert self.done, "a rank waits here for one that has not polled"
        words: Words = np.bitwise_and.reduce(np.stack([words for words in self._sent if words is not None]))
        return words

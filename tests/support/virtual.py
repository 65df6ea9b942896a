"""Fakes threads, whose jobs run when a test says so, and ranks, which all live in one process."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from memstate.testing import Clock, MemoryStore
from memstate.tiers.prefetch.agreement import Words
from memstate.tiers.workers import Job as Handed

__all__ = ["AtOnce", "ByHand", "Clock", "Job", "MemoryStore", "Together", "Workers"]


@dataclass(eq=False)
class Job:
    """A submitted job. Between `begin` and `finish` it counts as running; `finish` does all its work."""

    given: "Future[Any]"
    work: Callable[[], Any]
    handed: Any = None  # the library's object for this job, by which the library cancels it

    @property
    def future(self) -> "Future[Any]":
        """The job's future. It is cancelled if the library cancelled the job before `begin`."""
        if getattr(self.handed, "cancelled", False) and not (self.given.done() or self.given.running()):
            self.given.cancel()
        return self.given

    def begin(self) -> bool:
        """Begins the job, unless it is cancelled. Returns whether it has begun; then nobody can cancel it."""
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


class AtOnce(Executor):
    """An executor that runs each job at once, within `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class ByHand(Executor):
    """An executor whose jobs wait until a test begins and ends them."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []  # all jobs in order of submission, including ended ones

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        job = Job(Future(), lambda: fn(*args, **kwargs), args[0] if args else None)
        self.jobs.append(job)
        return job.given


class Workers(ByHand):
    """An executor of `workers` threads on a fake clock. latency: returns the seconds that the next job takes."""

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


class Together:
    """Ranks in one process. `of(rank)` is the object through which a rank agrees with the others."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.rounds: list[list[Words | None]] = []

    def of(self, rank: int) -> "Member":
        return Member(self, rank)


class Member:
    """The object through which one rank of `Together` sends words (integers) to the others, and gets their words."""

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
    """One exchange of words (integers) between all ranks. It is done when each rank has sent its words."""

    def __init__(self, sent: list[Words | None]) -> None:
        self._sent = sent

    @property
    def done(self) -> bool:
        return all(words is not None for words in self._sent)

    def result(self) -> Words:
        assert self.done, "a rank waits here for one that has not polled"
        words: Words = np.bitwise_and.reduce(np.stack([words for words in self._sent if words is not None]))
        return words

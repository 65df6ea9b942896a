"""Runs the store's work in the threads of an executor, and knows when none of it runs any more.

The thread of the decode loop only looks at plain flags. It shares no lock, condition or event with the workers: an
exception such as KeyboardInterrupt, in the wrong place, would leave it taken for ever.
"""

import math
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any
from weakref import finalize

PAUSE_S = 0.0005  # between two looks at the flags of work that is waited for


class Job:
    """Work that was handed in.

    Attributes:
        begun: a thread has begun with it.
        cancelled: it was cancelled before, and never begins.
        done: it has ended, or never begins.
        result: what the work returned.
        error: what the work raised, or None.
    """

    def __init__(self, ended: Callable[[], None] | None = None) -> None:
        self.begun = self.cancelled = self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._ended = ended
        self._free = [True]  # the one who takes it decides, thread or canceller: a list's `pop` is one step

    def claim(self) -> bool:
        """Takes the right to run or to cancel it; returns whether it was there to take."""
        try:
            return self._free.pop()
        except IndexError:
            return False

    def end(self) -> None:
        """Notes that it has ended, and says so to its owner."""
        self.done = True
        if self._ended is not None:
            self._ended()


class Threads:
    """A few threads that run work in the order in which it was handed in.

    A `ThreadPoolExecutor` takes locks in `submit` that its threads need. An interrupt there would block them for ever.

    Args:
        most: largest number of threads. Each starts with the first work that it is needed for.
    """

    def __init__(self, most: int) -> None:
        self._most, self._closed = most, False
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        finalize(self, self._work.put, None)

    def submit(self, work: Callable[..., Any], /, *arguments: Any) -> None:
        """Hands work in. Raises: RuntimeError after `shutdown`, or if a thread cannot be started."""
        if self._closed:
            raise RuntimeError("the threads have ended")
        self._work.put(partial(work, *arguments))
        if len(self._threads) < self._most:
            thread = Thread(target=_run, args=(self._work,), name=f"memstate_{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def shutdown(self, wait: bool = True) -> None:
        """Ends the threads once everything handed in has run."""
        self._closed = True
        self._work.put(None)
        while wait and any(thread.is_alive() for thread in self._threads):
            time.sleep(PAUSE_S)


def _run(queue: "SimpleQueue[Callable[[], Any] | None]") -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # or it would stay until the next work comes
    queue.put(None)  # for the other threads, also for one whose start was interrupted


Executor = Threads | futures.Executor  # runs work in threads


class Token:
    """Goes to the executor with a job. If the executor throws the job away, the token goes, too."""


class Workers:
    """Hands work to an executor.

    Work writes to host records. Before records are emptied, `drain` ends all work, even work whose job was lost because
    an exception interrupted the call that handed it in.

    Args:
        executor: its threads run the work.

    Example:
        >>> workers = Workers(Threads(1))
        >>> job = workers.submit(len, "abc")
        >>> workers.wait([job])
        >>> job.result
        3
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._active: dict[Job, None] = {}  # what threads run
        self._round = 0

    def submit(self, work: Callable[..., Any], *arguments: Any, ended: Callable[[], None] | None = None) -> Job:
        """Hands work in.

        Args:
            work: the function to call.
            arguments: its arguments.
            ended: called by any thread when the job is done.

        Returns:
            The job. If the executor has been shut down, it is done and has the error.
        """
        job, token = Job(ended), Token()
        finalize(token, self.cancel, job)  # does nothing once the job has begun
        try:
            self.executor.submit(self._run, job, token, self._round, work, arguments)
        except RuntimeError as error:  # it was shut down; or no thread could be started, and the work is in its queue
            job.error = error if self.cancel(job) else None
        return job

    def _run(self, job: Job, token: Token, number: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._active[job] = None  # before it looks at the round, so that `drain` sees it or it sees `drain`
        try:
            if not (job.begun or job.claim()):
                return  # the canceller ends it
            if number != self._round:
                job.cancelled = True
            else:
                job.begun = True
                job.result = work(*arguments)
        except BaseException as error:  # the store's; the thread of the loop looks at it
            job.error = error
        finally:
            del self._active[job]
        job.end()

    def cancel(self, job: Job) -> bool:
        """Cancels a job that has not begun; returns whether it never begins."""
        if job.claim():
            job.cancelled = True
            job.end()
        return job.cancelled

    @staticmethod
    def wait(jobs: Iterable[Job], seconds: float = math.inf, enough: Callable[[Iterable[bool]], bool] = all) -> None:
        """Waits until jobs are done.

        Args:
            jobs: the jobs.
            seconds: how long at most.
            enough: `all`, or `any` if one of them is enough.

        Syncs: waits for the store's calls.
        """
        waited, until = list(jobs), time.monotonic() + seconds
        while waited and not enough(job.done for job in waited) and time.monotonic() < until:
            time.sleep(PAUSE_S)

    def drain(self) -> None:
        """Waits for the work that runs, and makes sure that no other work handed in before begins.

        Syncs: waits for the store's calls.
        """
        self._round += 1
        while self._active:
            time.sleep(PAUSE_S)

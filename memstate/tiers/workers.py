"""Runs the calls of stores in the threads of an executor, and knows when no call runs any more.

The thread of the decode loop only reads plain flags. It shares no lock, condition or event with the workers, because an
exception such as KeyboardInterrupt could leave a lock taken for ever.
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

PAUSE_S = 0.0005  # seconds between two looks at the flags of jobs


class Job:
    """A call that was handed to `Workers`.

    Attributes:
        begun: whether a thread has begun the call.
        cancelled: whether the job was cancelled before a thread began the call. Then no thread ever begins it.
        done: whether the call has ended, or will never begin.
        result: the value that the call returned.
        error: the exception that the call raised, or None.
    """

    def __init__(self, ended: Callable[[], None] | None = None) -> None:
        self.begun = self.cancelled = self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._ended = ended
        self._free = [True]  # the thread that pops the element may run or cancel the job; `pop` is atomic

    def claim(self) -> bool:
        """Takes the right to run or to cancel the job. Returns False if another caller took the right before."""
        try:
            return self._free.pop()
        except IndexError:
            return False

    def end(self) -> None:
        """Marks the job as done, and calls its function `ended`."""
        self.done = True
        if self._ended is not None:
            self._ended()


class Threads:
    """A few threads that run work in the order in which it was handed in.

    `ThreadPoolExecutor` cannot be used: its `submit` takes locks that its threads need. An interrupt inside `submit`
    would block the threads for ever.

    Args:
        most: number of threads. Each of the first calls of `submit` starts one.
    """

    def __init__(self, most: int) -> None:
        self._most, self._closed = most, False
        self._work: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        finalize(self, self._work.put, None)

    def submit(self, work: Callable[..., Any], /, *arguments: Any) -> None:
        """Hands work in. Raises RuntimeError after `shutdown`, or if a thread cannot be started."""
        if self._closed:
            raise RuntimeError("the threads have ended")
        self._work.put(partial(work, *arguments))
        if len(self._threads) < self._most:
            thread = Thread(target=_run, args=(self._work,), name=f"memstate_{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def shutdown(self, wait: bool = True) -> None:
        """Ends the threads after all work that was handed in has run."""
        self._closed = True
        self._work.put(None)
        while wait and any(thread.is_alive() for thread in self._threads):
            time.sleep(PAUSE_S)


def _run(queue: "SimpleQueue[Callable[[], Any] | None]") -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # frees the work and its arguments now, not when the next work comes
    queue.put(None)  # for the next thread, which must end as well


Executor = Threads | futures.Executor  # runs work in threads


class JobToken:
    """An object that the executor holds with a job. If the executor drops the job, the freed token cancels it."""


class Workers:
    """Hands work to an executor.

    Work writes to host records. So before host memory is emptied, `drain` must end all work. This includes work whose
    job the caller never got, because an exception interrupted `submit`.

    Args:
        executor: the executor whose threads run the work.

    Example:
        >>> workers = Workers(Threads(1))
        >>> job = workers.submit(len, "abc")
        >>> workers.wait([job])
        >>> job.result
        3
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._active: dict[Job, None] = {}  # jobs that threads run now
        self._round = 0  # number of calls of `drain`; work that was handed in before the last one does not begin

    def submit(self, work: Callable[..., Any], *arguments: Any, ended: Callable[[], None] | None = None) -> Job:
        """Hands work in.

        Args:
            work: the function to call.
            arguments: arguments of the function.
            ended: function that any thread calls when the job is done.

        Returns:
            The job. If the executor has been shut down, the job is done and has the error.
        """
        job, token = Job(ended), JobToken()
        finalize(token, self.cancel, job)  # when the token is freed; does nothing if the job has begun
        try:
            self.executor.submit(self._run, job, token, self._round, work, arguments)
        except RuntimeError as error:  # shut down; or no thread could start: the queue has the work all the same
            job.error = error if self.cancel(job) else None
        return job

    def _run(
        self, job: Job, token: JobToken, number: int, work: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        self._active[job] = None  # before the check below: so `drain` sees the job, or the check sees `drain`
        try:
            if not (job.begun or job.claim()):
                return  # the thread that has cancelled the job calls `end`
            if number != self._round:
                job.cancelled = True
            else:
                job.begun = True
                job.result = work(*arguments)
        except BaseException as error:  # from the store; the thread of the loop handles it
            job.error = error
        finally:
            del self._active[job]
        job.end()

    def cancel(self, job: Job) -> bool:
        """Cancels a job if it has not begun. Returns whether it is cancelled."""
        if job.claim():
            job.cancelled = True
            job.end()
        return job.cancelled

    @staticmethod
    def wait(jobs: Iterable[Job], seconds: float = math.inf, enough: Callable[[Iterable[bool]], bool] = all) -> None:
        """Waits until jobs are done.

        Args:
            jobs: the jobs.
            seconds: the longest time to wait.
            enough: `all`, or `any` to wait for one job only.

        Syncs: waits for the store's calls.
        """
        waited, until = list(jobs), time.monotonic() + seconds
        while waited and not enough(job.done for job in waited) and time.monotonic() < until:
            time.sleep(PAUSE_S)

    def drain(self) -> None:
        """Waits for the work that runs. Work that was handed in before and has not begun never begins.

        Syncs: waits for the store's calls.
        """
        self._round += 1
        while self._active:
            time.sleep(PAUSE_S)

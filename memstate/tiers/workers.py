"""Runs the store's work in the threads of an executor, and knows when none of it runs any more.

The thread of the decode loop only looks at plain flags. It shares no condition and no event with the workers: an
exception such as KeyboardInterrupt, inside a method of one of these, would leave its lock taken for ever.
"""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from threading import Lock
from typing import Any
from weakref import finalize

PAUSE_S = 0.0005  # between two looks at the flags of work that is waited for


class Flag:
    """A flag that one thread sets and others look at.

    Example:
        >>> flag = Flag()
        >>> flag.set()
        >>> flag.is_set()
        True
    """

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Sets it for good."""
        self._set = True

    def is_set(self) -> bool:
        """Returns whether it is set."""
        return self._set


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

    def end(self) -> None:
        """Notes that it has ended, and says so to its owner."""
        self.done = True
        if self._ended is not None:
            self._ended()


class Token:
    """Goes to the executor with a job. If the executor throws the job away, the token goes, too."""


class Workers:
    """Hands work to an executor.

    Work writes to host records. Before records are emptied, `drain` ends all work, even work whose job was lost because
    an exception interrupted the call that handed it in.

    Args:
        executor: its threads run the work.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> workers = Workers(ThreadPoolExecutor(1))
        >>> job = workers.submit(len, "abc")
        >>> workers.wait([job])
        >>> job.result
        3
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._lock = Lock()
        self._round = self._running = 0

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
        except RuntimeError as error:
            job.error, job.begun = error, True
            job.end()
        return job

    def _run(self, job: Job, token: Token, number: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        with self._lock:
            if job.cancelled:
                return
            job.cancelled = number != self._round
            job.begun = not job.cancelled
            self._running += job.begun
        if job.begun:
            try:
                job.result = work(*arguments)
            except BaseException as error:  # the store's; the thread of the loop looks at it
                job.error = error
            finally:
                with self._lock:
                    self._running -= 1
        job.end()

    def cancel(self, job: Job) -> bool:
        """Cancels a job that has not begun; returns whether it never begins."""
        with self._lock:
            new = not (job.begun or job.done or job.cancelled)
            job.cancelled = job.cancelled or new
        if new:
            job.end()
        return job.cancelled

    @staticmethod
    def wait(jobs: Iterable[Job]) -> None:
        """Waits until all jobs are done.

        Syncs: waits for the store's calls.
        """
        waited = list(jobs)
        while not all(job.done for job in waited):
            time.sleep(PAUSE_S)

    def drain(self) -> None:
        """Waits for the work that runs, and makes sure that no other work handed in before begins.

        Syncs: waits for the store's calls.
        """
        with self._lock:
            self._round += 1
        while self._running:
            time.sleep(PAUSE_S)

"""Runs the store's work in the threads of an executor, and can wait until none of it runs any more."""

from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from threading import Condition
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workers:
    """Hands work to an executor.

    Work writes to host records. Before records are emptied, `drain` ends all work, even work whose future was lost
    because an exception interrupted the call that handed it in.

    Args:
        executor: its threads run the work.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> workers = Workers(ThreadPoolExecutor(1))
        >>> workers.submit(len, "abc").result()
        3
        >>> workers.drain()
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._changed = Condition()
        self._round = self._running = 0

    def submit(self, work: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Hands work in.

        Args:
            work: the function to call.
            arguments: its arguments.

        Returns:
            The future. Work that has not begun when `drain` is called ends with CancelledError.

        Raises:
            RuntimeError: the executor has been shut down.
        """
        return self.executor.submit(self._run, self._round, work, arguments)

    def _run(self, number: int, work: Callable[..., Result], arguments: tuple[Any, ...]) -> Result:
        with self._changed:
            if number != self._round:
                raise CancelledError
            self._running += 1
        try:
            return work(*arguments)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Waits for the work that runs, and makes sure that no other work handed in before begins.

        Syncs: waits for the store's calls.
        """
        with self._changed:
            self._round += 1
            self._changed.wait_for(lambda: not self._running)

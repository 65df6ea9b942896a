"""Counts the lines of a call at which an exception can come, and raises one there."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import memstate
from memstate.tiers.workers import Workers

FOLDER = str(Path(memstate.__file__).parent)
HOST = ("dispatch.py", "rules.py")  # files of kernels/ that always run on the host
JOB = Workers._run.__code__  # runs a job, in tests perhaps within a call


class Tracer:
    """Counts the points of a call: of each function of memstate that it runs, the entry, every line and the return.

    A job has none. It runs in a thread, where no exception of the caller comes, and one of its own is the store's.

    Args:
        at: number of the point at which to raise, from 1; 0: only count.
        error: the exception to raise. Of a class, nothing keeps the exception, nor the frames of its traceback.
        within: how the paths of the files begin whose functions count.
    """

    def __init__(
        self, at: int = 0, error: BaseException | type[BaseException] | None = None, within: str = FOLDER
    ) -> None:
        self.at, self.error, self.within, self.count, self.place = at, error, within, 0, ""

    def run(self, call: Callable[[], Any]) -> Any:
        """Runs a call, and returns its answer."""
        before = sys.gettrace()  # the tracer of coverage, if it runs
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(self.within) or ("/kernels/" in path and not path.endswith(HOST)):
            return None
        of: FrameType | None = frame
        while of is not None and of.f_code is not JOB:
            of = of.f_back
        if of is not None:
            return None
        self._point(frame, event)
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event in ("line", "return"):
            self._point(frame, event)
        return self._trace

    def _point(self, frame: FrameType, event: str) -> None:
        self.count += 1
        if self.count == self.at and self.error is not None:
            path = frame.f_code.co_filename.removeprefix(FOLDER)
            self.place = f"{path}:{frame.f_lineno} {frame.f_code.co_name} ({event})"
            raise self.error

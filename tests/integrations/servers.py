"""Makes servers of tiny models of Transformers, runs them, and interrupts them."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor

import memstate as ms
import memstate.integrations.transformers as mst
from tests.support.tiny_models import tiny
from tests.support.tiny_served import managed

SPECULATING: dict[str, Any] = {"forward": ms.Forward(tail=16)}


def server_of(family: str = "qwen3_next", chunk: int = 256, **settings: Any) -> mst.Server:
    """Returns a server with a new manager. The manager has a prefix cache only if the settings ask for one."""
    model = tiny(family)
    return mst.Server(model, managed(model, **{"prefix": None, **settings}), chunk=chunk)


def rest(server: mst.Server, most: int = 400) -> list[Any]:
    """Steps a server until it is not busy, and returns the events."""
    events: list[Any] = []
    while server.busy and (most := most - 1):
        events += server.step()
    assert not server.busy
    return events


def results(events: list[Any]) -> dict[Any, mst.Served]:
    """Returns id -> result; checks that each request has one result."""
    served = [one for one in events if isinstance(one, mst.Served)]
    assert max(Counter(one.id for one in served).values(), default=1) == 1
    return {one.id: one for one in served}


def tokens(events: list[Any], id: Any) -> list[int]:
    """Returns the tokens of a request's events."""
    return [one.token for one in events if isinstance(one, mst.Token) and one.id == id]


def require_free(server: mst.Server, slots: int = 16, pages: int = 60) -> None:
    """Checks that no request runs and that all slots, rows and pages are free."""
    mem = server.mem
    assert (server.busy, server.running, mem.stats().rows_used) == (False, 0, 0)
    assert (mem.free_slots, mem.free_pages, mem.audit().clean) == (slots, pages, True)


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Returns a function that raises the error for any arguments."""

    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


@contextmanager
def hooked(module: Any, call: Callable[..., Any]) -> Iterator[None]:
    """During the block, calls a function before each forward of a module."""
    hook = module.register_forward_pre_hook(call, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class Raises(LogitsProcessor):
    """A logits processor that raises when the tokens have a given length."""

    def __init__(self, length: int, error: BaseException) -> None:
        self._length, self._error = length, error

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self._length:
            raise self._error
        return scores


class Interrupt:
    """A tracer that raises KeyboardInterrupt before a line of some files.

    Args:
        line: number of executed lines of these files before the interrupt.
        files: how the paths of the files begin.

    Attributes:
        where: the interrupted line; "" before the interrupt.
    """

    def __init__(self, line: int, files: str) -> None:
        self.left, self.files, self.where = line, files, ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if not self.where and frame.f_code.co_filename.startswith(self.files) else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.where:
            self.left -= 1
            if self.left < 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt("injected")
        return self.line

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Traces the block; the interrupt ends the block and goes no further."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            with suppress(KeyboardInterrupt):
                yield
        finally:
            sys.settrace(before)

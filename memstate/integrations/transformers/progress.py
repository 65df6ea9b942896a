"""Shows on a terminal how far `serve` has come. It needs rich, of the extra `cli`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from memstate.errors import ConfigurationError
from memstate.integrations.transformers.prompts import Event, Served, Token

if TYPE_CHECKING:
    from rich.text import Text


class Progress:
    """Counts what a server has done.

    Args:
        server: the server.
    """

    def __init__(self, server: Any) -> None:
        self._server, self._start = server, monotonic()
        self._done = self._tokens = self._cached = self._guessed = self._right = 0

    def __rich__(self) -> "Text":
        from rich.text import Text

        seconds = max(monotonic() - self._start, 1e-3)
        parts = [
            f"{self._done} done, {self._server.running} running, {self._server.waiting} waiting",
            f"{self._tokens} tokens, {self._tokens / seconds:.0f} a second",
        ]
        if self._cached:
            parts.append(f"{self._cached} prompt tokens found in a cache")
        if self._guessed:
            parts.append(f"{self._right} of {self._guessed} guesses right")
        return Text(" · ".join(parts))

    def add(self, events: Sequence[Event]) -> None:
        """Counts the events of a step.

        Args:
            events: the events.
        """
        self._tokens += sum(isinstance(event, Token) for event in events)
        for one in events:
            if isinstance(one, Served):
                self._done += 1
                self._guessed, self._right = self._guessed + one.guessed, self._right + one.right
                self._cached += one.cached if one.sample == 0 else 0


@contextmanager
def shown(server: Any, console: Any) -> Iterator[Progress]:
    """Shows a line about a server while the block runs, and leaves it there.

    Args:
        server: the server.
        console: rich's console; True: that of the process.

    Raises:
        ConfigurationError: rich is not installed.
    """
    try:
        from rich.live import Live
    except ImportError as error:
        raise ConfigurationError("progress= needs rich: pip install '.[cli]' in a checkout of memstate") from error
    progress = Progress(server)
    with Live(get_renderable=lambda: progress, console=None if console is True else console, refresh_per_second=4):
        yield progress

"""Writes events for operators through the standard library's `logging`: each event is one log record of one line.

Loggers are named `memstate.*`. Each has a handler that does nothing, so a process that configures no logging sees
nothing, not even on stderr. An event is made only if its logger is enabled for its level.
"""

import json
import logging
import math
import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

EVERY: Final = 60.0  # seconds between two lines of events of one kind
KINDS: Final = 32  # kinds of events that are told apart, at most
OWN: Final = re.compile(r"\d+|\(.*", re.DOTALL)  # parts in which texts of one kind may differ
FIELDS = "memstate"  # the attribute of a log record that has the fields of an event


def logger(name: str) -> logging.Logger:
    """Returns the logger `memstate.<name>`, which writes nothing until the process configures logging.

    Args:
        name: what the events are about.
    """
    log = logging.getLogger(f"memstate.{name}")
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    return log


def event(log: logging.Logger, level: int, name: str, **fields: Any) -> None:
    """Writes one event, if the logger is enabled for the level.

    An exception of a handler goes no further, because it would end the caller in the middle of a change. It is written
    to stderr if `logging.raiseExceptions` is set, as `logging` does with errors that a handler reports itself.

    Args:
        log: the logger that writes the event.
        level: the level of the event, such as `logging.INFO`.
        name: what happened, such as "evicted".
        fields: the details: numbers and short texts.
    """
    if log.isEnabledFor(level):
        try:
            text = " ".join(
                f"{key}={value!r}" if isinstance(value, str) else f"{key}={value}" for key, value in fields.items()
            )
            log.log(level, "%s", f"{name} {text}".rstrip(), extra={FIELDS: {"event": name, **fields}})
        except Exception:
            if logging.raiseExceptions:
                traceback.print_exc()


@dataclass
class LogLine:
    """Collects the events of one kind for a minute after such an event was written. Then they become one line.

    Attributes:
        level: Level of the events.
        name: Name of the events.
        until: End of the minute, in seconds of the clock.
        times: Number of events so far. With 0, no line is written.
        fields: Fields of the last event, or the sums over all events.
    """

    level: int
    name: str
    until: float
    times: int = 0
    fields: dict[str, Any] = field(default_factory=dict)


class Repeats:
    """Writes repeated events as one line per minute, with their number.

    The first event of a kind is written at once. All events of the following minute become one line, with the field
    `times`. This line is written by `write_due`, or at the next event of its kind. Events are of one kind if their
    names and texts are equal, apart from numbers and from all that follows an opening bracket, which is usually the
    text of an error.

    Args:
        log: the logger that writes the lines.
        clock: returns seconds.
        sums: fields whose values are added up. Of other fields, a line has the value of the last event.

    Example:
        >>> import logging, sys
        >>> seconds, handler = iter([0, 1, 2, 90]), logging.StreamHandler(sys.stdout)
        >>> logging.getLogger("memstate.example").addHandler(handler)
        >>> told = Repeats(logger("example"), lambda: next(seconds), sums=["records"])
        >>> for records in (8, 3, 4):
        ...     told.event(logging.WARNING, "write failed", records=records, why="ENOSPC")
        write failed records=8 why='ENOSPC'
        >>> told.write_due()
        write failed records=7 why='ENOSPC' times=2
        >>> logging.getLogger("memstate.example").removeHandler(handler)
    """

    def __init__(
        self, log: logging.Logger, clock: Callable[[], float] = time.monotonic, sums: Sequence[str] = ()
    ) -> None:
        self._log, self._clock, self._sums = log, clock, sums
        self._lines: dict[tuple[str, ...], LogLine] = {}

    def event(self, level: int, name: str, **fields: Any) -> None:
        """Writes an event, or notes it for the line of its kind, if the logger is enabled for the level.

        Args:
            level: the level of the event.
            name: what happened.
            fields: the details: numbers and short texts.
        """
        if not self._log.isEnabledFor(level):
            return
        kind = (name, *(OWN.sub("", text) for text in fields.values() if isinstance(text, str)))
        if kind not in self._lines and len(self._lines) >= KINDS:
            kind = (name,)
        now, line = self._clock(), self._lines.get(kind)
        if line is None or (not line.times and line.until <= now):
            self._lines[kind] = LogLine(level, name, now + EVERY)
            event(self._log, level, name, **fields)
            return
        added = {key: line.fields.get(key, 0) + fields[key] for key in self._sums if key in fields}
        line.times, line.fields = line.times + 1, fields | added
        self._write(kind, line, now)

    @property
    def idle(self) -> bool:
        """Whether no kind of event has its minute running, so that `write_due` has nothing to do."""
        return not self._lines

    def write_due(self, now: float | None = None) -> None:
        """Writes the lines whose minute is over. It costs nothing if no minute is running.

        Args:
            now: the time in seconds; infinity for all lines. None: the time of the clock.
        """
        if self._lines:
            now = self._clock() if now is None else now
            for kind, line in list(self._lines.items()):
                self._write(kind, line, now)

    def _write(self, kind: tuple[str, ...], line: LogLine, now: float) -> None:
        if line.until > now:
            return
        if not line.times:
            self._lines.pop(kind, None)
            return
        times = {"times": line.times} if line.times > 1 else {}
        self._lines[kind] = LogLine(line.level, line.name, now + EVERY)
        event(self._log, line.level, line.name, **line.fields, **times)


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON: `time`, `level`, `logger`, `event`, and the fields of the event.

    A record that is not one of memstate's events has `message` in place of `event`, so one handler can serve a whole
    process.

    Example:
        >>> import logging, sys
        >>> handler = logging.StreamHandler(sys.stdout)
        >>> handler.setFormatter(JsonFormatter())
        >>> logging.getLogger("memstate").addHandler(handler)
        >>> logging.getLogger("memstate").setLevel(logging.INFO)
        >>> event(logger("example"), logging.INFO, "evicted", tokens=64)  # doctest: +ELLIPSIS
        {"time": ..., "level": "INFO", "logger": "memstate.example", "event": "evicted", "tokens": 64}
        >>> logging.getLogger("memstate").removeHandler(handler)
    """

    def format(self, record: logging.LogRecord) -> str:
        """Returns a log record as one line.

        Args:
            record: the log record.
        """
        line: dict[str, Any] = {
            "time": round(record.created, 6), "level": record.levelname, "logger": record.name,
            **getattr(record, FIELDS, {"message": record.getMessage()}),
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                line[name] = str(value)  # JSON has no infinity and no NaN
        return json.dumps(line, default=str)

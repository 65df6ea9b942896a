"""Events for operators, through the standard library's `logging`: one event is one record, and one line.

Loggers are named `memstate.*`. Each has a handler that does nothing, so a process that configures no logging sees
nothing, also on stderr. An event is made only where its logger is enabled for its level.
"""

import json
import logging
import math
import traceback
from typing import Any

FIELDS = "memstate"  # the attribute of a log record that has the fields of an event


def logger(name: str) -> logging.Logger:
    """Returns the logger `memstate.<name>`, which writes nothing until the process configures logging.

    Args:
        name: what the events are about.
    """
    found = logging.getLogger(f"memstate.{name}")
    if not found.handlers:
        found.addHandler(logging.NullHandler())
    return found


def event(log: logging.Logger, level: int, name: str, **fields: Any) -> None:
    """Writes one event, if the logger is enabled for the level.

    What a handler raises goes no further, because it would end the call in the middle. It is written to stderr, as
    `logging` does with what a handler notices itself (`logging.raiseExceptions`).

    Args:
        log: the logger.
        level: its level, such as `logging.INFO`.
        name: what happened, such as "evicted".
        fields: what is known of it: numbers and short texts.
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
        """Returns the line.

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
                line[name] = str(value)  # JSON has no such number
        return json.dumps(line, default=str)

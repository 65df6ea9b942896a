"""Keeps names of former versions for one version. Each warns once, with the call that takes its place.

Version 0.3 takes this file out, and `StateManager.__getattr__` with it.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_WARNED: set[str] = set()


def warned(name: str, instead: str, value: T) -> T:
    """Returns a value after a warning, the first time that this name is used.

    Args:
        name: the name of a former version.
        instead: what takes its place.
        value: the value.
    """
    if name not in _WARNED:
        text = f"{name} is now {instead}; the old name goes with version 0.3 (CHANGELOG.md has all of them)"
        warnings.warn(text, FutureWarning, stacklevel=4)  # shown by default, also in the modules of an engine
        _WARNED.add(name)  # not before: where warnings are errors, every place is one
    return value


def of(mem: Any, name: str) -> Any:
    """Returns what a name of a former version means.

    Args:
        mem: the manager.
        name: the name.

    Raises:
        AttributeError: no version had it.
    """
    if name in _CALLS:
        call, instead = _CALLS[name]
        return warned(f"mem.{name}", instead, partial(call, mem))
    if name in _VALUES:
        value, instead = _VALUES[name]
        return warned(f"mem.{name}", instead, value(mem))
    if name in _DEVICE:
        return warned(f"mem.{name}", f"mem.device.{name}", getattr(mem.device, name))
    raise AttributeError(f"{type(mem).__name__!r} object has no attribute {name!r}")


def _release(mem: Any, rows: Any, publish: bool | Sequence[int] = False, *, tokens: Any = None) -> Any:
    lengths = None if isinstance(publish, bool) else publish
    keep = "cache" if tokens is not None else None if publish is False else "handle"
    return mem.end(rows, keep, tokens=tokens, lengths=lengths)


def _retract(mem: Any, rows: Any, *, tokens: Any = None) -> Any:
    return mem.end(rows, "handle" if tokens is None else "cache", tokens=tokens)


def _abort(mem: Any, rows: Any) -> None:
    mem.end(rows)


_CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "release": (_release, "mem.end(rows, keep=None | 'handle' | 'cache', tokens=, lengths=)"),
    "retract": (_retract, "mem.end(rows, keep='handle' | 'cache', tokens=)"),
    "abort": (_abort, "mem.end(rows)"),
    "length": (lambda mem, row: mem.info(row).length, "mem.info(row).length"),
    "confirmed": (lambda mem, row: mem.info(row).confirmed, "mem.info(row).confirmed"),
    "next_boundary": (lambda mem, row: mem.info(row).next_boundary, "mem.info(row).next_boundary"),
    "slots_held": (lambda mem, row: mem.info(row).slots, "mem.info(row).slots"),
    "open_session": (lambda mem, *args, **names: mem.sessions.open(*args, **names), "mem.sessions.open(name)"),
    "close_session": (lambda mem, session: mem.sessions.close(session), "mem.sessions.close(session)"),
    "reset": (lambda mem: mem.recover(keep=False) and None, "mem.recover(keep=False)"),
}
_VALUES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "page_size": (lambda mem: mem.pages.size, "mem.pages.size"),
    "changes": (lambda mem: mem.journal.changes if mem.journal is not None else [], "mem.journal.changes"),
}
_DEVICE = {"page_table", "live_slots", "marks", "read_slots", "arrived", "scrub_null", "sleep", "wake", "buffer_infos"}
_DEVICE |= {"use_stream", "check"}

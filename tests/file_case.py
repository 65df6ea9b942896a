"""File stores in tests: records, what lies in the folder, a system that refuses, processes that die."""

import os
import random
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memstate.tiers.stores.base import Bytes, Outcome
from memstate.tiers.stores.file import FileStore

MISSING, DONE, DAMAGED, FAILED = Outcome.MISSING, Outcome.DONE, Outcome.DAMAGED, Outcome.FAILED
OLD = 1_000_000_000  # seconds since 1970: long ago


def record(seed: int, size: int = 100) -> Bytes:
    return np.frombuffer(bytearray(random.Random(seed).randbytes(size)), np.uint8)


def put(store: FileStore, name: str, data: Bytes) -> Outcome:
    return store.put([name], [data])[0]


def get(store: FileStore, name: str, size: int = 100) -> tuple[Outcome, Bytes]:
    buffer = np.full(size, 0x5A, np.uint8)
    return store.get([name], [buffer])[0], buffer


def holds(store: FileStore, name: str, data: Bytes) -> bool:
    outcome, found = get(store, name, data.size)
    return outcome is DONE and found.tobytes() == data.tobytes()


def files(store: FileStore) -> list[Path]:
    return sorted(path for path in store.folder.path.rglob("*") if not path.is_dir())


def place(store: FileStore, name: str) -> Path:
    return Path(store.folder.paths([name])[0])


def in_child(work: Callable[[], object]) -> int:
    """Forks, works there, and dies without a word to anything that this process has begun; the process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def has_ended(child: int) -> int | None:
    """Its exit status once, as soon as there is one."""
    with suppress(ChildProcessError):
        found, status = os.waitpid(child, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    return None


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, code: int, when: Callable[..., bool]) -> None:
    """Makes a function of `os` fail."""
    real = getattr(os, call)

    def refused(*arguments: Any, **settings: Any) -> Any:
        if when(*arguments):
            if call == "close":  # the descriptor is gone all the same
                real(*arguments)
            raise OSError(code, os.strerror(code))
        return real(*arguments, **settings)

    monkeypatch.setattr(os, call, refused)

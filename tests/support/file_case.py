"""Makes records for tests of file stores, names their files, and makes calls of `os` fail."""

import os
import random
import re
import zlib
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memstate.tiers.stores.base import Bytes, Outcome
from memstate.tiers.stores.file import FileStore

MISSING, DONE, DAMAGED, FAILED = Outcome
OLD = 1_000_000_000  # a time of modification long ago, in seconds since 1970


def record(seed: int, size: int = 100) -> Bytes:
    return np.frombuffer(bytearray(random.Random(seed).randbytes(size)), np.uint8)


def key(word: str) -> str:
    """Returns the name of the record that a word stands for. A word that already is such a name stays unchanged."""
    return (
        word
        if re.fullmatch(r"(state|kv)-[0-9a-f]{64}", word)
        else f"kv-{blake2b(word.encode(), digest_size=32).hexdigest()}"
    )


def keys(words: Iterable[str]) -> list[str]:
    return [key(word) for word in words]


def put(store: FileStore, word: str, data: Bytes) -> Outcome:
    return store.put([key(word)], [data])[0]


def get(store: FileStore, word: str, size: int = 100) -> tuple[Outcome, Bytes]:
    buffer = np.full(size, 0x5A, np.uint8)
    return store.get([key(word)], [buffer])[0], buffer


def holds(store: FileStore, word: str, data: Bytes) -> bool:
    outcome, data_read = get(store, word, data.size)
    return outcome is DONE and data_read.tobytes() == data.tobytes()


def files(store: FileStore) -> list[Path]:
    return sorted(path for path in store.folder.path.rglob("*") if not path.is_dir())


def place(store: FileStore, word: str) -> Path:
    return store.folder.path / shard(word) / key(word)


def shard(word: str) -> str:
    """Returns the folder of a record."""
    return f"records-{zlib.crc32(key(word).encode()) % 256:02x}"


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, code: int, when: Callable[..., bool]) -> None:
    """Makes a function of `os` fail with an error code where `when(*arguments)` is true."""
    real = getattr(os, call)

    def refused(*arguments: Any, **settings: Any) -> Any:
        if when(*arguments):
            if call == "close":  # even a failed close frees the descriptor
                real(*arguments)
            raise OSError(code, os.strerror(code))
        return real(*arguments, **settings)

    monkeypatch.setattr(os, call, refused)

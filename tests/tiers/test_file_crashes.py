"""Records in files are whole or missing, even if a process dies or many write at once."""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memstate.tiers.stores.file import FileStore
from tests.support.file_case import DAMAGED, DONE, MISSING, OLD, files, get, holds, keys, place, put, record
from tests.support.processes import ended, in_child

CALLS = ("stat", "fstat", "open", "mkdir", "fchmod", "write", "fsync", "close", "replace", "utime", "scandir")


def dies_at(call: int, work: Callable[[], object]) -> Callable[[], None]:
    """Returns the work of a process that exits before its n-th call of `os`.

    Each call of `write` writes 37 bytes at most.
    """

    def run() -> None:
        left = [call]

        def deadly(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def called(*arguments: Any, **settings: Any) -> Any:
                left[0] -= 1
                if not left[0]:
                    os._exit(77)
                if name == "write":
                    arguments = (arguments[0], arguments[1][:37])
                return real(*arguments, **settings)

            return called

        for name in CALLS:
            setattr(os, name, deadly(name))
        work()

    return run


@pytest.mark.sample
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("before", ["nothing", "a damaged record", "the record"])
def test_B67_a_process_killed_at_any_call_loses_that_record_alone(before: str, durable: bool, tmp_path: Path) -> None:
    seen, call = set(), 0
    while True:
        call += 1
        folder = tmp_path / str(call)
        store = FileStore(folder, durable=durable)
        put(store, "other", record(1))
        if before != "nothing":
            put(store, "a", record(0))
            os.utime(place(store, "a"), (OLD, OLD))
        if before == "a damaged record":
            os.truncate(place(store, "a"), 50)
        status = ended(in_child(dies_at(call, lambda store=store: put(store, "a", record(0)))))
        assert status in (0, 77)
        reader = FileStore(folder)  # a new store, as in another process
        outcome, body = get(reader, "a")
        assert (
            outcome in {"nothing": (MISSING, DONE), "a damaged record": (DAMAGED, DONE), "the record": (DONE,)}[before]
        )
        assert outcome is not DONE or body.tobytes() == record(0).tobytes()
        assert holds(reader, "other", record(1))
        seen.add(outcome)
        for path in files(reader):
            os.utime(path, (OLD, OLD))
        assert put(reader, "a", record(0)) is DONE and holds(reader, "a", record(0))
        reader.clean()
        assert files(reader) == sorted([place(reader, "a"), place(reader, "other")])
        if status == 0:
            break
    assert call > (2 if before == "the record" else 7)
    assert DONE in seen and len(seen) == (1 if before == "the record" else 2)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_many_threads(tmp_path: Path) -> None:
    """Threads use the same names in a store that is always too full. Every record that they read is right."""
    store, trouble, done = FileStore(tmp_path, capacity=2000), [], [0] * 8

    def work(who: int) -> None:
        chance = random.Random(who)
        try:
            for _ in range(60):
                chosen = chance.sample(range(30), 3)
                names, data = keys([f"n{n}" for n in chosen]), [record(n) for n in chosen]
                kind = chance.randrange(8)
                if kind < 4:
                    assert store.put(names, data) == [DONE] * 3
                elif kind < 7:
                    buffers = [np.empty(100, np.uint8) for _ in names]
                    for outcome, buffer, value in zip(store.get(names, buffers), buffers, data, strict=True):
                        assert outcome in (MISSING, DONE)
                        assert outcome is MISSING or buffer.tobytes() == value.tobytes()
                        done[who] += outcome is DONE
                else:
                    store.discard(names[:1])
        except BaseException as error:
            trouble.append(error)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trouble == [] and not store.faults and sum(done) > 0 and store.evicted > 0
    assert sum(path.stat().st_size for path in files(store)) <= 2000
    assert all(path.stat().st_size == 100 for path in files(store))

"""Benchmarks the throughput of storage backends, compared with a copy of the same bytes in memory and with plain files.

Files are written to a temporary folder and read from the page cache. So a disk changes the figures only when the system
makes writers wait for it. Every batch is read back and compared before it is timed.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memstate.errors import ConfigurationError
from memstate.tiers import FileStore, MooncakeStore, Objects, Outcome
from memstate.tiers.stores.base import Bytes
from memstate_tools.bench.task import Measured, Setting, Task
from memstate_tools.bench.tiers_mooncake import Unavailable, loopback
from memstate_tools.bench.tiers_objects import bucket
from memstate_tools.bench.tiers_turns import MIB, TurnSide, cases, rates, sized

SEGMENT, TOY_SEGMENT = 512 * MIB, 16 * MIB

Kept = FileStore | MooncakeStore | Objects


class _Plain:
    """Files that are written and read without a store, one after the other."""

    def __init__(self, folder: Path, of: list[Bytes], to: list[Bytes]) -> None:
        paths = [folder / f"plain-{at}" for at in range(len(of))]
        self._files = list(zip(paths, of, to, strict=True))

    def put(self) -> None:
        for path, source, _ in self._files:
            source.tofile(path)

    def get(self) -> None:
        for path, _, target in self._files:
            with open(path, "rb", buffering=0) as file:
                file.readinto(target.data)

    def discard(self) -> None:
        for path, _, _ in self._files:
            path.unlink()


class _Batch:
    """Records of random bytes, and memory into which they are read.

    Args:
        setting: The setting of the benchmark.
        store: The store to measure.
        memory: Two blocks of memory, one to write from and one to read into: uint8 `2 byte`.
        records: Number of records.
        nbytes: Bytes of a record.
    """

    def __init__(self, setting: Setting, store: Kept, memory: Tensor, records: int, nbytes: int) -> None:
        self.setting, self.store = setting, store
        self.case, self.total = sized(records, nbytes), records * nbytes
        self.names = [f"state-{os.urandom(32).hex()}" for _ in range(records)]
        self.source, self.target = (way[: self.total].numpy() for way in memory)
        self.of, self.to = (np.split(way, records) for way in (self.source, self.target))

    def put(self) -> None:
        self._require(self.store.put(self.names, self.of))

    def get(self) -> None:
        self._require(self.store.get(self.names, self.to))

    def discard(self) -> None:
        self.store.discard(self.names)

    def _require(self, outcomes: list[Outcome]) -> None:
        if set(outcomes) != {Outcome.DONE}:
            raise OSError(f"{self.store!r}: {[outcome.name for outcome in outcomes]}, faults {dict(self.store.faults)}")

    def check(self) -> str:
        """Returns what is wrong after a put, a read and a discard of all records; empty if nothing is."""
        self.target[:] = ~self.source
        self.put()
        are_there = self.store.exists(self.names)
        self.get()
        self.discard()
        if not all(are_there) or any(self.store.exists(self.names)):
            return "a record is not there after it was put, or there after it was taken out"
        return "" if np.array_equal(self.source, self.target) else "other bytes came back than were written"

    def measure(self, name: str, plain: _Plain | None) -> list[Measured]:
        each = partial(rates, self.setting, case=self.case, nbytes=self.total)
        puts = {"memory-copy": TurnSide(partial(np.copyto, self.target, self.source))}
        gets, keepers = dict(puts), (self, plain) if plain else (self,)
        if plain:
            puts["plain-file"], gets["plain-file"] = TurnSide(plain.put, plain.discard), TurnSide(plain.get)
        entries = each(f"{name} put", ours=TurnSide(self.put, self.discard), peers=puts)
        for keeper in keepers:
            keeper.put()
        entries += each(f"{name} get", ours=TurnSide(self.get), peers=gets)
        for keeper in keepers:
            keeper.discard()
        return entries


def _batches(setting: Setting, name: str, store: Kept, memory: Tensor, folder: Path | None) -> Iterator[Task]:
    store.register(memory)
    for records, nbytes in cases(setting):
        batch = _Batch(setting, store, memory, records, nbytes)
        plain = _Plain(folder, batch.of, batch.to) if folder else None
        yield Task(f"{name}, {batch.case}", batch.check, partial(batch.measure, name, plain))


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields the tasks of puts and gets of files and folders by URL; of S3 and Mooncake on loopback if they can run."""
    most = max(records * nbytes for records, nbytes in cases(setting))
    memory = torch.empty(2, most, dtype=torch.uint8, device="cpu").random_(0, 256)
    folder = Path(setting.held.enter_context(tempfile.TemporaryDirectory(prefix="memstate-bench-")))
    yield from _batches(setting, "file", FileStore(folder / "store"), memory, folder)
    stores: dict[str, Callable[[], AbstractContextManager[Kept]]] = {
        "folder": lambda: closing(Objects(f"file://{folder}/objects")), "s3": bucket,
        "mooncake": lambda: loopback(setting.sizes(SEGMENT, TOY_SEGMENT)),
    }  # fmt: skip
    for name, opened in stores.items():
        try:
            store = setting.held.enter_context(opened())
        except (ConfigurationError, Unavailable) as error:
            print(f"tiers: measured without {name}: {error}", file=sys.stderr)
        else:
            if name == "s3":
                print("tiers: s3 measures moto, a server in one Python process, not S3", file=sys.stderr)
            yield from _batches(setting, name, store, memory, folder if name == "folder" else None)

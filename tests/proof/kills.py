"""Kills serving processes again and again. Each process starts with the records that those before it have left:

    python -m tests.proof.kills --kills 2000 [--seed 1] [--objects]

Each process serves conversations over tiers with a `FileStore`, or with `Objects` of an S3 server, with threads that
write and read. From the tokens, it
checks every state that a step reads, and every KV page. SIGKILL ends it at a random moment; half
of the processes first serve a few turns. Then this program reads every new record itself.

Ends with 1 at the first wrong byte, crash or fault of the store, or if a record is missing although nothing evicts.
"""

import argparse
import mmap
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import memstate as ms
from memstate.tiers import FileStore, Objects
from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import RECORD
from memstate.tokens import SaltedTokens, encode
from tests.support.object_server import BUCKET, S3, SECRETS
from tests.support.processes import ended, in_child
from tests.support.tiered import History, Tiered, page_bytes, state_bytes, written
from tests.support.tiered_small import PAGE, fetch

SHORTEST_LIFE_S, LONGEST_LIFE_S = 0.01, 0.12  # time until the kill, after TURNS_LEFT turns
TURNS_LEFT = (0, 0, 1, 3)  # turns that a process serves before the time to its kill begins
STUCK_S = 60.0
SLOW = 0.25  # share of the processes with a slow disk
LIVES = 50  # processes per folder
FRESH = 8  # number of processes after which a new conversation begins
OPEN = 6  # number of newest conversations among which a process chooses
TURNS = 3
LAST_TURNS = 12  # turns of the last process of a folder; it is not killed
SYSTEM = [9, 8, 7, 6, 5, 4, 3, 2]  # the first tokens of all conversations
TOLD_S = 5.0
LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT  # asks whether a process has ended, without reaping it
COUNTED = ("turns", "hit_tokens", "written")


class Setting(NamedTuple):
    """Settings of all processes of one folder.

    Attributes:
        tracking: the tracking strategy.
        write: when states are saved; the tiers get this value as `write`.
        capacity: bytes of the folder; None: no limit.
        durable: whether records are flushed to the disk.
    """

    tracking: ms.Tracking
    write: str = "through"
    capacity: int | None = None
    durable: bool = False


SETTINGS = (
    Setting(ms.Redirect(8)),
    Setting(ms.LazyPingPong(8), capacity=12_000),
    Setting(ms.Redirect(8), "back"),
    Setting(ms.PingPong(8), durable=True),
    Setting(ms.Redirect(8), "selective", capacity=6_000),
)


class Wrong(AssertionError):
    """A fault; the text says after which kill it appeared."""


def goal(n: int) -> int:
    """Returns the number of tokens of each answer in conversation n."""
    return 2 + n % 7


def prompt(n: int, turn: int) -> list[int]:
    """Returns the prompt of a turn of conversation n: all tokens of the turns before, and some new ones."""
    tokens = list(SYSTEM)
    for at in range(turn + 1):
        tokens += [1000 * n + 20 * at + i for i in range(3 + (n + at) % 6)]
        tokens = [*written(tuple(tokens), goal(n))] if at < turn else tokens
    return tokens


def server(setting: Setting, store: FileStore | Objects | None) -> Tiered:
    tiers = {"store": store, "write": setting.write, "threads": 2, "host_slots": 6, "host_pages": 24}
    return Tiered(setting.tracking, tiers, pages=40, slots=10)


class Process:
    """A server over the files of a folder, in a process that may be killed at any time.

    Args:
        folder: where its records are, and how to serve.
        chance: random numbers that choose the turns.
        newest: number of the newest conversation.
        counts: the figures that COUNTED names, summed over all processes, in memory shared with the parent.
    """

    def __init__(self, folder: "Folder", chance: random.Random, newest: int, counts: NDArray[np.int64]) -> None:
        setting, self.store = folder.setting, folder.store()
        self.at, self._setting, self._chance, self._newest = server(setting, self.store), setting, chance, newest
        self._counts, self._before, self.turns = counts, counts.copy(), 0

    def turn(self) -> None:
        """Serves one turn.

        Raises:
            AssertionError: a state or a page is wrong, or the store had a fault.
        """
        n = self._newest - min(int(self._chance.expovariate(0.6)), OPEN - 1, self._newest)
        tokens = prompt(n, self._chance.randrange(TURNS))
        fetch(self.at.mem, tokens)
        self.at.turn(tokens, goal(n), most=self._chance.randint(1, 64))
        self.turns += 1
        self.at.mem.poll()
        figures = self.at.mem.stats().tiers
        gone = {"missing"} if self._setting.capacity else set()  # a record may be evicted before it is read
        assert figures.prefetch and not figures.prefetch.failures and not set(figures.prefetch.flaws) - gone, figures
        assert not self.store.faults and not figures.write_failed, (self.store, figures)
        done = np.array([self.turns, figures.storage_hit_tokens, figures.written])
        np.add(self._before, done, out=self._counts)


def slow_disk() -> None:
    """Makes `os.write` slow, and lets it write only a part, so that most kills come in the middle of a record."""
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        time.sleep(0.0002)
        return real(descriptor, data[:101])

    os.write = write  # type: ignore[assignment]


class Folder:
    """One folder, in which one process after the other writes files.

    Args:
        path: folder of the store.
        setting: settings of its processes.

    Attributes:
        records: names of all records that were read and had the right bytes.
        unfinished: number of temporary files.
        known: key -> all tokens of its prefix.
    """

    def __init__(self, path: Path, setting: Setting) -> None:
        self.path, self.setting = path, setting
        self.records: set[str] = set()
        self.unfinished = 0
        self.known: dict[bytes, History] = {}
        self._below = server(setting, None).below
        forms = [cache.form for cache in self._below._caches]
        self._forms: dict[str, tuple[RecordFormat, Callable[[History], bytes]]] = {
            form.kind: (form, bytes_of) for form, bytes_of in zip(forms, (state_bytes, page_bytes), strict=True)
        }

    def store(self) -> FileStore | Objects:
        """Opens the store in a process that will be killed."""
        return FileStore(self.path, self.setting.capacity, self.setting.durable)

    def found(self) -> dict[str, Callable[[], bytes]]:
        """Returns for each file its name and what reads it."""
        return {path.name: path.read_bytes for path in self.path.rglob("*") if path.is_file()}

    def know(self, n: int) -> None:
        """Notes the tokens of conversation n."""
        for turn in range(TURNS):
            text = written(tuple(prompt(n, turn)), goal(n))
            for at, key in enumerate(self._below.keys.of(SaltedTokens(encode(text), None)), 1):
                self.known[key] = text[: at * PAGE]

    def look(self) -> None:
        """Reads every new record.

        Raises:
            Wrong: a record has wrong bytes, or is missing although nothing evicts.
        """
        files = self.found()
        records = {name: read for name, read in files.items() if RECORD.fullmatch(name)}
        self.unfinished = len(files) - len(records)
        if others := sorted(name for name in files if name not in records and not name.endswith(".tmp")):
            raise Wrong(f"a store wrote {others}")
        if self.setting.capacity is None and (lost := self.records - set(records)):
            raise Wrong(f"{len(lost)} records have gone: {sorted(lost)[:3]}")
        for name in records.keys() - self.records:
            if said := self.flaw(name, np.frombuffer(records[name](), np.uint8)):
                raise Wrong(f"{name}: {said}")
        self.records = set(records)

    def flaw(self, name: str, record: NDArray[np.uint8]) -> str:
        """Returns the fault of a record; "" if it is right."""
        kind, _, digest = name.partition("-")
        form, bytes_of = self._forms[kind]
        tokens = self.known.get(key := bytes.fromhex(digest))
        if tokens is None:
            return "a record of a prompt that was never asked"
        if flaw := form.flaw(record, key, len(tokens)):
            return flaw
        return "" if record.tobytes().endswith(bytes_of(tokens)) else f"not the bytes of its {len(tokens)} tokens"


class Bucket(Folder):
    """Objects of an S3 server below a prefix, instead of files."""

    def __init__(self, server: S3, prefix: str, setting: Setting) -> None:
        super().__init__(Path(prefix), setting)
        self.server = server

    def store(self) -> Objects:
        where = SECRETS | {"endpoint": self.server.url, "region": "us-east-1"}
        return Objects(f"s3://{BUCKET}/{self.path}", self.setting.capacity, timeout=STUCK_S, **where)

    def found(self) -> dict[str, Callable[[], bytes]]:
        def read(path: str) -> bytes:
            return self.server.ask("GET", f"/{BUCKET}/{path}")[2]

        paths = self.server.objects(f"{self.path}/")
        return {path.removeprefix(f"{self.path}/").replace("/", "-"): partial(read, path) for path in paths}


def life(folder: Folder, chance: random.Random, newest: int, counts: NDArray[np.int64], killed: bool) -> None:
    """Runs one process. killed: true: it is killed at a random moment; false: it serves LAST_TURNS turns and closes.

    Raises:
        Wrong: the process ended in another way.
    """
    slow, seconds = chance.random() < SLOW, chance.uniform(SHORTEST_LIFE_S, LONGEST_LIFE_S)
    turns = int(counts[0]) + chance.choice(TURNS_LEFT)

    def work() -> None:
        sys.setswitchinterval(1e-4)  # seconds, so that threads alternate often
        if slow:
            slow_disk()
        process = Process(folder, chance, newest, counts)
        for _ in range(sys.maxsize if killed else LAST_TURNS):
            process.turn()
        process.at.mem.close()

    child = in_child(work)
    if killed:
        stuck = time.monotonic() + STUCK_S
        while counts[0] < turns and time.monotonic() < stuck and not os.waitid(os.P_PID, child, LOOK):
            time.sleep(0.001)
        served = counts[0] >= turns
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    if (status := ended(child)) != (-signal.SIGKILL if killed else 0):
        raise Wrong(f"a process ended with {status}, see its traceback")
    if killed and not served:
        raise Wrong(f"a process did not come to turn {turns} within {STUCK_S:.0f} s")


def kill(kills: int, seed: int, tell: Callable[[str], None], objects: S3 | None = None) -> str:
    """Runs and kills processes, folder after folder.

    Args:
        kills: number of processes to kill.
        seed: seed of the random numbers.
        objects: the server that keeps the records, in place of folders.
        tell: called with a line of progress every few seconds.

    Returns:
        The final figures, in words.

    Raises:
        Wrong: something is wrong.
    """
    assert threading.active_count() == 1, "a thread of this process would be missing in its children"
    counts = np.frombuffer(mmap.mmap(-1, 8 * len(COUNTED)), np.int64)
    started = told = time.monotonic()
    records = unfinished = done = 0

    def so_far() -> str:
        turns, hits, puts = counts.tolist()
        rate = done / (time.monotonic() - started)
        return (
            f"{done} kills, {turns} turns, {hits} tokens from storage, {puts} records written, {records} read here, "
            f"{unfinished} unfinished files, {rate:.1f} kills a second"
        )

    for first in range(0, kills, LIVES):
        setting = SETTINGS[first // LIVES % len(SETTINGS)]
        with tempfile.TemporaryDirectory(prefix="memstate-kills-") as place:
            folder = Bucket(objects, f"{first}", setting) if objects else Folder(Path(place) / "store", setting)
            for at in range(first, min(first + LIVES, kills) + 1):
                chance, newest = random.Random(f"{seed} {at}"), at // FRESH
                for n in range(max(0, newest - OPEN), newest + 1) if at % FRESH == 0 or at == first else ():
                    folder.know(n)
                last = at == min(first + LIVES, kills)
                before = folder.records
                try:
                    life(folder, chance, newest, counts, killed=not last)
                    folder.look()
                except Wrong as wrong:
                    raise Wrong(f"seed {seed}, kill {at}, {setting}: {wrong}") from wrong
                done, records = done + (not last), records + len(folder.records - before)
                if time.monotonic() - told > TOLD_S:
                    told = time.monotonic()
                    tell(so_far())
            unfinished += folder.unfinished
    if not counts[1]:
        raise Wrong(f"seed {seed}: no process found anything of those before it")
    return so_far()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--objects", action="store_true", help="records are objects of an S3 server, not files")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    server(SETTINGS[0], None).turn([1, 2, 3, 4, 5])  # fills caches that the forked children share
    with ExitStack() as ending:
        objects = S3() if chosen.objects else None
        if objects:
            ending.callback(objects.kill)
        try:
            print(f"{kill(chosen.kills, chosen.seed, lambda line: print(line, flush=True), objects)}, nothing wrong")
        except Wrong as wrong:
            print(f"WRONG: {wrong}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

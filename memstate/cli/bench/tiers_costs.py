"""Host time of the names of prompts and of the checksums of records, beside one hash, checksum or copy of the bytes."""

import hashlib
import os
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from memstate.cli.bench.clock import Clock
from memstate.cli.bench.task import Figure, Setting, Task
from memstate.cli.bench.tiers_transfers import LAYERS, TOY_LAYERS, layout_of
from memstate.cli.bench.tiers_turns import KIB, MIB, Side, Turns, sized
from memstate.tiers.keys import Keys
from memstate.tiers.records import DIGEST_BYTES, RecordFormat
from memstate.tokens import encode

PROMPT, TOY_PROMPT = 512, 8  # pages
PAGE_SIZES = (16, 64)  # tokens
RECORDS, TOY_RECORDS = (64 * KIB, MIB, 16 * MIB), (4 * KIB,)


class _Names:
    """Names of a prompt's pages, beside one hash of the same bytes."""

    def __init__(self, turns: Turns, page: int) -> None:
        self.turns, self.page = turns, page
        self.pages = TOY_PROMPT if turns.setting.toy else PROMPT
        self.key = encode(np.random.default_rng(page).integers(0, 2**31, self.pages * page))
        self.keys = Keys(bytes(DIGEST_BYTES), page)

    def check(self) -> str:
        """Every name must be the hash of the one before and of its page's tokens."""
        names, unit = self.keys.of(self.key, "salt"), len(self.key) // self.pages
        for at, (before, name) in enumerate(pairwise(names), 1):
            chained = before + self.key[at * unit : (at + 1) * unit]
            if hashlib.blake2b(chained, digest_size=DIGEST_BYTES).digest() != name:
                return f"page {at} has another name"
        return "" if len(names) == self.pages else f"{len(names)} names for {self.pages} pages"

    def measure(self, clock: Clock) -> list[Figure]:
        plain = partial(hashlib.blake2b, self.key, digest_size=DIGEST_BYTES)
        return self.turns.entries(
            "name", f"{self.page} tokens a page", "host us/page", lambda seconds: seconds * 1e6 / self.pages,
            Side(lambda: self.keys.of(self.key, "salt")), {"plain-hash": Side(plain)},
        )  # fmt: skip


class _Seals:
    """Sealing a record and looking for what is wrong with it, beside a copy and one checksum of the same bytes."""

    def __init__(self, turns: Turns, nbytes: int) -> None:
        self.turns, self.nbytes, self.case = turns, nbytes, sized(1, nbytes)
        layout = layout_of(nbytes, TOY_LAYERS if turns.setting.toy else LAYERS)
        self.form, self.key = RecordFormat("state", layout, bytes(DIGEST_BYTES)), os.urandom(DIGEST_BYTES)
        self.record = np.frombuffer(bytearray(os.urandom(self.form.nbytes)), np.uint8)
        self.other = np.zeros_like(self.record)

    def seal(self) -> None:
        self.form.seal(self.record, self.key, 1)

    def flaw(self) -> str:
        return self.form.flaw(self.record, self.key, 1)

    def check(self) -> str:
        """A sealed record must be found sound, and not with a bit changed anywhere in its body."""
        self.seal()
        at = int.from_bytes(os.urandom(4)) % self.form.body_bytes + self.form.header_bytes
        found = [self.flaw()]
        for _ in range(2):
            self.record[at] ^= 1
            found.append(self.flaw())
        return "" if found == ["", "checksum", ""] else f"sealed, changed, changed back: {found}"

    def measure(self, clock: Clock) -> list[Figure]:
        peers = {
            "memory-copy": Side(partial(np.copyto, self.other, self.record)),
            "plain-hash": Side(partial(zlib.crc32, self.record.data)),
        }
        return [
            entry
            for op, act in (("seal", self.seal), ("flaw", self.flaw))
            for entry in self.turns.entries(
                op, self.case, "host us/MiB", lambda seconds: seconds * 1e6 * MIB / self.nbytes, Side(act), peers
            )
        ]


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields names of prompts, and checksums of records."""
    turns = Turns(setting)
    for page in PAGE_SIZES:
        names = _Names(turns, page)
        yield Task(f"name, {page} tokens a page", names.check, names.measure)
    for nbytes in TOY_RECORDS if setting.toy else RECORDS:
        seals = _Seals(turns, nbytes)
        yield Task(f"seal and flaw, {seals.case}", seals.check, seals.measure)

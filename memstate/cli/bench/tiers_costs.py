"""Host time of the names of prompts and of the checksums of records, beside one hash, checksum or copy of the bytes."""

import hashlib
import os
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from memstate.cli.bench.clock import Act
from memstate.cli.bench.task import Figure, Setting, Task
from memstate.cli.bench.tiers_transfers import LAYERS, TOY_LAYERS, layout_of
from memstate.cli.bench.tiers_turns import KIB, MIB, Side, in_turns, sized
from memstate.tiers.keys import Keys
from memstate.tiers.records import DIGEST_BYTES, RecordFormat
from memstate.tokens import encode

PROMPT, TOY_PROMPT = 512, 8  # pages
PAGE_SIZES = (16, 64)  # tokens
RECORDS, TOY_RECORDS = (64 * KIB, MIB, 16 * MIB), (4 * KIB,)


def _names(setting: Setting, page: int) -> Task:
    """Names of a prompt's pages, beside one hash of the same bytes."""
    pages, case = TOY_PROMPT if setting.toy else PROMPT, f"{page} tokens a page"
    key, keys = encode(np.random.default_rng(page).integers(0, 2**31, pages * page)), Keys(bytes(DIGEST_BYTES), page)

    def check() -> str:
        """Every name must be the hash of the one before and of its page's tokens."""
        names, unit = keys.of(key, "salt"), len(key) // pages
        for at, (before, name) in enumerate(pairwise(names), 1):
            chained = before + key[at * unit : (at + 1) * unit]
            if hashlib.blake2b(chained, digest_size=DIGEST_BYTES).digest() != name:
                return f"page {at} has another name"
        return "" if len(names) == pages else f"{len(names)} names for {pages} pages"

    def measure() -> list[Figure]:
        peers = {"plain-hash": Side(partial(hashlib.blake2b, key, digest_size=DIGEST_BYTES))}
        ours = Side(lambda: keys.of(key, "salt"))
        return in_turns(setting, "name", case, "host us/page", lambda seconds: seconds * 1e6 / pages, ours, peers)

    return Task(f"name, {case}", check, measure)


def _seals(setting: Setting, nbytes: int) -> Task:
    """Sealing a record and looking for what is wrong with it, beside a copy and one checksum of the same bytes."""
    form = RecordFormat("state", layout_of(nbytes, TOY_LAYERS if setting.toy else LAYERS), bytes(DIGEST_BYTES))
    key, case = os.urandom(DIGEST_BYTES), sized(1, nbytes)
    record = np.frombuffer(bytearray(os.urandom(form.nbytes)), np.uint8)
    ops: dict[str, Act] = {"seal": partial(form.seal, record, key, 1), "flaw": partial(form.flaw, record, key, 1)}
    copy = partial(np.copyto, np.zeros_like(record), record)
    peers = {"memory-copy": Side(copy), "plain-hash": Side(partial(zlib.crc32, record.data))}

    def check() -> str:
        """A sealed record must be found sound, and not with a bit changed anywhere in its body."""
        ops["seal"]()
        at = int.from_bytes(os.urandom(4)) % form.body_bytes + form.header_bytes
        found = [ops["flaw"]()]
        for _ in range(2):
            record[at] ^= 1
            found.append(ops["flaw"]())
        return "" if found == ["", "checksum", ""] else f"sealed, changed, changed back: {found}"

    def measure() -> list[Figure]:
        each = partial(in_turns, setting, case=case, unit="host us/MiB", value=lambda s: s * 1e6 * MIB / nbytes)
        return [entry for op, act in ops.items() for entry in each(op, ours=Side(act), peers=peers)]

    return Task(f"seal and flaw, {case}", check, measure)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields names of prompts, and checksums of records."""
    yield from (_names(setting, page) for page in PAGE_SIZES)
    yield from (_seals(setting, nbytes) for nbytes in (TOY_RECORDS if setting.toy else RECORDS))

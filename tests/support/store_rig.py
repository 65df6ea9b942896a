"""Makes memory for the records of a store, and starts a second process that uses the same store."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from memstate.tiers.host.pool import RecordPool
from memstate.tiers.stores.base import Bytes

SIZE = 100_003  # bytes of a record: odd, and more than one slice of Mooncake's client
RECORDS = 24
ROOT = Path(__file__).parents[2]

fresh = (f"kv-{number:064x}" for number in count()).__next__


class Rig:
    """A store and its registered memory, with records 0..RECORDS-1.

    Args:
        store: the store.
        again: source text that opens the same store in another process; "": no other process can.
    """

    def __init__(self, store: Any, again: str = "") -> None:
        self.pool, self.store, self.again = RecordPool(RECORDS, SIZE), store, again
        self.store.register(self.pool.memory)

    def buffers(self, *records: int) -> list[Bytes]:
        return [self.pool.buffer(record) for record in records]

    def fill(self, generator: torch.Generator, *records: int) -> list[Bytes]:
        """Fills records with random bytes, and returns copies of them."""
        for record in records:
            self.pool.memory[record].copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator))
        return [buffer.copy() for buffer in self.buffers(*records)]

    def holds(self, wanted: Sequence[Bytes], *records: int) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(wanted, self.buffers(*records), strict=True))


PEER = f"""
import sys, torch
from memstate.tiers import FileStore, Mooncake, MooncakeStore, Objects
store, read, write, seed = eval(sys.argv[1]), *sys.argv[2:]
memory = torch.zeros(2, {SIZE}, dtype=torch.uint8)
store.register(memory)
print([outcome.name for outcome in store.get([read], [memory[0].numpy()])], flush=True)
memory[1] = memory[0] ^ int(seed)
print([outcome.name for outcome in store.put([write], [memory[1].numpy()])], flush=True)
sys.stdin.read()
"""


def peer(again: str, read: str, write: str, seed: int) -> "subprocess.Popen[str]":
    """Starts another process and returns when it has read one record and written another. It ends with its input."""
    made = subprocess.Popen(
        [sys.executable, "-c", PEER, again, read, write, str(seed)], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert made.stdout is not None
    assert [made.stdout.readline().strip() for _ in range(2)] == ["['DONE']"] * 2
    return made

"""Two clients of one S3 server read, write and discard the same records, while a proxy makes faults at random."""

import gc
import os
import random
import threading
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import torch

from memstate import Plane, StateLayout
from memstate.tiers import Objects
from memstate.tiers.records import RecordFormat
from memstate.tiers.stores.base import Bytes, Outcome
from tests.support.loopback import until
from tests.support.object_server import Proxy, running_proxy
from tests.support.sampling import PROOF

MISSING, DONE, DAMAGED, FAILED = Outcome
FORM = RecordFormat("state", StateLayout((Plane("ssm", (2000,), torch.int8),), 1), bytes(32))
KEYS = [bytes([n] * 32) for n in range(24)]
READS = 100_000 if PROOF else 2_000
THREADS = 4
FAULTS = {  # fault of the proxy -> how often, of 2 000 requests or so
    "": 1600, "503": 100, "denied": 40, "lost": 40, "unheard": 40, "cut": 60, "slow": 20, "flipped": 40, "gone": 40,
    "moved": 10, "silent": 2,
}  # fmt: skip
CAUSES = {"HTTP_503", "HTTP_403", "BareRedirect", "IncompleteMessage", "IncompleteBody", "TimedOut"}
CAUSES |= {"HTTP_404"}  # gone while it was read


def sealed(n: int) -> Bytes:
    """Returns record n, whose bytes follow from n."""
    record = np.frombuffer(bytearray(random.Random(n).randbytes(FORM.nbytes)), np.uint8)
    FORM.seal(record, KEYS[n], 64)
    return record


class Client:
    """One thread. Each record that it reads must be right, or have another outcome or a flaw that its reader sees.

    Attributes:
        read: how often a read ended in an outcome, a flaw of the record, or "wrong".
    """

    def __init__(self, store: Objects, seed: int) -> None:
        self.store, self.chance, self.read = store, random.Random(seed), Counter[str]()

    def work(self, reads: int) -> None:
        while self.read.total() < reads:
            chosen = self.chance.sample(range(len(KEYS)), 8)
            names = [FORM.name(KEYS[n]) for n in chosen]
            if self.chance.random() < 0.25:
                assert set(self.store.put(names[:4], [sealed(n) for n in chosen[:4]])) <= {DONE, FAILED}
            buffers = [np.full(FORM.nbytes, 0x5A, np.uint8) for _ in names]
            outcomes = self.store.get(names, buffers)
            for n, name, outcome, buffer in zip(chosen, names, outcomes, buffers, strict=True):
                flaw = FORM.flaw(buffer, KEYS[n], 64) if outcome is DONE else ""
                right = outcome is not DONE or flaw or buffer.tobytes() == sealed(n).tobytes()
                self.read[flaw or outcome.name if right else "wrong"] += 1
                if flaw:
                    self.store.discard([name])


def faults(proxy: Proxy, seed: int) -> None:
    """Makes faults of all kinds from now on."""
    chance, one = random.Random(seed), threading.Lock()

    def fault(method: str, path: str) -> str:
        with one:
            return chance.choices([*FAULTS], [*FAULTS.values()])[0]

    proxy.fault = fault


def connections() -> int:
    """Returns how many sockets this process has."""
    count = 0
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{file}").startswith("socket")
    return count


def test_B67_reads_under_faults_are_right_or_missed_and_nothing_is_left() -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]' in a checkout")
    seed = int(os.environ.get("MEMSTATE_SEED", random.SystemRandom().randrange(2**31)))
    print(f"MEMSTATE_SEED={seed}")
    with running_proxy() as proxy:
        threads, open_before = threading.active_count(), connections()
        stores = [proxy.store("faults", timeout=1.0) for _ in range(2)]
        faults(proxy, seed)
        clients = [Client(stores[at % 2], seed + at) for at in range(THREADS)]
        working = [threading.Thread(target=client.work, args=(READS // THREADS,)) for client in clients]
        for thread in working:
            thread.start()
        for thread in working:
            thread.join()
        read, seen = sum((client.read for client in clients), Counter()), Counter[str]()
        for (_, kind), times in proxy.seen.items():
            seen[kind] += times
        print(dict(read), dict(seen), [dict(store.faults) for store in stores])
        assert read["wrong"] == 0 and read.total() >= READS
        assert read.keys() == {"DONE", "MISSING", "FAILED", "checksum"} and read["DONE"] > READS // 4
        assert seen.keys() == FAULTS.keys() and {cause for store in stores for cause in store.faults} <= CAUSES

        proxy.fault = lambda method, path: ""
        proxy.wakes.set()
        names, buffers = [FORM.name(key) for key in KEYS], [np.empty(FORM.nbytes, np.uint8) for _ in KEYS]
        there = stores[0].exists(names)
        assert set(stores[1].get(names, buffers)) <= {DONE, MISSING}
        whole = {f"faults/{name.replace('-', '/')}": FORM.nbytes for name, has in zip(names, there, strict=True) if has}
        assert proxy.server.objects() == whole and sum(there) > 4
        for store in stores:
            store.close()
        del store, stores, clients, working
        gc.collect()
        until(lambda: threading.active_count() <= threads, "threads are left")
        until(lambda: connections() <= open_before, "connections are left")

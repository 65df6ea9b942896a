"""A Mooncake master that is killed again and again under a manager that serves: only hits are lost."""

import os
import random
import threading
import time

from memstate.kernels.dispatch import Backend
from memstate.tiers import MooncakeStore
from tests.support.mooncake_server import PATIENCE_S, Master, running_master
from tests.support.sampling import PROOF
from tests.support.tiered import Tiered

KILLS = 25 if PROOF else 1
WAIT_S = 0.2  # how long a request waits for its prefetch


class Talks:
    """Requests over a Mooncake store. `Tiered` compares every byte that a step reads, and every answer."""

    def __init__(self, plain: Backend, store: MooncakeStore, chance: random.Random) -> None:
        tiers = {"store": store, "host_slots": 4, "host_pages": 16, "threads": 2}
        self.at = Tiered(plain, slots=8, rows=2, pages=30, every=8, tiers=tiers)
        self.chance, self.turns = chance, 0

    @property
    def found(self) -> int:
        """Tokens that came from the store."""
        return self.at.tiers.storage_hit_tokens

    def turn(self) -> None:
        """A request that waits a moment for its prefetch and goes on without it."""
        n, shared = self.chance.randrange(12), list(range(8))
        tokens = shared + [100 * n + i for i in range(9 + n)]
        self.at.note(tokens)
        fetch, end = self.at.mem.prefetch(tokens), time.monotonic() + WAIT_S
        while not fetch.done and time.monotonic() < end:
            self.at.mem.poll()
            time.sleep(0.001)
        self.at.below.cancel(fetch)
        self.at.turn(tokens, goal=1 + n % 5, most=self.chance.randint(1, 64))
        self.at.mem.poll()
        self.turns += 1

    def until_found(self) -> None:
        """Serves until something was written, and found after the device and host memory had forgotten it.

        Raises:
            TimeoutError: that did not happen.
        """
        written, found, end = self.at.tiers.written, self.found, time.monotonic() + PATIENCE_S
        while self.at.tiers.written == written or self.found == found:
            if time.monotonic() > end:
                raise TimeoutError(f"{self.at.tiers} after {self.turns} turns")
            self.turn()
            if self.chance.random() < 0.2:
                self.at.give_up(pages=60)
                self.at.below.clear()


def kill_and_start(master: Master, before_s: float, after_s: float) -> None:
    """What a thread does while the loop serves."""
    time.sleep(before_s)
    master.kill()
    time.sleep(after_s)
    master.start()


def test_a_master_killed_at_random_costs_hits_and_nothing_else(plain: Backend) -> None:
    """MEMSTATE_SEED repeats when the master dies and what is asked; threads do not repeat."""
    seed = int(os.environ.get("MEMSTATE_SEED", random.SystemRandom().randrange(2**31)))
    print(f"MEMSTATE_SEED={seed}")
    chance = random.Random(seed)
    with running_master() as master:
        store = MooncakeStore(master.settings(timeout=1.0))
        talks = Talks(plain, store, chance)
        talks.until_found()
        for _ in range(KILLS):
            moments = chance.uniform(0, 0.5), chance.choice((0.0, 0.3, 1.5))
            killer = threading.Thread(target=kill_and_start, args=(master, *moments))
            killer.start()
            while killer.is_alive():
                talks.turn()
            talks.at.look()
            talks.until_found()
        assert store.faults.total() > 0, "no call noticed"
        talks.at.empty()
        talks.at.mem.close()
    assert talks.at.tiers.leaked_records == 0

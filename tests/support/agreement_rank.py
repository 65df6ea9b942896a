"""One rank of a gloo group that prefetches: python agreement_rank.py RANK RANKS FILE. Prints what it decided as JSON.

Every rank runs the same scheduler on its own virtual time; what differs is memory, storage and how long it takes.
"""

import json
import os
import sys
from typing import Any

import torch.distributed as dist

from memstate.errors import AgreementLost
from memstate.tiers.prefetch.agreement import Ranks
from memstate.tiers.prefetch.settings import Prefetch
from tests.support.prefetch_rig import Rig, digests

WAIT = Prefetch(stop="wait_complete", chunk=8)
# What is different on the last rank, then what all ranks are like.
SCENARIOS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "short of memory": ({"kv": 600 // 16}, {}),
    "out of memory": ({"kv": 250 // 16}, {}),
    "slow": ({"latency": lambda: 2.0}, {}),
    "failing": ({}, {}),
    "in want of time": ({}, {"settings": Prefetch(stop="timeout", timeout=6.0, timeout_per_page=0.0, chunk=8)}),
}
LIMIT = 60


def play(name: str, rank: int, ranks: int) -> dict[str, Any]:
    """Runs a scenario; returns the length and the poll in which each of two prefetches ended."""
    last = rank == ranks - 1
    own, common = SCENARIOS[name]
    rig = Rig(**{"settings": WAIT, "workers": 1} | common | (own if last else {}), ranks=Ranks(timeout=30.0))
    keys = digests(f"{name} {rank}", 64)
    rig.stock(keys, range(64), [512, 592, 768] if last else [512, 592, 1024])
    fetches, ended = [], {}
    for poll in range(LIMIT):
        if poll in (0, 2):
            fetches.append(rig.start(1024 - 16 * poll, keys))
        rig.store.broken = name == "failing" and last and poll > 6
        rig.prefetcher.poll()
        if name == "in want of time":
            rig.clock.advance(0.5 if last else 0.0)
            for fetch in fetches:
                rig.prefetcher.ready(fetch)
        ended |= {n: poll for n, fetch in enumerate(fetches) if fetch.done and n not in ended}
        rig.clock.advance(0.5)
    rig.check()
    return {
        "ended": [ended.get(n) for n in range(2)], "length": [fetch.length for fetch in fetches],
        "outcome": [str(fetch.outcome) for fetch in fetches], "found": rig.found(keys),
        "rounds": rig.prefetcher.stats().rounds,
    }  # fmt: skip


def lose(rank: int, ranks: int) -> dict[str, Any]:
    """The last rank goes away in the middle of it; the others say so once and hold nothing."""
    rig = Rig(WAIT, workers=1, ranks=Ranks(timeout=30.0))
    keys = digests(f"lost {rank}", 64)
    rig.stock(keys, range(64), [1024])
    fetch, lost = rig.start(1024, keys), 0
    for poll in range(8):
        if poll == 4 and rank == ranks - 1:
            sys.stdout.flush()
            os._exit(0)
        try:
            rig.prefetcher.poll()
        except AgreementLost:
            lost += 1
        rig.clock.advance(1)
    rig.check()
    return {"lost": lost, "outcome": str(fetch.outcome), "free": rig.kv.pool.records - rig.kv.pool.claimed}


def main() -> None:
    rank, ranks, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    found = {name: play(name, rank, ranks) for name in SCENARIOS}
    print(json.dumps(found), flush=True)
    dist.barrier()
    print(json.dumps(lose(rank, ranks)), flush=True)


if __name__ == "__main__":
    main()

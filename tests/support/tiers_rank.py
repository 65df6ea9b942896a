"""Runs one of several ranks that serve the same requests over their own tiers: python tiers_rank.py RANK RANKS FOLDER.

All ranks run the same scheduler. Their host memories have different sizes, and each rank deletes other records. Prints
as JSON the length that each request started from, and the length of its prefetch.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import memstate as ms
from tests.support.tiered import Tiered

PROMPTS, REQUESTS = 7, 26
PATIENCE = 5000  # limit of the polls for one prefetch


def ranked(rank: int, ranks: int, slots: int = 6, **tiers: object) -> Tiered:
    """Returns a server of one of several ranks."""
    place = {"rank": rank, "ranks": ranks, "group": dist.group.WORLD, "host_slots": 12, "host_pages": 40}
    return Tiered(ms.Redirect(8), place | tiers, slots=slots, pages=22)


def other(rank: int, ranks: int) -> str:
    """Gives the first rank other settings than the other ranks. Returns the error that this rank gets."""
    try:
        ranked(rank, ranks, slots=6 + (rank > 0))
    except ms.ConfigurationError as error:
        return str(error)
    return ""


def play(rank: int, ranks: int, folder: Path, life: int) -> dict[str, Any]:
    """Runs requests with a few prompts on a new server, and closes it. Some are aborted during their prefetch."""
    rng, own = random.Random(f"requests {life}"), random.Random(f"{rank} {life}")
    at = ranked(
        rank, ranks, host_slots=12 - 7 * (rank % 2), host_pages=40 - 12 * (rank % 2), store=ms.FileStore(folder)
    )
    share = random.Random(0)
    prompts = [[share.randrange(3) for _ in range(4 * share.randrange(1, 3))] + [n] * 12 for n in range(PROMPTS)]
    starts: list[tuple[int, int]] = []
    for number in range(REQUESTS):
        prompt = rng.choice(prompts) + [50 + rng.randrange(2)] * rng.randrange(1, 6)
        fetch, polls = at.mem.prefetch(prompt), 0
        gone = rng.randrange(4) if rng.random() < 0.2 else -1
        while not fetch.done and polls < PATIENCE:
            if polls == gone:
                at.below.cancel(fetch)
                break
            at.mem.poll()
            polls += 1
            time.sleep(own.random() * 0.002)
        if gone >= 0:
            at.below.cancel(fetch)
            continue
        starts.append((at.turn(prompt, fetch=fetch), fetch.length))
        at.mem.poll()
        if number % 5 == 0:
            at.mem.audit().raise_if_leaking()
    figures = at.mem.stats().tiers
    at.below.flush()
    at.mem.submit()
    at.mem.prefix.clear()  # type: ignore[union-attr]
    at.mem.audit().raise_if_leaking()
    at.mem.close()
    assert (at.mem.free_slots, at.mem.free_pages) == (6, 22)
    assert figures.leaked_records == 0 and all(cache.pool.free == cache.pool.records for cache in at.below._caches)
    records = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in records[rank::ranks]:  # each rank deletes some files of any rank
        if own.random() < 0.3:
            path.unlink(missing_ok=True)
    return {"starts": starts, "stored": figures.storage_hit_tokens}


def lose(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    """Ends the process of the last rank during a prefetch. Other ranks check their server, and return the outcome."""
    at = ranked(rank, ranks, store=ms.FileStore(folder))
    fetch = at.mem.prefetch(range(40))
    if rank == ranks - 1:
        os._exit(0)
    try:
        while not fetch.done:
            at.mem.poll()
    except ms.AgreementLost:
        at.mem.audit().raise_if_leaking()
    return {"outcome": str(fetch.outcome)}


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    (folder / "records").mkdir(exist_ok=True)
    print(json.dumps({"refused": other(rank, ranks)}), flush=True)
    for life in range(2):
        print(json.dumps(play(rank, ranks, folder / "records", life)), flush=True)
        dist.barrier()
    print(json.dumps(lose(rank, ranks, folder / "records")), flush=True)


if __name__ == "__main__":
    main()

"""Runs two ranks of tensor parallelism, and a process without ranks that starts from the states of the two."""

from multiprocessing.synchronize import Barrier

import torch.distributed as dist
from toy import MODEL, PAGE, WHOLE, manager, open_store, report, serve

from memstate.integrations.handover import HandOver

LETTER = list(range(500, 532))  # first tokens of all prompts


def rank_of_two(place: str, barrier: Barrier, meeting: str, rank: int) -> None:
    """Runs one rank, with half of each state. Both ranks make the same calls in the same order."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    store = open_store(place)
    mem = manager(store, rank, ranks=2)
    starts = [serve(mem, [*LETTER, 6, 7, 8], rank)]
    mem.tiers.flush()
    mem.recover(keep=False)  # forgets the states in this process, as a restart does
    dist.barrier()  # waits until the other rank has written its records
    starts.append(serve(mem, [*LETTER, 9], rank))
    report(f"rank {rank} of 2", mem, store, starts)
    barrier.wait()
    barrier.wait()
    mem.close()
    dist.destroy_process_group()


def another_split(place: str, barrier: Barrier) -> None:
    """Makes the records of one rank from the records of two, and starts from them."""
    store, prompt = open_store(place), [*LETTER, 6, 7, 10]
    barrier.wait()
    handed = HandOver(MODEL, WHOLE, None, PAGE, source=store, ranks=2, target=store, to_ranks=1, rank=0).run(prompt)
    mem = manager(store)
    report(f"one rank, {handed.length} tokens handed over by two", mem, store, [serve(mem, prompt)])
    mem.close()
    barrier.wait()

"""Serves prompts from several processes that share their states through one store, all on this machine.

python examples/many_machines.py FOLDER                      # the store is a folder
python examples/many_machines.py mooncake://127.0.0.1:50051  # the store is memory of the processes; needs a master

1. Two processes: the second starts from states that the first has computed.
2. Two ranks of tensor parallelism, each with half of every state, agree on where a request starts.
3. A process without tensor parallelism starts from the states that the two ranks left in the store.
"""

import multiprocessing as mp
import sys
import tempfile
import time
from multiprocessing.synchronize import Barrier

import torch
import torch.distributed as dist

import memstate as ms
from memstate.tiers import HandOver, Store

MODEL = "counting toy, weights of today"  # in the names of all records
PAGE = 4
WHOLE = ms.StateLayout(  # of all ranks; `parts` says that they cut the heads
    planes=(ms.Plane("ssm", (8, 2), torch.float32, parts=(ms.Part("head", 8),)),), layers=2
)
MANUAL, LETTER = list(range(100, 132)), list(range(500, 532))  # tokens that prompts begin with


def open_store(place: str) -> Store:
    """Opens the store that the processes share."""
    if place.startswith("mooncake://"):
        address = place.removeprefix("mooncake://")
        return ms.MooncakeStore(ms.Mooncake(address, segment_bytes=32 << 20))
    return ms.FileStore(place)


def manager(store: Store, rank: int = 0, ranks: int = 1) -> ms.StateManager:
    """Makes the manager of a process, which has all of each state or the part of one rank."""
    group = dist.group.WORLD if ranks > 1 else None
    prefetch = ms.Prefetch(threshold=8, stop="wait_complete")
    tiers = ms.Tiers(MODEL, host_slots=16, store=store, prefetch=prefetch, rank=rank, ranks=ranks, group=group)
    pages = ms.Pages(size=PAGE)
    return ms.StateManager(WHOLE.shard(ranks), slots=8, max_requests=2, pages=pages, prefix=ms.Prefix(), tiers=tiers)


def folded(state: torch.Tensor, tokens: list[int], rank: int) -> torch.Tensor:
    """Folds tokens into states of (.. head 2). It stands for a model; each head gives other numbers, all exact."""
    heads = torch.arange(1, 1 + state.shape[-2])[:, None] + rank * state.shape[-2]
    for token in tokens:
        state = (state * 3 + token * heads) % 65521
    return state


def serve(mem: ms.StateManager, prompt: list[int], rank: int = 0) -> int:
    """Reads a prompt, compares its state with that of an uncached run, and returns the tokens it need not compute."""
    fetch = mem.prefetch(prompt)  # when the request arrives
    while not mem.tiers.ready(fetch):
        mem.poll()  # once in each iteration of a decode loop
        time.sleep(0.001)
    (row,) = mem.admit([ms.Request("r", tokens=prompt, fetch=fetch)])
    start = done = mem.length(row)
    while done < len(prompt):
        step = mem.plan([row], mem.chunk(row, 16))
        state = folded(mem.planes["ssm"][:, step.read], prompt[done : mem.length(row)], rank)
        mem.planes["ssm"][:, step.write] = state
        mem.settle(step)
        mem.publish([row], tokens=[prompt])
        mem.poll()
        done = mem.length(row)
    mem.release([row], tokens=[prompt])
    assert torch.equal(state, folded(torch.zeros_like(state), prompt, rank)), "the state of another prompt"
    return start


def report(who: str, mem: ms.StateManager, store: Store, starts: list[int]) -> None:
    """Prints where requests began, and the figures to watch."""
    tiers = mem.stats().tiers
    written = f"{tiers.written} records written, {tiers.write_failed} failed; faults {dict(store.faults)}"
    print(f"{who}: requests start at {starts}; {tiers.storage_hit_tokens} tokens from the store, {written}", flush=True)


def first_process(place: str, barrier: Barrier) -> None:
    """Computes a prompt. It gives memory to a Mooncake store, so it stays until the other has ended."""
    store = open_store(place)
    mem = manager(store)
    starts = [serve(mem, [*MANUAL, 1, 2, 3])]
    mem.tiers.flush()  # others find it from now on; without this, some polls later
    report("first process", mem, store, starts)
    barrier.wait()
    barrier.wait()
    mem.close()


def second_process(place: str, barrier: Barrier) -> None:
    """Starts from what the first process has computed."""
    store = open_store(place)
    mem = manager(store)
    barrier.wait()
    report("second process", mem, store, [serve(mem, [*MANUAL, question]) for question in (4, 5)])
    mem.close()
    barrier.wait()


def rank_of_two(place: str, barrier: Barrier, meeting: str, rank: int) -> None:
    """Computes half of each state. Both ranks make the same calls in the same order."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    store = open_store(place)
    mem = manager(store, rank, ranks=2)
    starts = [serve(mem, [*LETTER, 6, 7, 8], rank)]
    mem.tiers.flush()
    mem.reset()  # forgets what only this process had, as a restart does
    dist.barrier()  # the other rank has written, too
    starts.append(serve(mem, [*LETTER, 9], rank))
    report(f"rank {rank} of 2", mem, store, starts)
    barrier.wait()
    barrier.wait()
    mem.close()
    dist.destroy_process_group()


def another_split(place: str, barrier: Barrier) -> None:
    """Makes the records of one rank out of those of two, and starts from them."""
    store, prompt = open_store(place), [*LETTER, 6, 7, 10]
    barrier.wait()
    handed = HandOver(MODEL, WHOLE, None, PAGE, source=store, ranks=2, target=store, to_ranks=1, rank=0).run(prompt)
    mem = manager(store)
    report(f"one rank, {handed.length} tokens handed over by two", mem, store, [serve(mem, prompt)])
    mem.close()
    barrier.wait()


def together(place: str, *works: tuple) -> None:
    """Runs functions at the same time, each in a process of its own."""
    context = mp.get_context("spawn")
    barrier = context.Barrier(len(works), timeout=60)
    processes = [context.Process(target=work, args=(place, barrier, *arguments)) for work, *arguments in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process failed: see above")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        together(sys.argv[1], (first_process,), (second_process,))
        ranks = ((rank_of_two, f"{folder}/meeting", rank) for rank in range(2))
        together(sys.argv[1], *ranks, (another_split,))

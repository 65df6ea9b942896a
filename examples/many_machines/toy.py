"""A toy model, and the loop that serves it in every process of `run.py`."""

import time

import torch
import torch.distributed as dist

import memstate as ms
from memstate.tiers import Store

MODEL = "counting toy, weights of today"  # part of the names of all records
PAGE = 4
WHOLE = ms.StateLayout(  # the layout of all ranks; `parts` says that ranks split the heads
    planes=(ms.Plane("ssm", (8, 2), torch.float32, parts=(ms.Part("head", 8),)),), layers=2
)


def open_store(place: str) -> Store:
    """Opens the store that the processes share."""
    if place.startswith("mooncake://"):
        address = place.removeprefix("mooncake://")
        return ms.tiers.MooncakeStore(ms.Mooncake(address, segment_bytes=32 << 20))
    return ms.Objects(place) if "://" in place else ms.FileStore(place)


def manager(store: Store, rank: int = 0, ranks: int = 1) -> ms.StateManager:
    """Makes the manager of a process. It holds whole states, or one rank's part of each state."""
    group = dist.group.WORLD if ranks > 1 else None
    prefetch = ms.Prefetch(threshold=8, stop="wait_complete")
    tiers = ms.Tiers(MODEL, host_slots=16, store=store, prefetch=prefetch, rank=rank, ranks=ranks, group=group)
    pages = ms.Pages(size=PAGE)
    return ms.StateManager(WHOLE.shard(ranks), slots=8, max_requests=2, pages=pages, prefix=ms.Prefix(), tiers=tiers)


def folded(state: torch.Tensor, tokens: list[int], rank: int) -> torch.Tensor:
    """Folds tokens into states of shape `.. head 2`, in place of a model. Heads differ; all results are exact."""
    heads = torch.arange(1, 1 + state.shape[-2], device=state.device)[:, None] + rank * state.shape[-2]
    for token in tokens:
        state = (state * 3 + token * heads) % 65521
    return state


def serve(mem: ms.StateManager, prompt: list[int], rank: int = 0) -> int:
    """Reads a prompt, and compares its state with an uncached run. Returns the number of tokens not computed."""
    fetch = mem.prefetch(prompt)  # called when the request arrives
    while not mem.tiers.ready(fetch):
        mem.poll()  # called once in each iteration of a decode loop
        time.sleep(0.001)
    (row,) = mem.admit([ms.Request("r", tokens=prompt, fetch=fetch)])
    start = done = mem.info(row).length
    while done < len(prompt):
        step = mem.plan([row], mem.chunk(row, 16))
        state = folded(mem.planes["ssm"][:, step.read], prompt[done : mem.info(row).length], rank)
        mem.planes["ssm"][:, step.write] = state
        mem.settle(step)
        mem.publish([row], keep="cache", tokens=[prompt])
        mem.poll()
        done = mem.info(row).length
    mem.end([row], keep="cache", tokens=[prompt])
    assert torch.equal(state, folded(torch.zeros_like(state), prompt, rank)), "the state of another prompt"
    return start


def report(who: str, mem: ms.StateManager, store: Store, starts: list[int]) -> None:
    """Prints the lengths from which requests start, and the figures to watch."""
    tiers = mem.stats().tiers
    written = f"{tiers.written} records written, {tiers.write_failed} failed; faults {dict(store.faults)}"
    line = f"{who}: requests start at {starts}; {tiers.storage_hit_tokens} tokens from the store, {written}\n"
    print(line, end="", flush=True)  # one write for the whole line, because other processes print too

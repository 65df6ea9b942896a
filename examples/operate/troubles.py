"""Four troubles of a server. Each is a loop that yields after each request; docs/metrics.md has the answers."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import memstate as ms

LAYOUT = ms.StateLayout((ms.Plane("ssm", (64,), torch.float32),), layers=2)
PAGE, BACKEND = 16, "auto"


class SlowStore(ms.FileStore):
    """Files on a disk that takes 50 ms for each write."""

    busy = staticmethod(partial(time.sleep, 0.05))

    def put(self, names: Sequence[str], buffers: Sequence[Any]) -> Any:
        """Writes records after a delay."""
        self.busy()
        return super().put(names, buffers)


def manager(tiers: ms.Tiers | None = None) -> ms.StateManager:
    """Returns a manager of toy states with a prefix cache and many KV pages. With tiers, the engine owns the KV."""
    pages = ms.Pages(size=PAGE) if tiers else ms.Pages(count=2000, size=PAGE, per_row=16)
    return ms.StateManager(
        LAYOUT, slots=32, max_requests=8, pages=pages, prefix=ms.Prefix(), tiers=tiers, backend=BACKEND
    )


def serve(mem: ms.StateManager, prompt: list[int], salt: str | None = None) -> None:
    """Reads one prompt, decodes two tokens, and keeps the states in the cache."""
    rows = mem.admit([ms.Request("request", tokens=prompt, salt=salt)])
    while (length := mem.info(rows[0]).length) < len(prompt):
        chunk = mem.chunk(rows[0], 4 * PAGE)
        mem.extend(rows, [length + chunk])
        mem.settle(mem.plan(rows, chunk))  # here a real engine runs its forward
    for length in range(len(prompt), len(prompt) + 2):
        mem.extend(rows, [length + 1])
        mem.settle(mem.plan(rows))
    mem.end(rows, keep="cache", tokens=[[*prompt, 1, 2]])
    mem.poll()


def prompt_of(who: int) -> list[int]:
    """Returns a prompt of 81 tokens that belongs to one user. A hit covers all but the last token."""
    return [1000 * who + at for at in range(5 * PAGE + 1)]


def hit_rate() -> Iterator[ms.StateManager]:
    """Serves ten users again and again, then sixty."""
    mem = manager()
    yield mem
    for users, turns in (10, 100), (60, 10**9):
        for turn in range(turns):
            serve(mem, prompt_of(turn % users))
            yield mem


def leak() -> Iterator[ms.StateManager]:
    """Keeps a snapshot of each request, and never drops it."""
    mem = manager()
    yield mem
    kept: list[ms.Snapshot | None] = []
    while True:
        try:
            rows = mem.admit([ms.Request("request")])
        except ms.OutOfSlots:  # the request waits: no slot is free
            yield mem
            continue
        mem.extend(rows, [PAGE])
        mem.settle(mem.plan(rows, PAGE))
        kept += mem.end(rows, keep="handle")
        yield mem


def tenant() -> Iterator[ms.StateManager]:
    """Serves five tenants. One of them sends nine of ten prompts, and never the same prompt twice."""
    mem = manager()
    yield mem
    turn = 0
    while True:
        turn += 1
        if turn % 10:
            serve(mem, prompt_of(turn), "greedy")
        else:
            serve(mem, prompt_of(0), f"tenant-{turn // 10 % 4}")
        yield mem


def storage() -> Iterator[ms.StateManager]:
    """Saves states faster than the disk can write them."""
    with tempfile.TemporaryDirectory() as folder:
        store = SlowStore(folder)
        mem = manager(tiers=ms.Tiers(model="toy", host_slots=64, store=store, write="through", threads=1))
        yield mem
        try:
            for turn in range(10**9):
                serve(mem, prompt_of(turn))
                yield mem
        finally:
            mem.recover(keep=False)


TROUBLES = {"hit-rate": hit_rate, "leak": leak, "tenant": tenant, "storage": storage}

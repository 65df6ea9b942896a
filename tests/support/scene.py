"""Builds a manager in which every kind of owner holds a slot, for pictures and reprs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import memstate as ms
from memstate.prefix.policies import Lru
from tests.support import inside
from tests.support.build import build

LAYOUT = ms.StateLayout((ms.Plane("conv", (3, 5), torch.bfloat16), ms.Plane("ssm", (2, 8), torch.float32)), 2)
PROMPT = list(range(40))


def busy(name: str = "", **given: Any) -> tuple[ms.StateManager, list[ms.Snapshot | None]]:
    """Returns a manager with live states, lanes, marks, cached states, a session, a published snapshot, and tiers.

    Args:
        name: Prefix of all names of requests, sessions and tenants.
        given: Settings that replace the usual ones.

    Returns:
        The manager, and a list of handles to keep alive: the published snapshot and a row.
    """
    settings = {
        "slots": 24, "max_requests": 3, "snapshots": 20, "page_size": 4, "journal": 100, "backend": "reference",
        "tracking": ms.PingPong(4), "prefix": ms.Prefix(states=Lru()), "tiers": ms.Tiers("toy", 4),
    }  # fmt: skip
    mem = build(LAYOUT, **(settings | given))
    serve(mem, ms.Request(f"{name}first", tokens=PROMPT[:10]))
    serve(mem, ms.Request(f"{name}chat", tokens=PROMPT[:9], session=mem.sessions.open(f"{name}session-17")), 5)
    row = serve(mem, ms.Request(f"{name}conversation-17", tokens=PROMPT[5:15], salt=f"{name}tenant"), 6, end=False)
    other = serve(mem, ms.Request(f"{name}b", tokens=PROMPT[20:30]), 5, end=False)
    return mem, [*mem.publish([other]), row]  # type: ignore[list-item]  # a row lives as long as its handle


def serve(mem: ms.StateManager, request: ms.Request, more: int = 0, end: bool = True) -> ms.Row:
    """Computes a prompt in chunks that end at boundaries, decodes `more` tokens, and ends the request if `end`."""
    (row,) = mem.admit([request])
    tokens = list(request.tokens)  # type: ignore[arg-type]
    mem.extend([row], [len(tokens) + more])
    while (done := mem.info(row).length) < len(tokens):
        mem.settle(mem.plan([row], min(mem.info(row).next_boundary, len(tokens)) - done))
    for _ in range(more):
        mem.settle(mem.plan([row], 1))
    if end:
        mem.end([row], keep="cache", tokens=[tokens + [7] * more])
    return row


@contextmanager
def faulty(mem: ms.StateManager) -> Iterator[None]:
    """Adds slots by id and faults during the block: a leaked slot, one with two owners, one with an unknown owner."""
    lost, taken = mem.pool.claim(1), mem.pool.claim(1)
    with mem.pool.allocator.group(2):
        slots = inside.registers(mem).table.slots
        slots[-1] = slots[3]  # a second owner for the live slot of row 1
        slots[-2] = taken[0]  # for the host, this register is empty
        yield
        slots[-2:] = 0
    mem.pool.release(torch.cat([lost, taken]))

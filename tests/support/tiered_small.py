"""Makes small managers with tiers and runs requests without bytes, for tests of texts, counts and refusals.

Jobs of threads run at once. Scripts (tests/proof/stateful/script.py) test which bytes are moved.
"""

from collections.abc import Sequence
from typing import Any

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import Fetch, Prefetch, Tiers
from tests.support.build import on
from tests.support.planes import LAYOUT
from tests.support.virtual import AtOnce

PAGE, PAGES = 4, 60
KV = StateLayout((Plane("k", (PAGE,), torch.int64), Plane("v", (PAGE, 3), torch.int16)), layers=2)
T = [7 * i % 100 for i in range(64)]
CPU = Backend("reference")
MOVED = ("states_out", "states_in", "pages_out", "pages_in")


def whole(n: int, pages: int = 2) -> list[int]:
    """Returns prompt number `n`, of whole pages. No two prompts share a prefix. A state is kept at its end."""
    return [100 * n + i for i in range(PAGE * pages)]


def tiered(backend: Backend = CPU, tiers: dict[str, Any] | None = None, **settings: Any) -> ms.StateManager:
    """Returns a manager. tiers: settings that replace the usual ones."""
    below: dict[str, Any] = {
        "model": "toy", "host_slots": 8, "host_pages": 40, "kv": Planes(KV, PAGES, backend), "reserve": 0.0,
        "executor": AtOnce(), "prefetch": Prefetch(threshold=PAGE, limit=None, stop="wait_complete"),
    }  # fmt: skip
    usual = {"slots": 16, "max_requests": 4, "pages": PAGES, "page_size": PAGE, "pages_per_row": 40, "whole": True,
             "prefix": ms.Prefix(Lru(), LruPages()), "tracking": ms.Redirect(64)}  # fmt: skip
    return on(backend, LAYOUT, tiers=Tiers(**below | (tiers or {})), **usual | settings)


def run(mem: ms.StateManager, prompts: Sequence[Sequence[int]], keep: bool = True, **more: Any) -> list[int]:
    """Runs requests of one length together, and leaves them in the cache. Returns the lengths that they start from."""
    rows = mem.admit([ms.Request(n, tokens=tokens, **more) for n, tokens in enumerate(prompts)])
    starts = [mem.info(row).length for row in rows]
    while going := [row for row, tokens in zip(rows, prompts, strict=True) if mem.info(row).length < len(tokens)]:
        before = [mem.info(row).length for row in going]
        ends = [min(mem.info(row).next_boundary, len(prompts[0])) for row in going]
        mem.extend(going, ends)
        mem.settle(mem.plan(going, [end - at for end, at in zip(ends, before, strict=True)]))
    mem.end(rows, **({"keep": "cache", "tokens": prompts} if keep else {}))
    return starts


def turn(mem: ms.StateManager, tokens: Sequence[int], **more: Any) -> int:
    """Runs a request as `run` does. Returns the length that it starts from."""
    (start,) = run(mem, [tokens], **more)
    return start


def push_down(mem: ms.StateManager, *prompts: Sequence[int], together: bool = False) -> None:
    """Runs requests, saves what they leave, and evicts all from the device."""
    for each in [prompts] if together else [[tokens] for tokens in prompts]:
        run(mem, each)
        mem.poll()
    mem.submit()
    mem.poll()
    mem.prefix.evict_states(99)
    mem.prefix.evict_pages(99)
    mem.submit()
    mem.tiers.settle()
    mem.poll()
    mem.poll()


def fetch(mem: ms.StateManager, tokens: Sequence[int], salt: Any = None) -> Fetch:
    """Prefetches a prompt, polls until the prefetch is done, and returns it."""
    one = mem.prefetch(tokens, salt)
    while not one.done:
        mem.poll()
    return one

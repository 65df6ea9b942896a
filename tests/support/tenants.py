"""Runs tenants that send the same tokens under different salts. The bytes of states and KV pages name the tenant.

A state is (tenant, number of tokens), and a token's KV is (tenant, place of the token). Each step checks what it reads,
so a test only has to check the length that a request starts from.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from memstate.state.planes import Planes
from memstate.tiers import Fetch, Prefetch, Tiers
from tests.support import owners
from tests.support.build import build

PAGE, EVERY, PAGES = 4, 8, 60
STATE = ms.StateLayout((ms.Plane("state", (2,), torch.int64),), layers=1)
KV = ms.StateLayout((ms.Plane("kv", (PAGE, 2), torch.int64),), layers=1)
T = [7 * i % 100 for i in range(64)]  # the prompt of all tenants
NOTHING = (0, 0, 0, 0)  # what `House.matched` returns without a match

two_tenants = pytest.mark.parametrize(("mine", "other"), [("a", "b"), ("a", None), (None, "a"), ("", None), (1, "1")])


class AtOnce(Executor):
    """An executor that runs each job at once, within `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class House:
    """A manager and its tenants. tiers: settings of the tiers; None for no tiers."""

    def __init__(self, *, tiers: dict[str, object] | None = None, slots: int = 12, **settings: object) -> None:
        backend = Backend("reference")
        self.pages = Planes(KV, PAGES, backend)
        self.kv = self.pages["kv"][0]
        if tiers is not None:
            usual: dict[str, Any] = {"model": "toy", "host_slots": 8, "host_pages": 40, "reserve": 0.0}
            usual |= {"kv": self.pages, "executor": AtOnce(), "prefetch": Prefetch(threshold=PAGE)}
            settings["tiers"] = Tiers(**usual | tiers)
        usual = {"prefix": ms.Prefix(Lru(), LruPages()), "tracking": ms.Redirect(EVERY), "max_requests": 4}
        usual |= {"pages": PAGES, "page_size": PAGE, "pages_per_row": 12, "whole": True}
        self.mem = build(STATE, slots=slots, backend="reference", **(usual | settings))  # type: ignore[arg-type]
        self.tenants: dict[ms.Row, Hashable] = {}
        self._numbers: dict[tuple[type, Hashable], int] = {}

    def number(self, salt: Hashable) -> int:
        """Returns the number that names a tenant in states and KV."""
        return self._numbers.setdefault((type(salt), salt), 1000 * (len(self._numbers) + 1))

    def start(self, tokens: Sequence[int], salt: Hashable, **more: Any) -> ms.Row:
        """Admits a request, and returns its row. tokens: the prompt; None if memstate does not know it."""
        (row,) = self.mem.admit([ms.Request("turn", tokens=tokens, salt=salt, **more)])
        self.tenants[row] = salt
        return row

    def step(self, row: ms.Row, end: int) -> ms.Step:
        """Plans and runs a step up to `end` or the next boundary. Checks that it reads only the tenant's own data."""
        before, number = self.mem.info(row).length, self.number(self.tenants[row])
        end = min(end, self.mem.info(row).next_boundary)
        self.mem.extend([row], [end])
        step = self.mem.plan([row], end - before)
        state, pages = self.mem.planes["state"][0], self.mem.device.page_table[row.index].tolist()
        read, write, snapshot = (int(column[0]) for column in (step.read, step.write, step.snapshot))
        assert not before or state[read].tolist() == [number, before], "a state of somebody else, or of other tokens"
        for at in range(before):
            assert self.kv[pages[at // PAGE], at % PAGE].tolist() == [number, at], "KV of somebody else"
        for at in range(before, end):
            self.kv[pages[at // PAGE], at % PAGE] = torch.tensor([number, at])
        for slot in (write, snapshot):
            if slot:
                state[slot] = torch.tensor([number, end])
        return step

    def run(self, row: ms.Row, end: int) -> None:
        """Runs and settles steps until the row has `end` tokens."""
        while self.mem.info(row).length < end:
            self.mem.settle(self.step(row, end))

    def turn(self, end: int, salt: Hashable, tokens: Sequence[int] = T, **more: Any) -> int:
        """Runs a request from admission to end, and leaves it in the cache. Returns the length that it started from."""
        row = self.start(tokens[:end], salt, **more)
        start = self.mem.info(row).length
        self.run(row, end)
        self.mem.end([row], keep="cache", tokens=[tokens[:end]])
        return start

    def starts(self, end: int, salt: Hashable, tokens: Sequence[int] = T, **more: Any) -> int:
        """Returns the length that a prompt of `end` tokens starts from. Computes one token, and caches nothing."""
        row = self.start(tokens[:end], salt, **more)
        start = self.mem.info(row).length
        self.run(row, start + 1)
        self.mem.end([row])
        return start

    def matched(self, end: int, salt: Hashable, tokens: Sequence[int] = T, **more: Any) -> tuple[int, int, int, int]:
        """Returns the lengths of a match: of a cached state, cached KV, an evicted state, a state in host memory."""
        match = self.mem.match(tokens[:end], salt, **more)
        return match.length, match.kv_length, match.evicted_length, match.host_length

    def go_down(self) -> None:
        """Evicts the whole prefix cache to the tiers, and overwrites the pages on the device."""
        cache = self.mem.prefix
        assert cache is not None and self.mem.tiers is not None
        self.mem.submit()
        cache.evict_states(99)
        cache.evict_pages(99)
        self.mem.submit()
        self.mem.tiers.settle()
        self.mem.poll()
        self.kv[[page for page, users in enumerate(owners.kv_pages(self.mem).holders) if not users]] = -1

    def fetch(self, end: int, salt: Hashable) -> Fetch:
        """Prefetches a prompt, polls until the prefetch is done, and returns it."""
        fetch = self.mem.prefetch(T[:end], salt)
        for _ in range(100):
            if not fetch.done:
                self.mem.poll()
        assert fetch.done
        return fetch

    def idle(self) -> None:
        """Checks that no row runs, no state is pinned and no slot leaks."""
        self.mem.audit().raise_if_leaking()
        assert not self.mem.rows and not owners.pinned(self.mem)

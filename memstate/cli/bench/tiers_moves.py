"""Launches, uploads, waits and bytes of states that go down to host memory and come up again; exact everywhere.

States move as a manager moves them: given up by the device, and found again below it by requests with the same tokens.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from memstate.cli.bench.launches import UNITS
from memstate.cli.bench.task import Figure, Setting, Task
from memstate.engine.manager import StateManager
from memstate.engine.settings import Pages
from memstate.prefix import Prefix
from memstate.prefix.policies import Lru
from memstate.requests.handles import Request, Row
from memstate.requests.tracking import Redirect
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import Tiers

SIZES = (1, 8)  # states moved at a time
PAGE, PAGES = 4, 4  # tokens of a page, pages of a prompt
STATE = StateLayout((Plane("conv", (16, 3), torch.bfloat16), Plane("ssm", (2, 4, 8), torch.float32)), 4)
KV = StateLayout((Plane("k", (PAGE, 8), torch.bfloat16), Plane("v", (PAGE, 8), torch.bfloat16)), 2)


class _Moves:
    """One manager that has computed R prompts of four pages each, with a state at the end of each."""

    def __init__(self, setting: Setting, size: int) -> None:
        self.setting, self.size = setting, size
        backend, pages = setting.make_backend(), 2 * size * (PAGES + 1)
        tiers = Tiers("bench", host_slots=2 * size, host_pages=pages, kv=Planes(KV, pages, backend), write="back")
        self.mem = StateManager(
            STATE, slots=4 * size, max_requests=size, tracking=Redirect(every=PAGE * PAGES),
            pages=Pages(count=pages, size=PAGE, per_row=PAGES + 1), prefix=Prefix(Lru()), backend=setting.backend,
            device=setting.device, tiers=tiers,
        )  # fmt: skip
        self.prompts = [[PAGE * PAGES * n + at for at in range(PAGE * PAGES + 1)] for n in range(1, size + 1)]
        self.requests = [Request(n, tokens=prompt) for n, prompt in enumerate(self.prompts)]
        self.backends = (self.mem.backend, backend)
        assert self.mem.tiers is not None and self.mem.prefix is not None
        self.tiers, self.cache = self.mem.tiers, self.mem.prefix

    def round(self) -> list[Figure]:
        """Down and up again, with nothing left on the device in between."""
        mem = self.mem
        rows = mem.admit(self.requests)
        for tokens in (PAGE * PAGES, 1):
            mem.settle(mem.plan(rows, tokens))
        mem.release(rows, tokens=self.prompts)
        entries = self._counted("evict", lambda: self.cache.evict_states(self.size))
        self.tiers.settle()
        self.cache.clear()
        again: list[Row] = []
        entries += self._counted("bring", lambda: again.extend(mem.admit(self.requests)))
        self.tiers.settle()
        mem.release(again)
        return entries

    def check(self) -> str:
        """All states must come up again, and nothing be left behind."""
        self.round()
        self.cache.clear()
        stats, report, tiers = self.mem.stats(), self.mem.audit(), self.tiers.stats()
        if tiers.states_in != self.size or not report.clean or stats.free != stats.capacity or tiers.leaked_records:
            return f"{stats.free} of {stats.capacity} slots free; {tiers}; {report}"
        return ""

    def measure(self) -> list[Figure]:
        self.tiers.clear()
        return self.round()

    def _counted(self, op: str, act: Callable[[], object]) -> list[Figure]:
        """What a call and the submit behind it ask of the device."""
        self.mem.submit()
        before = self._counts()
        act()
        self.mem.submit()
        figure = partial(Figure, op, self.setting.case(f"R={self.size}"))
        return [figure(now - was, unit) for unit, was, now in zip(UNITS, before, self._counts(), strict=True)]

    def _counts(self) -> tuple[int, ...]:
        counts, stats = [backend.counts for backend in self.backends], self.tiers.stats()
        states, pages = stats.states_out + stats.states_in, stats.pages_out + stats.pages_in
        return (
            sum(each.total_launches for each in counts), sum(each.uploads for each in counts),
            sum(each.syncs for each in counts), states * STATE.bytes_per_slot + pages * KV.bytes_per_slot,
        )  # fmt: skip


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields one state, and eight, down and up."""
    for size in SIZES:
        moves = _Moves(setting, size)
        yield Task(f"evict and bring, R={size}", moves.check, moves.measure)

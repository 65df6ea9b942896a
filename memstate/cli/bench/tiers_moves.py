"""Launches, uploads, waits, copies and bytes of states that go down to host memory and come up again; exact everywhere.

States move as a manager moves them: given up by the device, and found again below it by requests with the same tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memstate.cli.bench.clock import Clock
from memstate.cli.bench.task import Figure, Setting, Task, differing
from memstate.engine.manager import StateManager
from memstate.engine.settings import Pages
from memstate.kernels.dispatch import OPS
from memstate.prefix import Prefix
from memstate.prefix.policies import Lru
from memstate.requests.handles import Request
from memstate.requests.tracking import Redirect
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.tiers import Tiers

SIZES = (1, 8)  # states moved at a time
PAGE, PAGES = 4, 4  # tokens of a page, pages of a prompt
STATE = StateLayout((Plane("conv", (16, 3), torch.bfloat16), Plane("ssm", (2, 4, 8), torch.float32)), 4)
KV = StateLayout((Plane("k", (PAGE, 8), torch.bfloat16), Plane("v", (PAGE, 8), torch.bfloat16)), 2)


class _Copies(TorchDispatchMode):
    """Counts copies between tensors, but for those by which an operation of a backend does its work."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen, self.inside = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += not self.inside and func.overloadpacket is torch.ops.aten.copy_
        return func(*args, **(kwargs or {}))

    def outside(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The operation, whose own copies do not count."""

        def run(*given: Any) -> Any:
            self.inside += 1
            try:
                return operation(*given)
            finally:
                self.inside -= 1

        return run


class _Moves:
    """One manager that has computed R prompts of four pages each, with a state at the end of each."""

    def __init__(self, setting: Setting, size: int) -> None:
        self.setting, self.size = setting, size
        backend = setting.make_backend()
        pages = 2 * size * (PAGES + 1)
        self.kv = Planes(KV, pages, backend)
        tiers = Tiers("bench", host_slots=2 * size, host_pages=pages, kv=self.kv, write="back")
        self.mem = StateManager(
            STATE, slots=4 * size, max_requests=size, tracking=Redirect(every=PAGE * PAGES),
            pages=Pages(count=pages, size=PAGE, per_row=PAGES + 1), prefix=Prefix(Lru()), backend=setting.backend,
            device=setting.device, tiers=tiers,
        )  # fmt: skip
        self.prompts = [[PAGE * PAGES * n + at for at in range(PAGE * PAGES + 1)] for n in range(1, size + 1)]
        self.copies = _Copies()
        self.backends = (self.mem.backend, backend)
        for each in self.backends:
            for op in OPS:
                setattr(each, op, self.copies.outside(getattr(each, op)))
        assert self.mem.tiers is not None and self.mem.prefix is not None
        self.tiers, self.cache = self.mem.tiers, self.mem.prefix

    def compute(self) -> None:
        """Every prompt up to its last token, and lets them go."""
        mem = self.mem
        rows = mem.admit([Request(n, tokens=prompt) for n, prompt in enumerate(self.prompts)])
        for tokens in (PAGE * PAGES, 1):
            mem.settle(mem.plan(rows, tokens))
        mem.release(rows, tokens=self.prompts)
        mem.submit()

    def held(self) -> list[Tensor]:
        """Bytes of the states and KV pages that the cache has for the prompts, in their order, plane by plane."""
        found = [self.mem.match(prompt).found for prompt in self.prompts]
        nodes = [each.stated for each in found if each is not None and each.stated is not None]
        snapshots = [node.snapshot for node in nodes if node.snapshot]
        slots = torch.from_numpy(self.mem.read_slots(snapshots).wait()).long().to(self.mem.planes.device)
        pages = torch.tensor([page for node in nodes for page in self.cache.tree.pages_to(node)], device=slots.device)
        planes = [(plane, slots) for plane in self.mem.planes.values()]
        planes += [(plane, pages) for plane in self.kv.values()]
        return [plane[:, ids].contiguous().view(torch.uint8) for plane, ids in planes]

    def evict(self) -> None:
        """The device gives up every state."""
        self.cache.evict_states(self.size)

    def bring(self) -> None:
        """Requests are admitted that start from states in host memory."""
        self.rows = self.mem.admit([Request(n, tokens=prompt) for n, prompt in enumerate(self.prompts)])

    def round(self) -> list[Figure]:
        """Down and up again, with nothing left on the device in between."""
        self.compute()
        for planes in (self.mem.planes, self.kv):
            for arena in planes.arenas:
                arena.random_(0, 256)
            planes.scrub_null()
        before = self.held()
        entries = self._counted("evict", self.evict)
        self.tiers.settle()
        self.cache.clear()
        for planes in (self.mem.planes, self.kv):
            for arena in planes.arenas:
                arena.bitwise_not_()
            planes.scrub_null()
        entries += self._counted("bring", self.bring)
        self.tiers.settle()
        self.lost = differing((f"plane {n}", *pair) for n, pair in enumerate(zip(before, self.held(), strict=True)))
        self.mem.release(self.rows)
        return entries

    def check(self) -> str:
        """All bytes must be there again, and nothing left behind."""
        self.round()
        self.cache.clear()
        stats, report = self.mem.stats(), self.mem.audit()
        leaked = self.tiers.stats().leaked_records
        if self.lost or not report.clean or stats.free != stats.capacity or leaked:
            return f"lost: {self.lost}; {stats.free} of {stats.capacity} slots free, {leaked} records leaked; {report}"
        return ""

    def measure(self, clock: Clock) -> list[Figure]:
        self.tiers.clear()
        return self.round()

    def _counted(self, op: str, act: Callable[[], None]) -> list[Figure]:
        """What a call and the submit behind it ask of the device."""
        self.mem.submit()
        before = self._counts()
        with self.copies:
            act()
            self.mem.submit()
        return [
            Figure(op, self.setting.case(f"R={self.size}"), now - was, unit)
            for (unit, was), now in zip(before.items(), self._counts().values(), strict=True)
        ]

    def _counts(self) -> dict[str, int]:
        """copies: between device and host, uploads apart. bytes: that they move."""
        counts, stats = [backend.counts for backend in self.backends], self.tiers.stats()
        uploads = sum(each.uploads for each in counts)
        states, pages = stats.states_out + stats.states_in, stats.pages_out + stats.pages_in
        return {
            "launches": sum(each.total_launches for each in counts),
            "uploads": uploads,
            "syncs": sum(each.syncs for each in counts),
            "copies": self.copies.seen - uploads,
            "bytes": states * STATE.bytes_per_slot + pages * KV.bytes_per_slot,
        }


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields one state, and eight, down and up."""
    for size in SIZES:
        moves = _Moves(setting, size)
        yield Task(f"evict and bring, R={size}", moves.check, moves.measure)

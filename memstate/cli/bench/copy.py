"""Bytes of slots: copies, zeros, gathers and scatters of a real model's states, beside the device's own copy.

Every operation has its bytes compared with the reference first. Entries of a call are as many as a large batch has, and
only some of them are due, as at a boundary.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from memstate.cli.bench.clock import Act, Clock, Time
from memstate.cli.bench.entry import Figure
from memstate.cli.bench.task import Setting, Task, differing
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import qwen3_next

MODEL = "qwen3_next"
PLANE = "ssm"  # the one that is gathered and scattered
DUE, TOY_DUE = (1, 16, 64), (1, 2)
BATCH = 256  # entries of a copy
TOY = StateLayout((Plane("conv", (48, 3), torch.bfloat16), Plane(PLANE, (2, 16, 8), torch.float32)), 2)
OVERHEAD = 9  # slots needed for each one due: two storages, the yardstick, batches and what torch allocates


class _Copies:
    """Two storages with the same bytes: one for what is timed, a twin for reference and peers."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.layout = TOY if setting.toy else qwen3_next()
        free = 2**30 if setting.toy else torch.cuda.mem_get_info(setting.device)[0]
        self.due = fitting(TOY_DUE if setting.toy else DUE, self.layout.bytes_per_slot, free)
        most = max(self.due)
        self.storage = Planes(self.layout, 2 * most, setting.make_backend())
        self.twin = Planes(self.layout, 2 * most, setting.reference())
        size = (2, most * self.layout.bytes_per_slot)
        self.plain = torch.empty(size, dtype=torch.uint8, device=self.storage.device).random_(0, 256)
        self._yardsticks: dict[tuple[str, str, int], float] = {}
        self.refill()

    def refill(self) -> None:
        """Fresh random bytes: those that are all the same may move faster."""
        for mine, other in zip(self.storage.arenas, self.twin.arenas, strict=True):
            mine.random_(0, 256)
            other.copy_(mine)
        self.storage.scrub_null()
        self.twin.scrub_null()

    def wrong(self) -> str:
        names = (f"arena {number}" for number in range(len(self.storage.arenas)))
        return differing(zip(names, self.storage.arenas, self.twin.arenas, strict=True))

    def spread(self, due: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Destinations and sources, evenly among the entries of a batch; and those that are due alone, int64."""
        shuffled = torch.randperm(2 * max(self.due))[: 2 * due].view(2, due) + 1
        columns = torch.zeros(2, BATCH, dtype=torch.int32)
        columns[:, :: BATCH // due][:, :due] = shuffled.int()
        dst, src = columns.to(self.storage.device)
        return dst, src, *shuffled.to(self.storage.device)

    def yardstick(self, time: Time, nbytes: int, kind: str = "copy") -> float:
        """Seconds of torch's copy_ of `nbytes` in one piece, or of its zero_."""
        key = (time.__name__, kind, nbytes)
        if key not in self._yardsticks:
            to, of = self.plain[:, :nbytes]
            self._yardsticks[key] = time(to.zero_ if kind == "zero" else partial(to.copy_, of))
        return self._yardsticks[key]

    def task(
        self, op: str, due: int, nbytes: int, act: Act, peer: Act, check: Callable[[], str], kind: str = "copy",
    ) -> Task:  # fmt: skip
        """nbytes: of the slots that are due, once."""
        case = f"{due} slots of {MODEL}" if not self.setting.toy else f"{due} slots"
        moved = (1 if kind == "zero" else 2) * nbytes

        def yard(time: Time) -> float:
            return self.yardstick(time, nbytes, kind)

        def measure(clock: Clock) -> list[Figure]:
            entries = [Figure(op, self.setting.case(case), moved, "bytes")]
            ways: list[tuple[str, Time]] = [(case, clock.alone)]
            if due == 1:  # one slot may take less time than its launch
                ways.append((f"{case}, in a graph", clock.in_graph))
            for name, time in ways:
                seconds = time(act)
                entries += self._beside(op, name, seconds, moved, partial(time, peer), partial(yard, time))
            return entries

        return Task(f"{op}, {case}", check, measure)

    def _beside(
        self, op: str, case: str, seconds: float, moved: int, peer: Callable[[], float], yard: Callable[[], float]
    ) -> list[Figure]:
        """Time beside torch's indexing, and bytes a second beside the plain copy; both peers give seconds."""
        entry = self.setting.entry
        return [
            entry(op, case, seconds * 1e6, "us", "torch-indexing", lambda: peer() * 1e6),
            entry(op, case, moved / seconds, "bytes/s", "device-copy", lambda: moved / yard()),
        ]

    def copy(self, due: int) -> Task:
        dst, src, to, of = self.spread(due)

        def peer() -> None:
            for plane in self.twin.values():
                plane[:, to] = plane[:, of]

        def check() -> str:
            self.refill()
            self.storage.copy(dst, src, due=due)
            self.twin.copy(dst, src, due=due)
            found = self.wrong()
            self.twin.zero(dst)
            peer()
            return found or (self.wrong() and "torch-indexing does something else")

        act = partial(self.storage.copy, dst, src, due=due)
        return self.task("copy", due, due * self.layout.bytes_per_slot, act, peer, check)

    def gather(self, due: int) -> Task:
        _, _, ids, _ = self.spread(due)
        plane = self.twin[PLANE]
        outs = [torch.empty_like(plane[:, :due]) for _ in range(2)]
        narrow = ids.int()

        def peer() -> None:
            torch.index_select(plane, 1, ids, out=outs[1])

        def check() -> str:
            self.refill()
            outs[0].fill_(torch.nan)
            self.storage.gather(PLANE, narrow, out=outs[0])
            expected = self.twin.gather(PLANE, narrow)
            found = differing([("the batch", outs[0].view(torch.int32), expected.view(torch.int32))])
            peer()
            same = torch.equal(outs[1].view(torch.int32), expected.view(torch.int32))
            return found or ("" if same else "torch-indexing does something else")

        act = partial(self.storage.gather, PLANE, narrow, outs[0])
        return self.task("gather", due, outs[0].nbytes, act, peer, check)

    def scatter(self, due: int) -> Task:
        _, _, ids, _ = self.spread(due)
        plane = self.twin[PLANE]
        batch = torch.randn_like(plane[:, :due])
        narrow = ids.int()

        def peer() -> None:
            plane.index_copy_(1, ids, batch)

        def check() -> str:
            self.refill()
            self.storage.scatter(PLANE, narrow, batch)
            self.twin.scatter(PLANE, narrow, batch)
            found = self.wrong()
            plane.index_fill_(1, ids, 0)
            peer()
            return found or (self.wrong() and "torch-indexing does something else")

        act = partial(self.storage.scatter, PLANE, narrow, batch)
        return self.task("scatter", due, batch.nbytes, act, peer, check)

    def zero(self, due: int) -> Task:
        dst, _, ids, _ = self.spread(due)

        def peer() -> None:
            for plane in self.twin.values():
                plane.index_fill_(1, ids, 0)

        def check() -> str:
            self.refill()
            self.storage.zero(dst, due=due)
            self.twin.zero(dst, due=due)
            found = self.wrong()
            for plane in self.twin.values():
                plane[:, ids] = 1
            peer()
            return found or (self.wrong() and "torch-indexing does something else")

        act = partial(self.storage.zero, dst, due=due)
        return self.task("zero", due, due * self.layout.bytes_per_slot, act, peer, check, "zero")

    def idle(self) -> Task:
        """A call with nothing due, which is what almost every step of a decode loop makes."""
        ids = torch.zeros(BATCH, dtype=torch.int32, device=self.storage.device)
        act = partial(self.storage.copy, ids, ids, due=0)

        def check() -> str:
            act()
            return self.wrong()

        def measure(clock: Clock) -> list[Figure]:
            cases = (("nothing due", clock.alone(act)), ("nothing due, in a graph", clock.in_graph(act)))
            return [Figure("copy", self.setting.case(name), seconds * 1e6, "us") for name, seconds in cases]

        return Task("copy, nothing due", check, measure)


def fitting(due: tuple[int, ...], slot_bytes: int, free_bytes: int) -> tuple[int, ...]:
    """The numbers of due slots that fit three quarters of the memory; the smallest one in any case."""
    return tuple(n for n in due if OVERHEAD * n * slot_bytes <= 0.75 * free_bytes) or due[:1]


def tasks(setting: Setting) -> Iterator[Task]:
    """Copies, gathers, scatters and zeros of 1, 16 and 64 slots, and a copy with nothing due."""
    bench = _Copies(setting)
    yield bench.idle()
    for make in (bench.copy, bench.gather, bench.scatter, bench.zero):  # zeros last: they leave zeros behind
        for due in bench.due:
            yield make(due)

"""Bytes of slots: copies, zeros, gathers and scatters of a real model's states, beside the device's own copy.

Every operation has its bytes compared with the reference first. Entries of a call are as many as a large batch has, and
only some of them are due, as at a boundary.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from memstate.cli.bench.clock import Act, Clock, Time
from memstate.cli.bench.task import Figure, Setting, Task, differing
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

    def task(self, op: str, due: int, nbytes: int, act: Act, peer: Act, check: Callable[[], str]) -> Task:
        """Puts a task together; nbytes: of the slots that are due, once."""
        kind = "zero" if op == "zero" else "copy"
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

    def _moving(self, op: str, due: int, act: Callable[[Planes], object], peer: Act, scramble: Act) -> Task:
        """A task whose operation changes planes: `act` on either storage, and the same by `peer` on the twin.

        Args:
            op: Name of the operation.
            due: Slots that are due.
            act: The operation, on the planes that it is given.
            peer: The same by torch's indexing, on the twin.
            scramble: Changes what the twin holds where the peer writes.
        """

        def check() -> str:
            self.refill()
            act(self.storage)
            act(self.twin)
            found = self.wrong()
            scramble()
            peer()
            return found or (self.wrong() and "torch-indexing does something else")

        bytes_each = self.layout.bytes_per_slot if op in ("copy", "zero") else self.twin[PLANE][:, 0].nbytes
        return self.task(op, due, due * bytes_each, partial(act, self.storage), peer, check)

    def copy(self, due: int) -> Task:
        dst, src, to, of = self.spread(due)

        def peer() -> None:
            for plane in self.twin.values():
                plane[:, to] = plane[:, of]

        return self._moving(
            "copy", due, lambda planes: planes.copy(dst, src, due=due), peer, lambda: self.twin.zero(dst)
        )

    def scatter(self, due: int) -> Task:
        _, _, ids, _ = self.spread(due)
        plane, narrow = self.twin[PLANE], ids.int()
        batch = torch.randn_like(plane[:, :due])
        return self._moving(
            "scatter", due, lambda planes: planes.scatter(PLANE, narrow, batch),
            lambda: plane.index_copy_(1, ids, batch), lambda: plane.index_fill_(1, ids, 0),
        )  # fmt: skip

    def zero(self, due: int) -> Task:
        dst, _, ids, _ = self.spread(due)

        def fill(value: int) -> None:
            for plane in self.twin.values():
                plane.index_fill_(1, ids, value)

        return self._moving("zero", due, lambda planes: planes.zero(dst, due=due), partial(fill, 0), partial(fill, 1))

    def gather(self, due: int) -> Task:
        _, _, ids, _ = self.spread(due)
        plane, narrow = self.twin[PLANE], ids.int()
        outs = [torch.empty_like(plane[:, :due]) for _ in range(2)]

        def peer() -> None:
            torch.index_select(plane, 1, ids, out=outs[1])

        def check() -> str:
            self.refill()
            outs[0].fill_(torch.nan)
            self.storage.gather(PLANE, narrow, out=outs[0])
            expected = self.twin.gather(PLANE, narrow).view(torch.int32)
            peer()
            ours, theirs = (out.view(torch.int32) for out in outs)
            found = differing([("the batch", ours, expected)])
            return found or (differing([("it", theirs, expected)]) and "torch-indexing does something else")

        act = partial(self.storage.gather, PLANE, narrow, outs[0])
        return self.task("gather", due, outs[0].nbytes, act, peer, check)

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
    """Returns the numbers of due slots that fit three quarters of the memory; the smallest one in any case."""
    return tuple(n for n in due if OVERHEAD * n * slot_bytes <= 0.75 * free_bytes) or due[:1]


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields copies, gathers, scatters and zeros of 1, 16 and 64 slots, and a copy with nothing due."""
    bench = _Copies(setting)
    yield bench.idle()
    for make in (bench.copy, bench.gather, bench.scatter, bench.zero):  # zeros last: they leave zeros behind
        for due in bench.due:
            yield make(due)

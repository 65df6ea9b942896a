"""Copies, gathers, scatters and zeros of a model's states, beside torch's indexing and a plain copy: device time.

A check compares memstate with the reference, and torch's indexing with the reference, each on fresh random bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.cli.bench.clock import Act, Times
from memstate.cli.bench.task import Figure, Setting, Task, differing
from memstate.cli.due import BATCH, fitting, spread
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import qwen3_next

MODEL = "qwen3_next"
PLANE = "ssm"  # the one that is gathered and scattered
DUE, TOY_DUE = (1, 16, 64), (1, 2)
TOY = StateLayout((Plane("conv", (48, 3), torch.bfloat16), Plane(PLANE, (2, 16, 8), torch.float32)), 2)
SHORT = (("in_graph", ", in a graph"),)  # how else a call is timed that may take less time than its launch
OVERHEAD = 9  # slots needed for each one due: two storages, the yardstick, batches and what torch allocates

Operation = Callable[[Planes, Tensor], object]  # changes planes, or fills a batch


class Way(NamedTuple):
    """One operation on slots.

    Attributes:
        ours: By memstate, on planes and a batch.
        peer: The same by torch's indexing.
        nbytes: Bytes of the slots that are due, once.
    """

    ours: Operation
    peer: Operation
    nbytes: int


class _Copies:
    """Two storages, each with a batch to gather into: one for what is timed, and a twin for the reference."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.layout = TOY if setting.toy else qwen3_next()
        free = 2**30 if setting.toy else torch.cuda.mem_get_info(setting.device)[0]
        self.due = fitting(TOY_DUE if setting.toy else DUE, OVERHEAD * self.layout.bytes_per_slot, free)
        most = max(self.due)
        self.storage = Planes(self.layout, 2 * most, setting.make_backend())
        self.twin = Planes(self.layout, 2 * most, setting.reference())
        size = (2, most * self.layout.bytes_per_slot)
        self.plain = torch.empty(size, dtype=torch.uint8, device=self.storage.device).random_(0, 256)
        self.yardstick = cache(self._yardstick)

    def _yardstick(self, timer: str, nbytes: int, op: str) -> float:
        """Seconds of torch's copy_ of `nbytes` in one piece, or of its zero_."""
        to, of = self.plain[:, :nbytes]
        return self.time(timer, to.zero_ if op == "zero" else partial(to.copy_, of)).device

    def time(self, timer: str, act: Act) -> Times:
        """Returns the seconds of a call; in a graph, those of the device alone."""
        clock = self.setting.clock
        return clock.alone(act) if timer == "alone" else Times(clock.in_graph(act), 0.0)

    def timed(self, op: str, case: str, times: Times) -> list[Figure]:
        """Returns a device time, and the host's part if a call was launched alone."""
        return self.setting.both(op, case, times) if times.host else [self.setting.micros(op, case, times.device)]

    def wrong(self, act: Operation, right: Operation, outs: Sequence[Tensor]) -> str:
        """Names what an operation makes of fresh random bytes that the reference does not."""
        for mine, other in zip(self.storage.arenas, self.twin.arenas, strict=True):
            other.copy_(mine.random_(0, 256))  # bytes that are all the same may move faster
        for planes, operation, out in ((self.storage, act, outs[0]), (self.twin, right, outs[1])):
            planes.scrub_null()
            operation(planes, out.zero_())
        pairs = [*zip(self.storage.arenas, self.twin.arenas, strict=True), tuple(out.view(torch.int32) for out in outs)]
        return differing((f"tensor {number}", mine, other) for number, (mine, other) in enumerate(pairs))

    def ways(self, due: int) -> dict[str, Way]:
        """Returns every operation with so many slots due; zeros last, because they leave zeros behind."""
        dst, src = spread(due, max(self.due), self.storage.device)
        to, of = (column[column > 0].long() for column in (dst, src))
        ids, slots = to.int(), due * self.layout.bytes_per_slot
        batch = torch.randn_like(self.twin[PLANE][:, :due])

        def indexed(planes: Planes, out: Tensor) -> None:
            for plane in planes.values():
                plane[:, to] = plane[:, of]

        def zeroed(planes: Planes, out: Tensor) -> None:
            for plane in planes.values():
                plane.index_fill_(1, to, 0)

        return {
            "copy": Way(lambda planes, out: planes.copy(dst, src, due=due), indexed, slots),
            "gather": Way(
                lambda planes, out: planes.gather(PLANE, ids, out=out),
                lambda planes, out: torch.index_select(planes[PLANE], 1, to, out=out), batch.nbytes,
            ),
            "scatter": Way(
                lambda planes, out: planes.scatter(PLANE, ids, batch),
                lambda planes, out: planes[PLANE].index_copy_(1, to, batch), batch.nbytes,
            ),
            "zero": Way(lambda planes, out: planes.zero(dst, due=due), zeroed, slots),
        }  # fmt: skip

    def task(self, op: str, due: int, way: Way) -> Task:
        setting, outs = self.setting, [torch.empty_like(self.twin[PLANE][:, :due]) for _ in range(2)]
        case = f"{due} slots" if setting.toy else f"{due} slots of {MODEL}"
        ours, peer = (partial(act, self.storage, outs[0]) for act in (way.ours, way.peer))
        moved = way.nbytes if op == "zero" else 2 * way.nbytes  # read and written

        def check() -> str:
            found = self.wrong(way.ours, way.ours, outs)
            return found or (self.wrong(way.peer, way.ours, outs) and "torch-indexing does something else")

        def measure() -> list[Figure]:
            entries = []
            for timer, suffix in (("alone", ""), *SHORT * (due == 1)):
                times, plain = self.time(timer, ours), partial(self.yardstick, timer, way.nbytes, op)
                time, *host = self.timed(op, case + suffix, times)
                rate = Figure(op, setting.case(case + suffix), moved / times.device, "bytes/s")

                def spent(timer: str = timer) -> float:
                    return self.time(timer, peer).device

                entries += [setting.beside(time, "torch-indexing", spent, lambda other: other * 1e6), *host]
                entries.append(setting.beside(rate, "device-copy", plain, lambda other: moved / other))
            return entries

        return Task(f"{op}, {case}", check, measure)

    def idle(self) -> Task:
        """A call with nothing due, which is what almost every step of a decode loop makes."""
        ids = torch.zeros(BATCH, dtype=torch.int32, device=self.storage.device)
        outs = [torch.empty(0)] * 2

        def act(planes: Planes, out: Tensor) -> None:
            planes.copy(ids, ids, due=0)

        def measure() -> list[Figure]:
            ours = partial(act, self.storage, outs[0])
            timers = (("alone", ""), *SHORT)
            return [
                figure
                for timer, suffix in timers
                for figure in self.timed("copy", f"nothing due{suffix}", self.time(timer, ours))
            ]

        return Task("copy, nothing due", partial(self.wrong, act, lambda planes, out: None, outs), measure)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields copies, gathers, scatters and zeros of 1, 16 and 64 slots, and a copy with nothing due."""
    bench = _Copies(setting)
    yield bench.idle()
    ways = {due: bench.ways(due) for due in bench.due}
    for op in ways[bench.due[0]]:
        for due in bench.due:
            yield bench.task(op, due, ways[due][op])

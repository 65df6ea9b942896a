"""Copies, gathers, scatters and zeros of a model's states, beside torch's indexing and a plain copy: device time.

A check compares memstate with the reference, and torch's indexing with the reference, each on fresh random bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.cli.bench.task import Figure, Setting, Task, differing
from memstate.cli.due import BATCH, fitting, spread
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import qwen3_next

MODEL = "qwen3_next"
PLANE = "ssm"  # the one that is gathered and scattered
DUE, TOY_DUE = (1, 16, 64), (1, 2)
TOY = StateLayout((Plane("conv", (48, 3), torch.bfloat16), Plane(PLANE, (2, 16, 8), torch.float32)), 2)
OVERHEAD = 9  # slots needed for each one due: two storages, the yardstick, batches and what torch allocates

Operation = Callable[[Planes, Tensor], object]  # changes planes, or fills a batch


class Way(NamedTuple):
    """One operation on slots.

    Attributes:
        ours: By memstate, on planes and a batch.
        peer: The same by torch's indexing. None: nothing is due, and it does nothing.
        moved: Bytes that it reads and writes.
    """

    ours: Operation
    peer: Operation | None
    moved: int


class _Copies:
    """Two storages, each with a batch to gather into: one for what is timed, and a twin for the reference."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.layout = setting.sizes(qwen3_next(), TOY)
        self.due = fitting(setting.sizes(DUE, TOY_DUE), OVERHEAD * self.layout.bytes_per_slot, setting.free_bytes)
        self.storage, self.twin = (
            Planes(self.layout, 2 * max(self.due), backend) for backend in (setting.make_backend(), setting.reference())
        )

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
            "copy": Way(lambda planes, out: planes.copy(dst, src, due=due), indexed, 2 * slots),
            "gather": Way(
                lambda planes, out: planes.gather(PLANE, ids, out=out),
                lambda planes, out: torch.index_select(planes[PLANE], 1, to, out=out), 2 * batch.nbytes,
            ),
            "scatter": Way(
                lambda planes, out: planes.scatter(PLANE, ids, batch),
                lambda planes, out: planes[PLANE].index_copy_(1, to, batch), 2 * batch.nbytes,
            ),
            "zero": Way(lambda planes, out: planes.zero(dst, due=due), zeroed, slots),
        }  # fmt: skip

    def task(self, op: str, due: int, way: Way) -> Task:
        setting, outs = self.setting, [torch.empty_like(self.twin[PLANE][:, :due]) for _ in range(2)]
        case = setting.sizes(f"{due} slots of {MODEL}", f"{due} slots") if due else "nothing due"
        ours = partial(way.ours, self.storage, outs[0])

        def check() -> str:
            if way.peer is None:
                return self.wrong(way.ours, lambda planes, out: None, outs)
            found = self.wrong(way.ours, way.ours, outs)
            return found or (self.wrong(way.peer, way.ours, outs) and "torch-indexing does something else")

        def measure() -> list[Figure]:
            peer = ("torch-indexing", partial(way.peer, self.storage, outs[0])) if way.peer else None
            beside = {"peer": peer, "moved": way.moved, "zeros": op == "zero"}
            found = setting.alone(op, case, ours, **beside)
            # One slot may take less time than its launch.
            return found if due > 1 else found + setting.in_graph(op, f"{case}, in a graph", ours, **beside)

        return Task(f"{op}, {case}", check, measure)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields copies, gathers, scatters and zeros of 1, 16 and 64 slots, and a copy with nothing due.

    With nothing due is how almost every step of a decode loop calls it.
    """
    bench = _Copies(setting)
    none = torch.zeros(BATCH, dtype=torch.int32, device=bench.storage.device)
    yield bench.task("copy", 0, Way(lambda planes, out: planes.copy(none, none, due=0), None, 0))
    ways = {due: bench.ways(due) for due in bench.due}
    for op in ways[bench.due[0]]:
        for due in bench.due:
            yield bench.task(op, due, ways[due][op])

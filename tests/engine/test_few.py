"""What a step with drafts costs the host: entries of its tables that are touched, and calls."""

from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate_tools.bench.host_sides import python_calls
from tests.support import inside
from tests.support.build import build

TAIL = 4
RINGS = ms.StateLayout([ms.Plane("s_x", (3 * TAIL - 1, 4), torch.float32)], layers=1)
LAYOUT = ms.StateLayout([ms.Plane("s", (4,), torch.float32)], layers=1, rows=RINGS)
KINDS = {"none": ms.NoTracking, "ping-pong": ms.PingPong, "lazy": ms.LazyPingPong, "redirect": ms.Redirect}
kinds = pytest.mark.parametrize("kind", KINDS)


class Touched(np.ndarray[Any, Any]):
    """Counts the entries of all arrays that are made from it, and the entries that are written."""

    entries = 0

    def __array_finalize__(self, of: object) -> None:
        Touched.entries += self.size

    def __setitem__(self, key: Any, value: Any) -> None:
        Touched.entries += np.asarray(self)[key].size
        super().__setitem__(key, value)


def manager(kind: str, rows: int, slots: int, **more: Any) -> ms.StateManager:
    every = {} if kind == "none" else {"every": 256}
    given = {"slots": slots, "max_requests": rows, "tracking": KINDS[kind](**every), "tail": TAIL, **more}
    return build(LAYOUT, backend="reference", **given)


@kinds
def test_a_step_with_drafts_touches_as_much_in_a_pool_of_any_size(kind: str) -> None:
    seen = []
    for size in (64, 4096):
        mem = manager(kind, size, 5 * size)
        rows, file, mirror = mem.admit([ms.Request(i) for i in range(16)]), inside.registers(mem), mem._parts.mirror
        for name in ("held", "labels", "tracked", "source", "pending", "newest"):
            setattr(file, name, getattr(file, name).view(Touched))
        mirror._columns = type(mirror._columns)(file.held, file.labels, file.tracked, file.source)
        before, Touched.entries = mem.plan(rows, TAIL, drafts=TAIL - 1), 0
        step = mem.plan(rows, TAIL, drafts=TAIL - 1)
        assert step.batch is before.batch
        mem.accept(before, [1 + i % TAIL for i in range(16)], written=True)
        seen.append(Touched.entries)
    assert seen[0] == seen[1] > 0


def test_a_mark_costs_the_same_in_a_batch_of_any_size() -> None:
    seen = []
    for size in (4, 256):
        mem = manager("redirect", size, 5 * size, page_size=256)
        rows = mem.admit([ms.Request(i, length=512, snapshot_at=[256] if i == 1 else []) for i in range(size)])
        mem.settle(mem.plan(rows, 3))
        seen.append(python_calls(lambda mem=mem, rows=rows: mem.settle(mem.plan(rows, 3))).tolist())
        assert mem._parts.marks.rows == {rows[1].index}
    assert seen[0] == seen[1]

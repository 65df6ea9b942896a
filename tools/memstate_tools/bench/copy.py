"""Benchmarks copies, gathers, scatters and zeros of a model's states, and compares them with torch's indexing."""

from collections.abc import Iterator
from functools import partial

import torch

from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate_tools.bench.state import kernel_task
from memstate_tools.bench.task import Measured, Setting, Task, differing
from memstate_tools.models import model_of, toy_of
from memstate_tools.workload import fitting

MODEL = "qwen3_next"
DUE, TOY_DUE = (1, 16, 64), (1, 2)
TOY = StateLayout((Plane("conv", (48, 3), torch.bfloat16), Plane("ssm", (2, 16, 8), torch.float32)), 2)
OVERHEAD = 9  # slots of memory for each slot due: two storages, the plain copy, batches and allocations of torch
BATCH = 256  # entries of one call in a decode step; almost always none is due


def _idle(setting: Setting) -> Task:
    """Returns the task of a copy with nothing due."""
    case, planes = "nothing due", Planes(setting.sizes(model_of(MODEL).layout, TOY), 1, setting.make_backend())
    none = torch.zeros(BATCH, dtype=torch.int32, device=planes.device)
    act = partial(planes.copy, none, none, due=0)

    def check() -> str:
        before = [arena.random_(0, 256).clone() for arena in planes.arenas]
        act()
        return differing(("planes", *pair) for pair in zip(planes.arenas, before, strict=True))

    def measure() -> list[Measured]:
        return [*setting.alone("copy", case, act), *setting.in_graph("copy", f"{case}, in a graph", act)]

    return Task(f"copy, {case}", check, measure)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields the tasks of a copy with nothing due, and of copies, zeros, gathers and scatters of 1, 16 and 64 slots."""
    yield _idle(setting)
    model = model_of(MODEL)
    due = fitting(setting.sizes(DUE, TOY_DUE), OVERHEAD * model.layout.bytes_per_slot, setting.free_bytes)
    for kernel in ("copy", "gather", "scatter"):
        for count in due:  # a single slot may take less time than its launch, so it is also timed in a graph
            states = setting.sizes(model, toy_of(model, kernel))
            yield kernel_task(setting, kernel, states, count, f"{count} slots of {MODEL}", graph=count == 1)

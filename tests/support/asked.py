"""Prints where `ms.explain` and real launches differ, as JSON, in a process that does not interpret.

python -m tests.support.asked [EVERY]: each EVERYth of the layouts, default 1
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from math import prod
from typing import Any
from unittest.mock import patch

import torch

from memstate.choices import explain
from memstate.kernels import tuned
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import CHECKPOINTS, from_config
from memstate.tiers.host.packing import Packing
from memstate_tools import workload
from memstate_tools.launches import compiling, kernels
from memstate_tools.models import AXES, CONFIGS, Model, model_of

TURNED = {"delta": "value_key", "kda": "value_key", "mamba2": "state_dim"}  # rule -> order that kernels take as `.mT`
BATCH = 3
STEPS = ("gated_delta", "selective", "conv", "mamba3")


def layouts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name of a model, and arguments of `from_config`."""
    for name, config in CONFIGS.items():
        yield name, {}
        yield name, {"order": "slot_major", "ssm_dtype": torch.float16, "ranks": 4, "layers": range(8)}
        rule = model_of(config).rule
        if rule in TURNED:
            yield (
                name,
                {
                    "ssm_order": TURNED[rule],
                    "conv_order": "width_first",
                    "ssm_dtype": torch.bfloat16,
                    "layers": range(8),
                },
            )


class Turned(dict[str, torch.Tensor]):
    """Planes as kernels take them: states are turned to the usual order of their axes."""

    def __init__(self, planes: Planes) -> None:
        super().__init__({name: plane.mT if name == "ssm" else plane for name, plane in planes.items()})
        self.arenas = planes.arenas


def asked(model: Model, plain: Model) -> tuple[set[tuple[str, str]], set[tuple[str, int]]]:
    """Returns (kernel, key) of the launches on states of a model, and (kernel, programs) of its decode steps.

    Args:
        model: The model.
        plain: The model with states in the usual order, in which workloads make their inputs.
    """
    tuned.forget()
    one, two = torch.tensor([1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    turned = bool(model.layout.planes[-1].order)

    def as_kernels_take_them(layout: StateLayout, slots: int, *_: object, **__: object) -> Turned:
        names = {plane.name for plane in layout.planes}
        layers = StateLayout(tuple(each for each in model.layout.planes if each.name in names), 1, model.layout.order)
        held = Planes(layers, slots, kernels())
        return Turned(held)

    with compiling("sm_90") as launches, ExitStack() as stack:
        planes = Planes(model.layout, 2, kernels())
        planes.copy(one, two)
        for name in planes:
            planes.scatter(name, one, planes.gather(name, one))
        packing = Packing(planes)
        packing.pack(None, one, one - 1, torch.zeros(1, packing.nbytes, dtype=torch.uint8))
        found = set(tuned.ASKED)
        if model.rule in AXES:
            axis = 3 - AXES[model.rule] if turned else AXES[model.rule]
            packing = Packing(Planes(StateLayout((model.plane("ssm"),), 1), 2, kernels()), {"ssm": axis})
            packing.pack(None, one, one - 1, torch.zeros(1, packing.nbytes, dtype=torch.uint8))
        if turned:
            stack.enter_context(patch.object(workload, "_planes", as_kernels_take_them))
        for kernel in STEPS:
            if model.has(kernel):
                for act in workload.make(kernel, plain, BATCH, kernels(), 0).acts.values():
                    act()
        found |= {
            each for each in tuned.ASKED if each[0] != "copy"
        }  # planes of a workload ask for it when they are made
    steps = {f"_{kernel}_step": kernel for kernel in STEPS}
    programs = {(steps[of], prod(each.grid)) for each in launches if (of := each.kernel.__name__) in steps}
    return {(kernel, key) for kernel, key, *_ in found}, programs


def main(every: int) -> None:
    """Prints [name, arguments, what launches alone have, what `explain` alone has] for each model that differs."""
    differing, seen = [], set[str]()
    for name, options in islice(layouts(), 0, None, every):
        config = CONFIGS[name]
        rule = model_of(config).rule
        kept = {key: value for key, value in options.items() if key not in ("ssm_order", "conv_order")}
        model, plain = Model(from_config(config, **options), rule), Model(from_config(config, **kept), rule)
        rows = explain(model.layout, BATCH, device="cpu")
        keys = {(row.kernel, row.key) for row in rows if row.kernel != "mamba3"}  # its launches look nothing up
        programs = {(row.kernel, row.programs) for row in rows if row.programs}
        seen |= {row.kernel for row in rows}
        for told, real in zip((keys, programs), asked(model, plain), strict=True):
            if told != real:
                differing.append([name, str(options), sorted(real - told), sorted(told - real)])
    print(json.dumps({"differing": differing, "kernels": sorted(seen), "presets": len(CHECKPOINTS)}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:] or (1,)))

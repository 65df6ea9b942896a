"""Benchmarks every kernel that moves or computes state, compared with a plain copy, the roofline and `fla`.

Operations of one's own run on their case.

Cases: batches of 1, 16, 64 and 256, tensor-parallel shares of 1 and 8 ranks, states of float32 and bfloat16.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch

from memstate.kernels.own import KERNELS, Kernel, load
from memstate_tools.bench.task import Measured, Setting, Task
from memstate_tools.maker import Maker
from memstate_tools.models import Model, model_of, toy_of
from memstate_tools.workload import MAKERS, delta_inputs, make

MODELS = {"selective": "nemotron_h", "mamba3": "mamba3"}  # kernel -> model; other kernels use DEFAULT
DEFAULT = "qwen3_next"
BATCHES, RANKS, DTYPES = (1, 16, 64, 256), (1, 8), (torch.float32, torch.bfloat16)
TOY_BATCHES, TOY_RANKS, TOY_DTYPES = (2,), (1,), (torch.float32,)
LAYERS = 4  # layers of the model: a launch that moves states moves all layers, a step computes one layer
CHECKED = 16  # largest number of slots that are compared with the reference
ROOM = 10  # slots of memory for each slot due: planes, the reference's planes, records, the plain copy
BITS_A_BYTE, EDGES = 8, 2  # memory moves data at both edges of its clock


def peak_bytes(device: torch.device) -> float | None:
    """Returns the bytes per second that clock and bus of a GPU's memory allow; None if they are unknown."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    hertz = 1e3 * getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    return EDGES * hertz * bits / BITS_A_BYTE or None


def kernel_task(
    setting: Setting, kernel: str | Kernel, model: Model | None, batch: int, case: str, graph: bool = False
) -> Task:
    """Returns the task of one kernel. It checks every operation, and torch's indexing where that does the same work.

    Args:
        setting: The setting of the benchmark.
        kernel: Name of the kernel, or one's own.
        model: The model with the states; None for a kernel of one's own.
        batch: Slots that are moved, or rows of a step.
        case: Case of the figures.
        graph: Whether operations are also timed in a graph.
    """
    seed, peak = torch.seed() % 2**31, peak_bytes(setting.device)

    def check() -> str:
        backends = setting.make_backend(), setting.reference(), setting.reference()
        mine, other, indexed = (make(kernel, model, min(batch, CHECKED), each, seed) for each in backends)
        for op, act in mine.acts.items():
            act()
            other.acts[op]()
            if differ := mine.differing(other):
                return f"{op}: {differ} differs from the reference"
            indexed.indexing.get(op, indexed.acts[op])()
            if indexed.differing(other):
                return f"{op}: torch-indexing does something else"
        return ""

    def measure() -> list[Measured]:
        workload, figures = make(kernel, model, batch, setting.make_backend(), seed), list[Measured]()
        peers = {op: ("torch-indexing", act) for op, act in workload.indexing.items()}
        if kernel == "gated_delta" and model and (fla := fla_step(model, batch, setting.device)):
            peers["gated delta"] = ("fla", fla)
        for op, act in workload.acts.items():
            beside: dict[str, Any] = {"peer": peers.get(op), "moved": workload.nbytes[op], "zeros": op == "zero"}
            figures += setting.alone(op, case, act, **beside)
            if peak is not None:
                rate = next(figure for figure in figures[::-1] if figure.unit == "bytes/s").value
                share = Measured(op, setting.case(f"{case}, of the roofline"), rate, "bytes/s")
                figures.append(setting.beside(share, "roofline", lambda: peak))
            if graph:
                figures += setting.in_graph(op, f"{case}, in a graph", act, **beside)
        return figures

    return Task(f"{getattr(kernel, 'name', kernel)}, {case}", check, measure)


def fla_step(model: Model, batch: int, device: torch.device) -> Callable[[], object] | None:
    """Returns one decode step of `fla`'s fused recurrent gated delta rule, on states of the model's shape.

    The step reads states from one tensor and writes them to a new one, always in float32. Returns None without `fla`,
    without a GPU, or with another dtype.
    """
    if device.type != "cuda" or find_spec("fla") is None or model.plane("ssm").dtype != torch.float32:
        return None
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # type: ignore[import-untyped]

    heads, key, value = shape = model.plane("ssm").shape
    q, k, v, gate, beta = delta_inputs(shape, heads * (2 * key + value), batch, Maker(device, torch.seed() % 2**31))
    states = torch.randn(batch, *shape, dtype=torch.float32, device=device)

    def step() -> object:
        with torch.no_grad():
            return fused_recurrent_gated_delta_rule(
                q, k, v, g=gate, beta=beta, initial_state=states, output_final_state=True
            )

    return step


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields a task for each kernel, batch size, number of ranks and dtype whose states fit in the memory.

    Kernels of one's own come last.
    """
    if not setting.toy and find_spec("fla") is None:
        print("fla is not installed: the gated delta step has no peer", file=sys.stderr)
    if not setting.toy and peak_bytes(setting.device) is None:
        print("torch does not tell clock and bus of the memory: there is no roofline", file=sys.stderr)
    shapes = setting.sizes((BATCHES, RANKS, DTYPES), (TOY_BATCHES, TOY_RANKS, TOY_DTYPES))
    for kernel in MAKERS:
        name = MODELS.get(kernel, DEFAULT)
        for batch, ranks, dtype in product(*shapes):
            model = model_of(name, ranks, dtype)
            model = model._replace(layout=replace(model.layout, layers=min(model.layout.layers, LAYERS)))
            model = setting.sizes(model, toy_of(model, kernel))
            if batch > 1 and ROOM * batch * model.layout.bytes_per_slot > 0.75 * setting.free_bytes:
                continue
            states = str(dtype).removeprefix("torch.")
            yield kernel_task(
                setting, kernel, model, batch, f"R={batch}, TP {ranks}, {states}, {name}, {LAYERS} layers"
            )
    load()
    for own, batch in product(KERNELS.values(), shapes[0]):
        yield kernel_task(setting, own, None, batch, f"R={batch}")

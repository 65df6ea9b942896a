"""Every kernel that moves or computes state: its share of a plain copy and of the roofline, and the time beside `fla`.

Batches of 1, 16, 64 and 256, tensor-parallel shares of 1 and 8 ranks, states of float32 and bfloat16.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor

from memstate.cli.bench.task import Figure, Setting, Task
from memstate.cli.workload import Model, Workload, make, model_of, toy_of
from memstate.kernels.tuned import CONFIGS

MODELS = {"selective": "nemotron_h"}  # the others: DEFAULT
DEFAULT = "qwen3_next"
BATCHES, RANKS, DTYPES = (1, 16, 64, 256), (1, 8), (torch.float32, torch.bfloat16)
TOY_BATCHES, TOY_RANKS, TOY_DTYPES = (2,), (1,), (torch.float32,)
LAYERS = 4  # of the model: each takes part in a launch that moves, and steps run one layer a launch
CHECKED = 16  # most slots that are compared with the reference
ROOM = 10  # slots of memory for each one due: planes and their twin of the reference, records, the yardstick
BITS_A_BYTE, EDGES = 8, 2  # memory moves at both edges of its clock


def peak_bytes(device: torch.device) -> float | None:
    """Returns the bytes a second that the memory of a GPU can move by its clock and its bus; None if unknown."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    hertz = 1e3 * getattr(properties, "memory_clock_rate", 0)
    bits = getattr(properties, "memory_bus_width", 0)
    return EDGES * hertz * bits / BITS_A_BYTE or None


class _Bench:
    """Kernels on one device, and what they are compared with: a copy of as many bytes, the roofline, `fla`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.peak = peak_bytes(setting.device)
        self.plain = cache(self._plain)

    def _plain(self, nbytes: int) -> float:
        """Bytes a second that torch's copy_ reads and writes, if it moves `nbytes` in all."""
        size = max(nbytes // 2, 1)
        to, of = torch.zeros(2, size, dtype=torch.uint8, device=self.setting.device).random_(0, 256)
        return 2 * size / self.setting.clock.alone(partial(to.copy_, of)).device

    def task(self, kernel: str, model: Model, batch: int, case: str) -> Task:
        setting = self.setting
        seed = torch.seed() % 2**31

        def check() -> str:
            rows = min(batch, CHECKED)
            mine, other = (
                make(kernel, model, rows, each, seed) for each in (setting.make_backend(), setting.reference())
            )
            for op, act in mine.acts.items():
                act()
                other.acts[op]()
                if differ := mine.differing(other):
                    return f"{op}: {differ} differs from the reference"
            return ""

        def measure() -> list[Figure]:
            workload = make(kernel, model, batch, setting.make_backend(), seed)
            return [figure for op in workload.acts for figure in self.figures(op, workload, case, kernel, model, batch)]

        return Task(f"{kernel}, {case}", check, measure)

    def figures(
        self, op: str, workload: Workload, case: str, kernel: str, model: Model, batch: int
    ) -> Iterator[Figure]:
        setting, nbytes = self.setting, workload.nbytes[op]
        times = setting.clock.alone(workload.acts[op])
        rate = Figure(op, setting.case(case), nbytes / times.device, "bytes/s")
        time, host = setting.both(op, case, times)
        if kernel == "gated_delta" and (peer := fla_step(model, batch, setting.device)):
            time = setting.beside(time, "fla", lambda: setting.clock.alone(peer).device, lambda seconds: seconds * 1e6)
        yield time
        yield host
        plain = self.plain(nbytes)
        yield setting.beside(rate, "device-copy", lambda: plain, lambda value: value)
        peak = self.peak
        if peak is not None:
            share = Figure(op, f"{rate.case}, of the roofline", rate.value, rate.unit)
            yield setting.beside(share, "roofline", lambda: peak, lambda value: value)


def fla_step(model: Model, batch: int, device: torch.device) -> Callable[[], object] | None:
    """Returns one decode step of `fla`'s fused recurrent gated delta rule on states of the model's shape.

    It reads states in one tensor and writes them to a new one, always float32. None where `fla` or a GPU is missing,
    and for other dtypes.
    """
    if device.type != "cuda" or find_spec("fla") is None or model.plane("ssm").dtype != torch.float32:
        return None
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # type: ignore[import-untyped]

    heads, key, value = model.plane("ssm").shape

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    q, k = (torch.nn.functional.normalize(random(batch, 1, heads, key), dim=-1).bfloat16() for _ in range(2))
    v, beta = random(batch, 1, heads, value).bfloat16(), random(batch, 1, heads).sigmoid()
    states, gate = random(batch, heads, key, value), -random(batch, 1, heads).abs()

    def step() -> object:
        with torch.no_grad():
            return fused_recurrent_gated_delta_rule(
                q, k, v, g=gate, beta=beta, initial_state=states, output_final_state=True
            )

    return step


def _say_what_is_missing(bench: _Bench) -> None:
    if find_spec("fla") is None:
        print("fla is not installed: the gated delta step has no peer", file=sys.stderr)
    if bench.peak is None:
        print("torch does not tell clock and bus of the memory: there is no roofline", file=sys.stderr)


def _cut(model: Model, layers: int) -> Model:
    return model._replace(layout=replace(model.layout, layers=min(model.layout.layers, layers)))


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields every kernel for every batch, share and dtype whose states fit."""
    bench, toy = _Bench(setting), setting.toy
    shapes = (TOY_BATCHES, TOY_RANKS, TOY_DTYPES) if toy else (BATCHES, RANKS, DTYPES)
    if not toy:
        _say_what_is_missing(bench)
    free = 2**40 if toy else torch.cuda.mem_get_info(setting.device)[0]
    for kernel in CONFIGS:
        name = MODELS.get(kernel, DEFAULT)
        for batch, ranks, dtype in product(*shapes):
            model = _cut(model_of(name, ranks, dtype), LAYERS)
            model = toy_of(model, kernel) if toy else model
            if batch > 1 and ROOM * batch * model.layout.bytes_per_slot > 0.75 * free:
                continue
            states = str(dtype).removeprefix("torch.")
            yield bench.task(kernel, model, batch, f"R={batch}, TP {ranks}, {states}, {name}, {LAYERS} layers")

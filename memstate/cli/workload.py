"""What the kernels that move or compute state are checked and timed on: states, operands, and the bytes that move."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import TILE_BYTES
from memstate.kernels.tuned import CONFIGS
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import CHECKPOINTS, from_config
from memstate.tiers.host.packing import Packing

RULES = {  # type of a model -> the rule of its state
    "qwen3_next": "delta", "qwen3_5_text": "delta", "kimi_linear": "kda", "nemotron_h": "mamba2",
    "falcon_h1": "mamba2", "granitemoehybrid": "mamba2", "bamba": "mamba2", "mamba2": "mamba2", "mamba": "mamba1",
    "falcon_mamba": "mamba1",
}  # fmt: skip
AXES = {"delta": 2, "kda": 2, "mamba2": 1}  # the axis of a state over which values share an int8 scale
NEEDS = {"gated_delta": ("delta", "kda"), "selective": ("mamba2", "mamba1"), "pack_int8": tuple(AXES)}
TOY_SSM = {"delta": (2, 16, 40), "kda": (2, 16, 40), "mamba2": (2, 40, 16), "mamba1": (40, 16)}
TOY_CHANNELS = 112  # what the states of a toy leave for two more heads: q and k, or b and c
TOKENS = 1  # of a row in a step
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # of |got - expected| / |expected|
Act = Callable[[], object]


class Model(NamedTuple):
    """A layout, and the rule of its states: "delta", "kda", "mamba2", "mamba1"; "" without such states."""

    layout: StateLayout
    rule: str

    def has(self, kernel: str) -> bool:
        """Whether a kernel runs on states of this model."""
        if kernel == "conv":
            return "conv" in self.names
        return self.rule in NEEDS[kernel] if kernel in NEEDS else True

    @property
    def names(self) -> list[str]:
        """Names of the planes."""
        return [plane.name for plane in self.layout.planes]

    def plane(self, name: str) -> Plane:
        """Returns a plane by its name."""
        return self.layout.planes[self.names.index(name)]


def model_of(name: str, ranks: int = 1, ssm_dtype: torch.dtype = torch.float32) -> Model:
    """Returns a preset.

    Args:
        name: Name of the preset.
        ranks: Tensor-parallel ranks, of which the layout is one.
        ssm_dtype: Dtype of the states.

    Raises:
        InvalidArgument: Names the presets there are.
    """
    if name not in CHECKPOINTS:
        raise InvalidArgument(f"model {name!r}: expected one of {', '.join(CHECKPOINTS)}")
    config = CHECKPOINTS[name]
    return Model(from_config(config, ranks=ranks, ssm_dtype=ssm_dtype), RULES.get(config["model_type"], ""))


def toy_of(model: Model, kernel: str) -> Model:
    """Returns a model of the same kind at a size that an interpreter can run.

    Kernels that move bytes get planes of a tile and a bit over at most two layers; the others get small heads.
    """
    layout = model.layout
    if kernel not in ("gated_delta", "selective", "conv", "pack_int8"):
        planes = [
            Plane(plane.name, (min(plane.elements, (TILE_BYTES + 1200) // plane.dtype.itemsize),), plane.dtype)
            for plane in layout.planes
        ]
        return Model(replace(layout, planes=tuple(planes), layers=min(layout.layers, 2)), model.rule)
    shapes = {"ssm": TOY_SSM.get(model.rule, ())}
    if "conv" in model.names:
        first, last = model.plane("conv").shape
        shapes["conv"] = (TOY_CHANNELS, last) if first > last else (first, TOY_CHANNELS)
    planes = [Plane(plane.name, shapes[plane.name], plane.dtype) for plane in layout.planes]
    return Model(replace(layout, planes=tuple(planes), layers=1), model.rule)


class Workload(NamedTuple):
    """What one kernel is run on.

    Attributes:
        acts: Operation -> the call.
        nbytes: Operation -> bytes that the call reads and writes.
        written: Name -> what the calls write.
        exact: Whether results are those of the reference bit for bit, and not only within `BOUNDS`.
        indexing: Operation -> the same by torch's indexing, where there is such a thing.
    """

    acts: dict[str, Act]
    nbytes: dict[str, int]
    written: dict[str, Tensor]
    exact: bool = True
    indexing: dict[str, Act] = {}  # noqa: RUF012  (never written to)

    def differing(self, other: "Workload") -> str:
        """Returns the names of what was written and differs; empty if nothing does.

        Syncs: yes.
        """
        return ", ".join(name for name, tensor in self.written.items() if self._differs(tensor, other.written[name]))

    def _differs(self, mine: Tensor, other: Tensor) -> bool:
        if self.exact:
            return not torch.equal(_bytes(mine), _bytes(other))
        distance = float((mine.double() - other.double()).norm())
        return not distance <= BOUNDS[mine.dtype] * float(other.double().norm())


def fitting(sizes: tuple[int, ...], bytes_each: int, free_bytes: int) -> tuple[int, ...]:
    """Returns the sizes of batches that fit three quarters of the memory; the smallest one in any case.

    Args:
        sizes: Numbers of slots, the smallest first.
        bytes_each: Memory needed for each slot.
        free_bytes: Memory of the device that is free.
    """
    return tuple(n for n in sizes if bytes_each * n <= 0.75 * free_bytes) or sizes[:1]


def make(kernel: str, model: Model, batch: int, backend: Backend, seed: int) -> Workload:
    """Returns the workload of a kernel; two of the same seed on one device are equal.

    Args:
        kernel: A name in `memstate.kernels.tuned.CONFIGS`.
        model: Its states.
        batch: Slots that are moved, or rows of a step. Twice as many slots are allocated.
        backend: Runs the calls.
        seed: Of all values.

    Raises:
        InvalidArgument: The kernel is unknown, or the model has no state for it.
    """
    if kernel not in CONFIGS or not model.has(kernel):
        raise InvalidArgument(f"kernel {kernel!r}: there is none, or the model has no state for it")
    generator = torch.Generator(backend.device).manual_seed(seed)
    return MAKERS[kernel](model, batch, backend, generator)


def _random(backend: Backend, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=backend.device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _planes(layout: StateLayout, slots: int, backend: Backend, generator: torch.Generator, numbers: bool) -> Planes:
    """Planes in random bytes, or where kernels compute in random numbers."""
    planes = Planes(layout, slots, backend)
    for arena in planes.arenas:
        arena.random_(0, 256, generator=generator)  # bytes that are all the same may move faster
    if numbers:
        for plane in planes.values():
            plane.normal_(generator=generator)
    planes.scrub_null()
    return planes


def _slots(batch: int, backend: Backend, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two vectors of slots out of 1 to 2 `batch`, in random order."""
    order = torch.randperm(2 * batch, generator=generator, device=backend.device).int() + 1
    return order[:batch].contiguous(), order[batch:].contiguous()


def _arenas(planes: Planes) -> dict[str, Tensor]:
    return {f"arena {number}": arena for number, arena in enumerate(planes.arenas)}


def _copies(model: Model, batch: int, backend: Backend, generator: torch.Generator) -> Workload:
    planes = _planes(model.layout, 2 * batch, backend, generator, numbers=False)
    dst, src = _slots(batch, backend, generator)
    size = batch * model.layout.payload_bytes_per_slot
    to, of = dst.long(), src.long()

    def indexed() -> None:
        for plane in planes.values():
            plane[:, to] = plane[:, of]

    def zeroed() -> None:
        for plane in planes.values():
            plane.index_fill_(1, to, 0)

    acts: dict[str, Act] = {
        "copy": partial(planes.copy, dst, src, due=batch), "zero": partial(planes.zero, dst, due=batch),
    }  # fmt: skip
    indexing: dict[str, Act] = {"copy": indexed, "zero": zeroed}
    return Workload(acts, {"copy": 2 * size, "zero": size}, _arenas(planes), indexing=indexing)


def _batch_of(model: Model, batch: int, planes: Planes, generator: torch.Generator) -> tuple[str, Tensor]:
    """The largest plane, and a batch of it."""
    plane = max(model.layout.planes, key=lambda each: each.elements * each.dtype.itemsize)
    shape = (model.layout.layers_of(plane), batch, *plane.shape)
    values = torch.empty(prod(shape) * plane.dtype.itemsize, dtype=torch.uint8, device=planes.device)
    return plane.name, values.random_(0, 256, generator=generator).view(plane.dtype).view(shape)


def _gather(model: Model, batch: int, backend: Backend, generator: torch.Generator) -> Workload:
    planes = _planes(model.layout, 2 * batch, backend, generator, numbers=False)
    name, out = _batch_of(model, batch, planes, generator)
    ids, _ = _slots(batch, backend, generator)
    act, indexed = (
        partial(planes.gather, name, ids, out=out),
        partial(torch.index_select, planes[name], 1, ids, out=out),
    )
    return Workload({"gather": act}, {"gather": 2 * out.nbytes}, {"out": out}, indexing={"gather": indexed})


def _scatter(model: Model, batch: int, backend: Backend, generator: torch.Generator) -> Workload:
    planes = _planes(model.layout, 2 * batch, backend, generator, numbers=False)
    name, values = _batch_of(model, batch, planes, generator)
    ids, _ = _slots(batch, backend, generator)
    act, indexed = partial(planes.scatter, name, ids, values), partial(planes[name].index_copy_, 1, ids.long(), values)
    return Workload({"scatter": act}, {"scatter": 2 * values.nbytes}, _arenas(planes), indexing={"scatter": indexed})


def _pack(model: Model, batch: int, backend: Backend, generator: torch.Generator, int8: int | None = None) -> Workload:
    """Slots to records and back, as they are or as int8 over an axis."""
    layout = model.layout
    if int8 is not None:
        layout = replace(layout, planes=(model.plane("ssm"),))
    planes = _planes(layout, 2 * batch, backend, generator, numbers=int8 is not None)
    packing = Packing(planes, None if int8 is None else {"ssm": int8})
    of, to = _slots(batch, backend, generator)
    places = torch.randperm(batch, generator=generator, device=backend.device).int()
    records = torch.zeros(batch, packing.nbytes, dtype=torch.uint8, device=backend.device)
    names = ("pack", "unpack") if int8 is None else ("pack int8", "unpack int8")
    acts: dict[str, Act] = {
        names[0]: partial(packing.pack, None, of, places, records),
        names[1]: partial(packing.unpack, None, to, places, records),
    }
    size = batch * (layout.payload_bytes_per_slot + packing.layout.payload_bytes_per_slot)
    return Workload(acts, dict.fromkeys(names, size), _arenas(planes) | {"records": records})


def _pack_int8(model: Model, batch: int, backend: Backend, generator: torch.Generator) -> Workload:
    return _pack(model, batch, backend, generator, AXES[model.rule])


class _Rows(NamedTuple):
    """The vectors of a step: every row reads one slot and writes another, and takes no snapshot."""

    read: Tensor
    write: Tensor
    snapshot: Tensor
    tokens: Tensor


def _rows(batch: int, backend: Backend, generator: torch.Generator) -> _Rows:
    read, write = _slots(batch, backend, generator)
    return _Rows(read, write, torch.zeros_like(read), torch.full_like(read, TOKENS))


def _step(
    name: str, planes: Planes, plane: str, batch: int, inputs: Sequence[Tensor | None], out: Tensor, act: Act
) -> Workload:
    """A step of one layer; it reads and writes a state for each row, its inputs and its output."""
    states = 2 * batch * planes[plane][0][0].nbytes
    size = states + out.nbytes + sum(tensor.nbytes for tensor in inputs if tensor is not None)
    return Workload({name: act}, {name: size}, {"out": out, plane: planes[plane]}, exact=False)


def delta_inputs(
    shape: tuple[int, ...],
    channels: int,
    batch: int,
    device: torch.device,
    generator: torch.Generator | None = None,
    per_key: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v, decay and beta of one token a row: keys of norm 1, decays below 0, betas between 0 and 1.

    So states stay bounded however often a step is repeated.

    Args:
        shape: Heads, keys and values of a state.
        channels: Of the convolution; what values leave is for q and k.
        batch: Rows.
        device: Of the result.
        generator: Of the values.
        per_key: Whether there is a decay for each key channel.
    """
    heads, key, value = shape
    key_heads = max(1, (channels - heads * value) // (2 * key))

    def random(*shape: int) -> Tensor:
        return torch.randn((batch, TOKENS, *shape), generator=generator, dtype=torch.float32, device=device)

    q, k = (torch.nn.functional.normalize(random(key_heads, key), dim=-1).bfloat16() for _ in range(2))
    decay = -(random(heads, key) if per_key else random(heads)).abs()
    return q, k, random(heads, value).bfloat16(), decay, random(heads).sigmoid()


def _gated_delta(model: Model, batch: int, backend: Backend, generator: torch.Generator) -> Workload:
    layout = replace(model.layout, layers=1)
    planes = _planes(layout, 2 * batch, backend, generator, numbers=True)
    shape, channels = model.plane("ssm").shape, max(model.plane("conv").shape)
    inputs = delta_inputs(shape, channels, batch, backend.device, generator, model.rule == "kda")
    out, rows = torch.zeros_like(inputs[2]), _rows(batch, backend, generator)
    act = partial(backend.gated_delta_step, *inputs, planes["ssm"][0], *rows, None, out)
    return _step("gated delta", planes, "ssm", batch, inputs, out, act)


def _selective(model: Model, batch: int, backend: Backend, generator: torch.Generator) -> Workload:
    layout = replace(model.layout, layers=1)
    planes = _planes(layout, 2 * batch, backend, generator, numbers=True)
    tied, states = model.rule == "mamba2", planes["ssm"][0]
    states = states if tied else states.unsqueeze(1)  # Mamba-1 is one head
    heads, dim, state = states.shape[1:]
    groups = max(1, (max(model.plane("conv").shape) - heads * dim) // (2 * state)) if tied else 1
    random = partial(_random, backend, generator)
    own = (heads,) if tied else (heads, dim)
    x, z = (random(batch, TOKENS, heads, dim).bfloat16() for _ in range(2))
    b, c = (random(batch, TOKENS, groups, state).bfloat16() for _ in range(2))
    dt = random(batch, TOKENS, *own).bfloat16()
    a = -random(*own).exp() if tied else -random(heads, dim, state).exp()
    d, bias, out = random(*own), random(*own).abs(), torch.zeros_like(x)
    rows = _rows(batch, backend, generator)
    act = partial(backend.selective_step, x, dt, a, b, c, states, *rows, d, z, bias, True, out)
    return _step("selective", planes, "ssm", batch, (x, z, b, c, dt, a, d, bias), out, act)


def _conv(model: Model, batch: int, backend: Backend, generator: torch.Generator) -> Workload:
    layout = replace(model.layout, layers=1, planes=(model.plane("conv"),))
    planes = _planes(layout, 2 * batch, backend, generator, numbers=True)
    windows = planes["conv"][0]
    windows = windows if windows.shape[1] < windows.shape[2] else windows.transpose(1, 2)  # as `slot tap-1 channel`
    taps, channels = windows.shape[1] + 1, windows.shape[2]
    random = partial(_random, backend, generator)
    x, weight = random(batch, TOKENS, channels).bfloat16(), random(channels, taps).bfloat16()
    out, rows = torch.zeros_like(x), _rows(batch, backend, generator)
    act = partial(backend.conv_step, x, weight, None, windows, *rows, "silu", out)
    return _step("conv", planes, "conv", batch, (x, weight), out, act)


MAKERS: dict[str, Callable[[Model, int, Backend, torch.Generator], Workload]] = {
    "copy": _copies, "gather": _gather, "scatter": _scatter, "pack": _pack, "pack_int8": _pack_int8,
    "gated_delta": _gated_delta, "selective": _selective, "conv": _conv,
}  # fmt: skip

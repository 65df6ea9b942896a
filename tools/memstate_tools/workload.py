"""Makes the workloads on which kernels are checked and timed: states, operands, and the bytes that move."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.kernels.own import Kernel, tensors_in
from memstate.kernels.tables import ConvTail, DeltaTail, Mamba3State, SelectiveTail
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate.tiers.host.packing import Packing
from memstate_tools.drafted import DRAFTS, Drafted, drafted, ring
from memstate_tools.maker import Maker
from memstate_tools.models import AXES, Model

BF16 = torch.bfloat16
TOKENS = 1  # tokens of a row in a step
# largest norm of (got - expected) over that of expected; a single number may be ten times as far off
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Act = Callable[[], object]


class Workload(NamedTuple):
    """The calls of one kernel, and their operands.

    Attributes:
        acts: Operation -> the call.
        nbytes: Operation -> bytes that the call reads and writes.
        written: Name -> tensor that the calls write, or memory that they must leave.
        states: Memory of states.
        memory: Bytes of all tensors.
        exact: Whether results must equal the reference bit for bit; otherwise within `BOUNDS`.
        indexing: Operation -> a call that does the same with torch's indexing, if there is one.
    """

    acts: dict[str, Act]
    nbytes: dict[str, int]
    written: dict[str, Tensor]
    states: Sequence[Tensor] = ()
    memory: int = 0
    exact: bool = True
    indexing: dict[str, Act] = {}  # noqa: RUF012  (nobody writes to it)

    def differing(self, other: "Workload") -> str:
        """Returns the names of the written tensors that differ; empty if none does.

        Syncs: yes.
        """
        both = [name for name in self.written if name in other.written]  # one of two may return nothing
        return ", ".join(name for name in both if self._differs(self.written[name], other.written[name]))

    def distance(self, other: "Workload", name: str) -> str:
        """Returns how many numbers of a written tensor differ, and the largest distance, in words. Syncs: yes."""
        mine, theirs = self.written[name].double(), other.written[name].double()
        differ = (mine != theirs) & ~(mine.isnan() & theirs.isnan())
        most = (mine - theirs)[differ].abs().max().item() if differ.any() else 0.0
        return f"{int(differ.sum()):,} of {mine.numel():,} numbers of {name}, by up to {most:.3g}"

    def _differs(self, mine: Tensor, other: Tensor) -> bool:
        if self.exact or not mine.is_floating_point():
            return not same_bytes(mine, other)
        a, b = mine.double(), other.double()
        if bool((a.isnan() != b.isnan()).any()):
            return True
        distance = torch.where((a == b) | a.isnan(), 0, a - b).abs()
        size = b.nan_to_num(0.0, 0.0, 0.0).abs()
        bound = BOUNDS.get(mine.dtype, 2 * torch.finfo(mine.dtype).eps)
        one = 10 * bound * (size + size.square().mean().sqrt())  # an outlier among many that are right
        return not bool((distance <= one).all() and distance.norm() <= bound * size.norm())


def fitting(sizes: Sequence[int], bytes_each: int, free_bytes: int) -> tuple[int, ...]:
    """Returns the batch sizes that fit into three quarters of the free memory; at least the smallest one.

    Args:
        sizes: Numbers of slots, the smallest first.
        bytes_each: Memory needed for each slot.
        free_bytes: Free memory of the device.
    """
    return tuple(n for n in sizes if bytes_each * n <= 0.75 * free_bytes) or tuple(sizes[:1])


def make(
    kernel: str | Kernel, model: Model | None, batch: int, backend: Backend, seed: int, padded: bool = False
) -> Workload:
    """Returns the workload of a kernel. Two workloads of the same seed on one device are equal.

    Args:
        kernel: A name in `MAKERS` (a kernel with configurations, or `mamba3`, which has only one), or a kernel of
            one's own.
        model: The model with the states; None for a kernel of one's own.
        batch: Slots that are moved, or rows of a step. Twice as many slots are allocated.
        backend: Runs the calls.
        seed: Seed of all values.
        padded: Whether some rows have slot 0.

    Raises:
        InvalidArgument: The kernel is unknown, or the model has no state for it.
    """
    maker = Maker(backend.device, seed, padded)
    if isinstance(kernel, Kernel):
        made = _own(kernel, batch, backend, maker)
    elif model is None or kernel not in MAKERS or not model.has(kernel):
        raise InvalidArgument(f"kernel {kernel!r}: there is none, or the model has no state for it")
    else:
        made = MAKERS[kernel](model, batch, backend, maker)
    names = {tensor.data_ptr(): name for name, tensor in made.written.items()}
    made.written.update(maker.around(names))  # the same dictionary, to which calls add what they return
    return made._replace(memory=maker.nbytes)


def _own(kernel: Kernel, batch: int, backend: Backend, make: Maker) -> Workload:
    given = kernel.case(batch, make)
    if not isinstance(given, dict):
        raise InvalidArgument(f"kernel {kernel.name!r}: `case` returned {given!r}, expected arguments by name")
    for name, each in given.items():  # what is made of the maker's tensors gets poison around it as well
        if isinstance(each, Tensor) and each.is_contiguous() and not make.made(each):
            given[name] = make.like(each).copy_(each)
    tensors = dict(tensors_in(given))
    if missing := [name for name in kernel.state if name not in tensors]:
        raise InvalidArgument(f"kernel {kernel.name!r}: `case` makes no tensor {missing[0]!r}, which `state` names")
    written = dict(tensors)

    def act() -> None:
        result = kernel.reference(**given) if backend.name == "reference" else kernel(**given)
        written.update(tensors_in(result, "the result"))

    size = kernel.nbytes(given) if kernel.nbytes else sum(each.nbytes for each in tensors.values())
    states = [tensors[name] for name in kernel.state]
    return Workload({kernel.name: act}, {kernel.name: size}, written, states, exact=False)


def same_bytes(one: Tensor, two: Tensor) -> bool:
    """Returns whether two tensors have the same bytes. Syncs: yes."""
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, two)))


def _planes(layout: StateLayout, slots: int, backend: Backend, make: Maker, numbers: bool) -> Planes:
    """Returns planes with random bytes or, with `numbers`, with random numbers."""
    planes = Planes(layout, slots, backend, make.arena)
    for arena in planes.arenas:
        arena.random_(0, 256, generator=make.generator)  # equal bytes may move faster
    if numbers:
        for plane in planes.values():
            plane.normal_(generator=make.generator)
    planes.scrub_null()
    return planes


def _arenas(planes: Planes) -> dict[str, Tensor]:
    return {f"arena {number}": arena for number, arena in enumerate(planes.arenas)}


def _copies(model: Model, batch: int, backend: Backend, make: Maker) -> Workload:
    planes = _planes(model.layout, 2 * batch, backend, make, numbers=False)
    dst, src = make.slots(batch)
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
    return Workload(acts, {"copy": 2 * size, "zero": size}, _arenas(planes), planes.arenas, indexing=indexing)


def _batch_of(model: Model, batch: int, planes: Planes, make: Maker) -> tuple[str, Tensor]:
    """Returns the name of the largest plane, and random values for a batch of it."""
    plane = max(model.layout.planes, key=lambda each: each.elements * each.dtype.itemsize)
    shape = (model.layout.layers_of(plane), batch, *plane.shape)
    values = make.arena(prod(shape) * plane.dtype.itemsize).random_(0, 256, generator=make.generator)
    return plane.name, values.view(plane.dtype).view(shape)


def _gather(model: Model, batch: int, backend: Backend, make: Maker) -> Workload:
    planes = _planes(model.layout, 2 * batch, backend, make, numbers=False)
    name, out = _batch_of(model, batch, planes, make)
    ids, _ = make.slots(batch)
    act, indexed = (
        partial(planes.gather, name, ids, out=out),
        partial(torch.index_select, planes[name], 1, ids, out=out),
    )
    states = (*planes.arenas, out)
    return Workload({"gather": act}, {"gather": 2 * out.nbytes}, {"out": out}, states, indexing={"gather": indexed})


def _scatter(model: Model, batch: int, backend: Backend, make: Maker) -> Workload:
    planes = _planes(model.layout, 2 * batch, backend, make, numbers=False)
    name, values = _batch_of(model, batch, planes, make)
    ids, _ = make.slots(batch)
    act, indexed = partial(planes.scatter, name, ids, values), partial(planes[name].index_copy_, 1, ids.long(), values)
    states, size = (*planes.arenas, values), 2 * values.nbytes
    return Workload({"scatter": act}, {"scatter": size}, _arenas(planes), states, indexing={"scatter": indexed})


def _pack(model: Model, batch: int, backend: Backend, make: Maker, int8: int | None = None) -> Workload:
    """Returns a workload that packs slots into records and unpacks them; `int8` is the axis of int8 scales, or None."""
    layout = model.layout
    if int8 is not None:
        layout = replace(layout, planes=(model.plane("ssm"),))
    planes = _planes(layout, 2 * batch, backend, make, numbers=int8 is not None)
    packing = Packing(planes, None if int8 is None else {"ssm": int8})
    of, to = make.slots(batch)
    places = torch.randperm(batch, generator=make.generator, device=backend.device).int()
    if make.padded and batch > 1:
        places[0] = -1
    records = make.empty(batch, packing.nbytes, dtype=torch.uint8)
    names = ("pack", "unpack") if int8 is None else ("pack int8", "unpack int8")
    acts: dict[str, Act] = {
        names[0]: partial(packing.pack, None, of, places, records),
        names[1]: partial(packing.unpack, None, to, places, records),
    }
    size = batch * (layout.payload_bytes_per_slot + packing.layout.payload_bytes_per_slot)
    return Workload(acts, dict.fromkeys(names, size), _arenas(planes) | {"records": records}, planes.arenas)


def _pack_int8(model: Model, batch: int, backend: Backend, make: Maker) -> Workload:
    return _pack(model, batch, backend, make, AXES[model.rule])


class _StepVectors(NamedTuple):
    """The vectors of a step in which every row reads one slot and writes another, without snapshots."""

    read: Tensor
    write: Tensor
    snapshot: Tensor
    tokens: Tensor


def _rows(batch: int, make: Maker) -> _StepVectors:
    return _StepVectors(**make.rows(batch, TOKENS))


def _step(
    name: str, planes: Planes, plane: str, batch: int, inputs: Sequence[Tensor | None], out: Tensor, act: Act,
    drafts: Drafted,
) -> Workload:  # fmt: skip
    """Returns the workload of one step of a layer and of the steps with drafts. A step moves a state for each row."""
    states = 2 * batch * planes[plane][0][0].nbytes
    size = states + out.nbytes + sum(tensor.nbytes for tensor in inputs if tensor is not None)
    sizes = {name: size} | dict.fromkeys(drafts.acts, states + drafts.nbytes)
    written = {"out": out, plane: planes[plane], **drafts.written}
    return Workload({name: act} | drafts.acts, sizes, written, planes.arenas, exact=False)


def delta_inputs(
    shape: tuple[int, ...], channels: int, batch: int, make: Maker, per_key: bool = False, tokens: int = TOKENS
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v, decay and beta of each token of a row: keys of norm 1, decays below 0, betas between 0 and 1.

    With these values, states stay bounded however often a step is repeated.

    Args:
        shape: Heads, keys and values of a state.
        channels: Channels of the convolution; q and k use those that the values leave.
        batch: Number of rows.
        make: Makes the tensors.
        per_key: Whether there is a decay for each key channel.
        tokens: Tokens of a row.
    """
    heads, key, value = shape
    key_heads = max(1, (channels - heads * value) // (2 * key))
    q, k = (make.normal(batch, tokens, key_heads, key) for _ in range(2))
    q, k = (make.empty(*x.shape, dtype=BF16).copy_(torch.nn.functional.normalize(x, dim=-1)) for x in (q, k))
    decay = make.normal(batch, tokens, heads, *(key,) * per_key).abs_().neg_()
    return (
        q,
        k,
        make.normal(batch, tokens, heads, value, dtype=BF16),
        decay,
        make.normal(batch, tokens, heads).sigmoid_(),
    )


def _gated_delta(model: Model, batch: int, backend: Backend, make: Maker) -> Workload:
    layout = replace(model.layout, layers=1)
    planes = _planes(layout, 2 * batch, backend, make, numbers=True)
    shape, channels = model.plane("ssm").shape, max(model.plane("conv").shape)
    inputs = delta_inputs(shape, channels, batch, make, model.rule == "kda")
    out, rows = make.like(inputs[2]), _rows(batch, make)
    act = partial(backend.gated_delta_step, *inputs, planes["ssm"][0], *rows, None, out)
    given = delta_inputs(shape, channels, batch, make, model.rule == "kda", DRAFTS)
    _, k, v, decay, beta = given
    tail = DeltaTail(ring(make, k), ring(make, v), ring(make, decay), ring(make, beta))
    step = partial(backend.gated_delta_step, *given, planes["ssm"][0], *rows[:3])
    drafts = drafted("gated delta", step, batch, make.like(v), tail, given)
    return _step("gated delta", planes, "ssm", batch, inputs, out, act, drafts)


def _selective(model: Model, batch: int, backend: Backend, make: Maker) -> Workload:
    layout = replace(model.layout, layers=1)
    planes = _planes(layout, 2 * batch, backend, make, numbers=True)
    tied, states, random = model.rule == "mamba2", planes["ssm"][0], make.normal
    states = states if tied else states.unsqueeze(1)  # Mamba-1 has one head
    heads, dim, state = states.shape[1:]
    groups = max(1, (max(model.plane("conv").shape) - heads * dim) // (2 * state)) if tied else 1
    own = (heads,) if tied else (heads, dim)

    def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x, z = (random(batch, tokens, heads, dim, dtype=BF16) for _ in range(2))
        b, c = (random(batch, tokens, groups, state, dtype=BF16) for _ in range(2))
        return x, z, b, c, random(batch, tokens, *own, dtype=BF16)

    x, z, b, c, dt = inputs(TOKENS)
    a = random(*(own if tied else (heads, dim, state))).exp_().neg_()
    d, bias, out = random(*own), random(*own).abs_(), make.like(x)
    rows = _rows(batch, make)
    act = partial(backend.selective_step, x, dt, a, b, c, states, *rows, d, z, bias, True, out)
    some = inputs(DRAFTS)
    tail = SelectiveTail(ring(make, some[0]), ring(make, some[2]), ring(make, some[4], torch.float32))
    given: dict[str, Any] = {
        "x": some[0], "dt": some[4], "a": a, "b": some[2], "c": some[3], "d": d, "z": some[1], "dt_bias": bias,
    }  # fmt: skip
    step = partial(
        backend.selective_step, **given, state=states, softplus=True, read=rows.read, write=rows.write,
        snapshot=rows.snapshot,
    )  # fmt: skip
    drafts = drafted("selective", step, batch, make.like(some[0]), tail, some)
    return _step("selective", planes, "ssm", batch, (x, z, b, c, dt, a, d, bias), out, act, drafts)


def _conv(model: Model, batch: int, backend: Backend, make: Maker) -> Workload:
    layout = replace(model.layout, layers=1, planes=(model.plane("conv"),))
    planes = _planes(layout, 2 * batch, backend, make, numbers=True)
    windows = planes["conv"][0]
    windows = windows if windows.shape[1] < windows.shape[2] else windows.transpose(1, 2)  # as `slot tap-1 channel`
    taps, channels = windows.shape[1] + 1, windows.shape[2]
    x, weight = make.normal(batch, TOKENS, channels, dtype=BF16), make.normal(channels, taps, dtype=BF16)
    out, rows = make.like(x), _rows(batch, make)
    act = partial(backend.conv_step, x, weight, None, windows, *rows, "silu", out)
    some = make.normal(batch, DRAFTS, channels, dtype=BF16)
    step = partial(backend.conv_step, some, weight, None, windows, *rows[:3])
    drafts = drafted("conv", step, batch, make.like(some), ConvTail(ring(make, some)), (some, weight))
    return _step("conv", planes, "conv", batch, (x, weight), out, act, drafts)


def _mamba3(model: Model, batch: int, backend: Backend, make: Maker) -> Workload:
    planes = _planes(replace(model.layout, layers=1), 2 * batch, backend, make, numbers=True)
    # angles within one turn, so that rounding cannot change the number of whole turns
    planes["angle"].uniform_(-1, 1, generator=make.generator)
    planes.scrub_null()
    kept = Mamba3State(*(planes[name][0] for name in Mamba3State._fields))
    (heads, dim, state), angles = kept.ssm.shape[1:], kept.angle.shape[-1]
    random = make.normal
    x, z = (random(batch, TOKENS, heads, dim, dtype=BF16) for _ in range(2))
    b, c = (random(batch, TOKENS, 1, state, dtype=BF16) for _ in range(2))
    dt, decay = random(batch, TOKENS, heads).abs_().clamp_(max=1), random(batch, TOKENS, heads).abs_().neg_()
    trap, rotation = random(batch, TOKENS, heads, dtype=BF16), random(batch, TOKENS, angles, dtype=BF16).div_(8)
    inputs = x, b, c, dt, decay, trap, rotation, random(heads, state), random(heads, state), random(heads)
    out, rows = make.like(x), _rows(batch, make)
    act = partial(backend.mamba3_step, *inputs, kept, *rows, z, out)
    size = out.nbytes + z.nbytes + sum(each.nbytes for each in inputs) + 2 * batch * sum(p[0].nbytes for p in kept)
    written = {"out": out} | {name: planes[name] for name in Mamba3State._fields}
    return Workload({"mamba3": act}, {"mamba3": size}, written, planes.arenas, exact=False)


MAKERS: dict[str, Callable[[Model, int, Backend, Maker], Workload]] = {
    "copy": _copies, "gather": _gather, "scatter": _scatter, "pack": _pack, "pack_int8": _pack_int8,
    "gated_delta": _gated_delta, "selective": _selective, "conv": _conv,
    "mamba3": _mamba3,
}  # fmt: skip

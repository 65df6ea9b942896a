"""What ops refuse before anything moves, and which ids and rows mean nothing: kernel and reference alike."""

import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from memstate.kernels.blocks import Blocks
from memstate.kernels.checks import check_distinct
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import COUNTERS
from tests.kernels.test_decode_steps import KINDS, made
from tests.support.decode_case import Case, Row, same_bits

OPS = {"conv_step": "conv", "gated_delta_step": "gdn", "selective_step": "mamba2"}
TWO = [Row(1, 1, tokens=2), Row(2, 3, tokens=2)]

each_step = pytest.mark.parametrize("op", OPS)


def build(op: str, backend: Backend, generator: torch.Generator, rows: list[Row] = TWO, tokens: int = 2) -> Case:
    return made(OPS[op], backend, generator, rows=rows, tokens=tokens, **KINDS[OPS[op]].small)


def run(case: Case, backend: Backend, **changed: Any) -> Tensor:
    out: Tensor = getattr(backend, case.op)(**(case.arguments() | changed))
    return out


def window_of(case: Case) -> Tensor:
    batch, tokens = case.inputs[case.like].shape[:2]
    state = case.memory.state
    steps = (state.shape[1] + tokens, *state.shape[2:]) if case.op == "conv_step" else (tokens, *state.shape[1:])
    return state.new_zeros(batch, *steps)


def refused(case: Case, backend: Backend, match: str, **changed: Any) -> None:
    """The call is refused with words that match, and no byte of the state changes."""
    with pytest.raises(ValueError, match=match):
        run(case, backend, **changed)
    case.memory.check_changed_only(set())


def column(values: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


# -- slots of decode steps ---------------------------------------------------------------------------------------------


@each_step
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_past_the_end_are_null(backend: Backend, generator: torch.Generator, op: str, dtype: torch.dtype) -> None:
    """The state is the first four slots of more: what lies behind is neither read nor written."""
    beyond = 2**31 - 1 if dtype is torch.int32 else 2**32 + 1
    ids = {"read": [1, 4, beyond, 2, 1], "write": [2, 3, 1, 4, beyond], "snapshot": [4, beyond, 0, 3, 0]}
    nulls = {name: [slot if slot < 4 else 0 for slot in slots] for name, slots in ids.items()}
    case = build(op, backend, generator, [Row(1, 1, tokens=2), *[Row(2, 2, tokens=2)] * 4])
    outs, memories = [], []
    for slots in (ids, nulls):
        twin = case.twin()
        twin.memory.state = twin.memory.state[:4]
        outs.append(run(twin, backend, **{name: column(s, backend.device, dtype) for name, s in slots.items()}))
        twin.memory.check_changed_only({1, 2, 3})
        memories.append(twin.memory.whole)
    assert same_bits(*outs) and same_bits(*memories)
    assert bool(outs[0][:3].isfinite().all()) and not outs[0][3:].any()


@each_step
def test_a_state_without_slots_is_all_null(backend: Backend, generator: torch.Generator, op: str) -> None:
    case = build(op, backend, generator)
    for state in (case.memory.state[:0], torch.empty_like(case.memory.state[:0])):
        assert not run(case, backend, state=state).any()
    case.memory.check_changed_only(set())


@each_step
def test_no_graph_is_built_and_none_is_written_to(backend: Backend, generator: torch.Generator, op: str) -> None:
    case = build(op, backend, generator)
    learnt = {name: t.requires_grad_() for name, t in case.arguments().items() if name in case.inputs}
    assert not run(case, backend, **learnt).requires_grad and not case.memory.state.requires_grad
    case = build(op, backend, generator)
    written = {"state": case.memory.state, "out": torch.empty_like(case.inputs[case.like]), "window": window_of(case)}
    for name, tensor in written.items():
        refused(case, backend, rf"^{name}: requires grad.*\.detach\(\)", **{name: tensor.detach().requires_grad_()})


# -- tensors of decode steps -------------------------------------------------------------------------------------------


def test_settings_and_dtypes_of_columns_are_named(backend: Backend, generator: torch.Generator) -> None:
    settings = {"conv_step": [("activation", "relu")], "selective_step": [("softplus", "no"), ("softplus", None)]}
    settings["gated_delta_step"] = [("scale", "2"), ("scale", torch.ones(())), ("scale", 10**400), ("scale", math.nan)]
    for op, wrong in settings.items():
        for name, value in wrong:
            refused(build(op, backend, generator), backend, rf"^{name}\b", **{name: value})
        floats = torch.zeros(2, device=backend.device)
        refused(build(op, backend, generator), backend, "^read: .*int32 or int64", read=floats)


@pytest.mark.parametrize(
    ("kind", "dims", "name"),
    [
        ("gdn", (2, 1, 4, 0), "value"),
        ("gdn", (2, 1, 0, 4), "key"),
        ("gdn", (0, 1, 4, 4), "head"),
        ("mamba2", (2, 1, 4, 0), "state"),
        ("mamba2", (2, 1, 0, 4), "dim"),
        ("mamba2", (0, 1, 4, 4), "head"),
        ("conv", None, "channel"),
    ],
)
def test_sizes_of_nothing_are_named(
    backend: Backend, generator: torch.Generator, kind: str, dims: tuple[int, ...] | None, name: str
) -> None:
    case = made(kind, backend, generator, rows=TWO, tokens=2, **({"dims": dims} if dims else {}))
    given = case.arguments()
    if kind == "conv":
        given |= {at: given[at][..., :0] for at in ("x", "bias", "state")} | {"weight": given["weight"][:0]}
    with pytest.raises(ValueError, match=rf"^{name}: expected a size of at least 1, got 0"):
        getattr(backend, case.op)(**given)


# -- memory that is shared ---------------------------------------------------------------------------------------------


@each_step
def test_D4_D12_what_is_written_shares_no_byte_with_anything(
    backend: Backend, generator: torch.Generator, op: str
) -> None:
    """With an input, a column of slots, the last slot, and each other. Beside the slots it lies well."""
    case = build(op, backend, generator)
    state, window, like = case.memory.state, window_of(case), case.inputs[case.like]
    refused(case, backend, rf"^out: bytes 0x.* {case.like} at 0x", out=like)
    memory = torch.zeros(window.numel() + like.numel() + 16, dtype=like.dtype, device=like.device)
    out, rows = memory[: like.numel()].view(like.shape), memory[like.numel() - 1 :].view(torch.int32)[:2]
    refused(case, backend, r"^out: .*\bread\b", out=out, read=rows)
    early, late = memory[: window.numel()].view(window.shape), memory[window.numel() - 4 :][: like.numel()]
    refused(case, backend, r"^(out|window): .*\b(out|window)\b", out=late.view(like.shape), window=early)
    elements = case.memory.whole[: case.memory.whole.numel() // 4 * 4].view(torch.float32)
    start = (state.data_ptr() - elements.data_ptr()) // 4
    for at in (start, start + 7 * state.stride(0)):
        refused(case, backend, r"^out: .*\bstate\b", out=elements[at : at + out.numel()].view(out.shape))
    inside = elements[start : start + window.numel()].view(window.shape)
    refused(case, backend, r"^window: .*\bstate\b", window=inside)
    first = case.memory.twin()
    roomy = torch.zeros(4, 2 * state[0].numel() + out.numel() + 16, device=state.device)
    slots = roomy.as_strided((4, *state.shape[1:]), (roomy.stride(0), *state.stride()[1:]))
    slots.copy_(state[:4])
    beside = roomy[1, state[0].numel() :][: out.numel()].view(out.shape)
    assert same_bits(run(case, backend, state=slots, out=beside), run(case, backend, state=first.state))


@each_step
def test_states_whose_slots_share_bytes_are_refused(backend: Backend, generator: torch.Generator, op: str) -> None:
    case = build(op, backend, generator)
    state, size = case.memory.state, case.memory.payload // 4
    for stride in (0, size - 4):
        shared = state.as_strided(state.shape, (stride, *state.stride()[1:]))
        refused(case, backend, r"^state: slots share bytes", state=shared)
    packed = torch.zeros(4, *state.shape[1:], device=backend.device)
    run(case, backend, state=packed)  # one behind the other is apart
    run(case, backend, state=packed[:1].as_strided(state[:1].shape, (0, *packed.stride()[1:])))  # one slot, any stride


@pytest.mark.parametrize("op", ["gather_slots", "scatter_slots", "scatter_accepted", "scatter_inputs"])
def test_planes_whose_slots_share_bytes_are_read_and_not_written(backend: Backend, op: str) -> None:
    device = backend.device
    plane = torch.arange(16.0, device=device).view(1, 1, 4, 4)
    shared = plane.expand(2, 3, 4, 4)
    ids = column([2, 1], device)
    if op == "gather_slots":
        out = torch.empty(2, 2, 4, 4, device=device)
        backend.gather_slots(shared, ids, out)
        assert same_bits(out, plane.expand(2, 2, 4, 4))
        return
    tail = {"scatter_slots": (4, 4), "scatter_accepted": (1, 4, 4), "scatter_inputs": (5, 4)}[op]
    columns = [ids] if op == "scatter_slots" else [ids] * 4
    source = torch.zeros(2, 2, *tail, device=device)
    arguments = (shared, columns[0], source) if op == "scatter_slots" else (shared, source, *columns)
    with pytest.raises(ValueError, match=r"^plane: slots share bytes"):
        getattr(backend, op)(*arguments)
    assert plane.flatten().tolist() == list(range(16))


def test_what_is_gathered_or_scattered_lies_outside_of_the_plane(backend: Backend) -> None:
    memory = torch.arange(64.0, device=backend.device)
    plane, ids = memory.view(2, 4, 8), column([1, 2], backend.device)
    for batch in (memory[:32].view(2, 2, 8), memory[-32:].view(2, 2, 8)):
        with pytest.raises(ValueError, match=r"^out: bytes 0x.* plane"):
            backend.gather_slots(plane, ids, batch)
        with pytest.raises(ValueError, match=r"^batch: bytes 0x.* plane"):
            backend.scatter_slots(plane, ids, batch)
    assert memory.tolist() == list(range(64))
    for name, call in (("out", backend.gather_slots), ("plane", backend.scatter_slots)):
        given = [plane.clone(), ids, torch.zeros(2, 2, 8, device=backend.device)]
        given[2 if name == "out" else 0].requires_grad_()
        with pytest.raises(ValueError, match=rf"^{name}: requires grad"):
            call(*given)
    early = memory.as_strided((2, 2, 8), (32, 8, 1))  # two slots of each layer: behind them is room
    gap = memory[16:32].view(2, 1, 8)
    backend.gather_slots(early, ids[:1], gap)
    assert gap.flatten().tolist() == [*range(8, 16), *range(40, 48)]


def test_shared_bytes_are_found_exactly(generator: torch.Generator) -> None:
    """Against sets of bytes: planes of one and two axes, packed, apart, interleaved and overlapping."""
    rng, found = random.Random(generator.initial_seed()), {True: 0, False: 0}
    for _ in range(1500):
        axes = tuple((rng.randint(1, 4), rng.randint(0, 14)) for _ in range(rng.randint(1, 2)))
        blocks = Blocks(1000, rng.randint(0, 5), axes)
        starts = [0]
        for count, stride in axes:
            starts = [start + i * stride for start in starts for i in range(count)]
        each = [set(range(1000 + start, 1000 + start + blocks.size)) for start in starts]
        union = set().union(*each)
        shared = len(union) < sum(map(len, each))
        start = rng.randint(995, 1060)
        end = start + rng.randint(0, 9)
        assert blocks.meets(start, end) == bool(union & set(range(start, end))), (blocks, start, end)
        with pytest.raises(ValueError) if shared else nullcontext():
            check_distinct("plane", blocks)
        found[shared] += 1
    assert min(found.values()) > 150


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_a_claim_of_less_than_nothing_is_named(backend: Backend) -> None:
    zeros = torch.zeros(COUNTERS, dtype=torch.int32, device=backend.device)
    with pytest.raises(ValueError, match=r"^n: .* got -1"):
        backend.claim(zeros.clone(), -1, zeros)
    assert not zeros.any()


@each_step
def test_more_rows_than_a_launch_has_programs_for_are_refused(
    backend: Backend, generator: torch.Generator, op: str
) -> None:
    """Rows, and heads of a selective update, are along axes of the grid that hold 65 535 programs."""
    case = build(op, backend, generator, [Row(1, 1, tokens=1)], 1)
    given = {name: x for name, x in case.arguments().items() if name in (*case.inputs, *Row._fields)}
    many = {name: x.new_zeros(65_536, *x.shape[1:]) for name, x in given.items()}
    told = r"expected at most 65535 of `{}` in one launch, got 65536"
    refused(case, backend, f"^{case.like}: {told.format('batch')}: launch parts of it", **many)
    if op == "selective_step":
        many = {name: x[:, :, :1].repeat(1, 1, 65_536, *[1] * (x.dim() - 3)) for name, x in case.inputs.items()}
        many |= {name: x[:1].repeat(65_536) for name, x in case.shared.items() if isinstance(x, Tensor)}
        refused(case, backend, f"^x: {told.format('head')}", **many, state=torch.zeros(2, 65_536, 8, 8).to(many["x"]))

"""Tests arguments that kernel and reference refuse before a byte moves, and slot ids that both skip."""

import math
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from memstate.kernels.blocks import PlaneBlocks
from memstate.kernels.checks import check_distinct
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import COUNTERS
from tests.kernels.test_decode_steps import KINDS, made
from tests.support.decode_case import Case, Row, same_bits

STEPS = {"conv_step": "conv", "gated_delta_step": "gdn", "selective_step": "mamba2", "mamba3_step": "mamba3"}
TWO = [Row(1, 1, tokens=2), Row(2, 3, tokens=2)]

each_step = pytest.mark.parametrize("op", STEPS)
each_plane = pytest.mark.parametrize("op", [op for op in STEPS if op != "mamba3_step"])  # a state is one tensor


def build(op: str, backend: Backend, generator: torch.Generator, rows: list[Row] = TWO, tokens: int = 2) -> Case:
    return made(STEPS[op], backend, generator, rows=rows, tokens=tokens, **KINDS[STEPS[op]].small)


def run(case: Case, backend: Backend, **changed: Any) -> Tensor:
    out: Tensor = getattr(backend, case.op)(**(case.arguments() | changed))
    return out


def refused(case: Case, backend: Backend, match: str, **changed: Any) -> None:
    """Checks that the call is refused with a message that matches, and that no byte of the state changes."""
    with pytest.raises(ValueError, match=match):
        run(case, backend, **changed)
    case.memory.check_changed_only(set())


def column(values: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


# -- slots of decode steps ---------------------------------------------------------------------------------------------


@each_step
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_past_the_end_are_null(backend: Backend, generator: torch.Generator, op: str, dtype: torch.dtype) -> None:
    """The state is the first four slots of a larger memory. The step neither reads nor writes the other slots."""
    beyond = 2**31 - 1 if dtype is torch.int32 else 2**32 + 1
    ids = {"read": [2, 4, beyond, 2, 1], "write": [2, 3, 1, 4, beyond], "snapshot": [4, beyond, 0, 3, 0]}
    nulls = {name: [slot if slot < 4 else 0 for slot in slots] for name, slots in ids.items()}
    case = build(op, backend, generator, [Row(slot, slot, tokens=2) for slot in range(1, 6)])
    outs, memories = [], []
    for slots in (ids, nulls):
        twin = case.twin()
        twin.memory.state = twin.memory.state[:4]
        outs.append(run(twin, backend, **{name: column(s, backend.device, dtype) for name, s in slots.items()}))
        twin.memory.check_changed_only({1, 2, 3})
        memories.append(twin.memory.whole)
    assert same_bits(*outs) and same_bits(*memories)
    assert bool(outs[0][:3].isfinite().all()) and not outs[0][3:].any()


@each_plane
def test_a_state_without_slots_is_all_null(backend: Backend, generator: torch.Generator, op: str) -> None:
    case = build(op, backend, generator)
    for state in (case.memory.state[:0], torch.empty_like(case.memory.state[:0])):
        assert not run(case, backend, state=state).any()
    case.memory.check_changed_only(set())


@each_step
def test_no_graph_is_built(backend: Backend, generator: torch.Generator, op: str) -> None:
    case = build(op, backend, generator)
    learnt = {name: t.requires_grad_() for name, t in case.arguments().items() if name in case.inputs}
    assert not run(case, backend, **learnt).requires_grad and not case.memory.state.requires_grad


# -- tensors of decode steps -------------------------------------------------------------------------------------------


def test_settings_that_cannot_be_meant_are_named(backend: Backend, generator: torch.Generator) -> None:
    settings = {"conv_step": [("activation", "relu")], "selective_step": [("softplus", "no"), ("softplus", None)]}
    settings["gated_delta_step"] = [("scale", "2"), ("scale", torch.ones(())), ("scale", 10**400), ("scale", math.nan)]
    for op, wrong in settings.items():
        for name, value in wrong:
            refused(build(op, backend, generator), backend, rf"^{name}\b", **{name: value})


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


# -- shared memory -----------------------------------------------------------------------------------------------------


@each_plane
def test_output_beside_the_slots_shares_nothing(backend: Backend, generator: torch.Generator, op: str) -> None:
    case = build(op, backend, generator)
    state, like = case.memory.state, case.inputs[case.like]
    first = case.memory.twin()
    roomy = torch.zeros(4, 2 * state[0].numel() + like.numel() + 16, device=state.device)
    slots = roomy.as_strided((4, *state.shape[1:]), (roomy.stride(0), *state.stride()[1:]))
    slots.copy_(state[:4])
    beside = roomy[1, state[0].numel() :][: like.numel()].view(like.shape)
    assert same_bits(run(case, backend, state=slots, out=beside), run(case, backend, state=first.state))


@each_plane
def test_states_whose_slots_share_bytes_are_refused(backend: Backend, generator: torch.Generator, op: str) -> None:
    case = build(op, backend, generator)
    state, size = case.memory.state, case.memory.payload // 4
    shared = state.as_strided(state.shape, (size - 4, *state.stride()[1:]))
    refused(case, backend, r"^state: slots share bytes", state=shared)
    packed = torch.zeros(4, *state.shape[1:], device=backend.device)
    run(case, backend, state=packed)  # adjacent slots share no byte
    run(case, backend, state=packed[:1].as_strided(state[:1].shape, (0, *packed.stride()[1:])))  # a single slot


def test_what_is_gathered_may_share_slots_and_lie_in_gaps(backend: Backend) -> None:
    plane, ids = torch.arange(16.0, device=backend.device).view(1, 1, 4, 4), column([2, 1], backend.device)
    out = torch.empty(2, 2, 4, 4, device=backend.device)
    backend.gather_slots(plane.expand(2, 3, 4, 4), ids, out)
    assert same_bits(out, plane.expand(2, 2, 4, 4))
    memory = torch.arange(64.0, device=backend.device)
    early = memory.as_strided((2, 2, 8), (32, 8, 1))  # two slots per layer, then a gap of 16 elements
    gap = memory[16:32].view(2, 1, 8)
    backend.gather_slots(early, ids[1:], gap)
    assert gap.flatten().tolist() == [*range(8, 16), *range(40, 48)]


def test_shared_bytes_are_found_exactly(generator: torch.Generator) -> None:
    """Compares the check with sets of bytes, for planes of one and two axes: packed, apart, interleaved,
    overlapping.
    """
    rng, cases = random.Random(generator.initial_seed()), {True: 0, False: 0}
    for _ in range(1500):
        axes = tuple((rng.randint(1, 4), rng.randint(0, 14)) for _ in range(rng.randint(1, 2)))
        blocks = PlaneBlocks(1000, rng.randint(0, 5), axes)
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
        cases[shared] += 1
    assert min(cases.values()) > 150


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
    """Rows, and heads of a selective update, each have an axis of the launch grid, which has at most 65 535
    programs.
    """
    case = build(op, backend, generator, [Row(1, 1, tokens=1)], 1)
    given = {name: x for name, x in case.arguments().items() if name in (*case.inputs, *Row._fields)}
    many = {name: x.new_zeros(65_536, *x.shape[1:]) for name, x in given.items()}
    told = r"expected at most 65535 of `{}` in one launch, got 65536"
    refused(case, backend, f"^{case.like}: {told.format('batch')}: launch parts of it", **many)
    if op == "selective_step":
        many = {name: x[:, :, :1].repeat(1, 1, 65_536, *[1] * (x.dim() - 3)) for name, x in case.inputs.items()}
        many |= {name: x[:1].repeat(65_536) for name, x in case.shared.items() if isinstance(x, Tensor)}
        refused(case, backend, f"^x: {told.format('head')}", **many, state=torch.zeros(2, 65_536, 8, 8).to(many["x"]))

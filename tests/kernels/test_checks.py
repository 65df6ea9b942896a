"""Tests arguments that kernel and reference refuse before a byte moves, and slot ids that both skip."""

import math
import random
from collections.abc import Callable
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


def gapped(case: Case, axis: int) -> dict[str, Any]:
    """Returns a state of one slot, whose elements have gaps along an axis."""
    state = case.memory.state
    strides = [stride * (2 if at == axis else 1) for at, stride in enumerate(state.stride())]
    return {"state": state.new_zeros(2 * state[0].numel()).as_strided((1, *state.shape[1:]), strides)}


def narrow(case: Case) -> dict[str, Any]:
    """Returns the arguments of a convolution of no channel."""
    given = case.arguments()
    return {name: given[name][..., :0] for name in ("x", "bias", "state")} | {"weight": given["weight"][:0]}


def shifted(x: Tensor) -> Tensor:
    """Returns a tensor of the shape of x that begins off an access of 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape)


def many(case: Case, *batch: int) -> dict[str, Any]:
    """Returns inputs that repeat one token by strides of 0."""
    return {name: x[:1, :1].expand(*batch, *x.shape[2:]) for name, x in case.inputs.items()}


def beside(name: str, value: Callable[[Tensor], Any]) -> tuple[Callable[[Case], dict[str, Any]], str]:
    """Returns a change that gives an argument beside `a` and `b`. value: computes it from a tensor of betas."""
    change = lambda case: {name: value(torch.ones_like(case.inputs["decay"][..., 0]))}  # noqa: E731
    return change, "^a, b: expected beta=None beside them, and no a_log"


def said(**changed: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda _: changed


def whole(**changed: Any) -> Callable[[Case], dict[str, Any]]:
    """Returns a change to a state of whole numbers, and to other arguments."""

    def change(case: Case) -> dict[str, Any]:
        state = torch.zeros_like(case.memory.state, dtype=torch.int8)
        return {"state": state, "scales": torch.ones_like(state[:, :, 0], dtype=torch.float32)} | changed

    return change


Change = Callable[[Case], dict[str, Any]]
ONE = {"rows": [Row(1, 1, tokens=2)], "dims": (1, 1, 1, 1)}
OF_WHOLE_BYTES = r"^state\.\w+: expected slots and heads that begin at multiples of 16"
# kind of step, its settings, the arguments that change, and what the error says
MEANINGLESS: list[tuple[str, dict[str, Any], Change, str]] = [
    ("conv", {"channels": 12}, lambda case: gapped(case, 1), r"^state: .*\(48, 24, 1\)"),
    ("conv", {"channels": 12}, lambda case: gapped(case, 2), r"^state: .*\(48, 12, 2\)"),
    ("conv, channel major", {"channels": 12}, lambda case: gapped(case, 1), r"^state: .*\(48, 2, 3\)"),
    ("conv, channel major", {"channels": 12}, lambda case: gapped(case, 2), r"^state: .*\(48, 1, 6\)"),
    ("conv", {}, narrow, "^channel: expected a size of at least 1, got 0"),
    *((kind, {"dims": dims}, said(), f"^{name}: expected a size of at least 1, got 0") for kind, dims, name in (
        ("gdn", (2, 1, 4, 0), "value"), ("gdn", (2, 1, 0, 4), "key"), ("gdn", (0, 1, 4, 4), "head"),
        ("mamba2", (2, 1, 4, 0), "state"), ("mamba2", (2, 1, 0, 4), "dim"), ("mamba2", (0, 1, 4, 4), "head"),
    )),
    ("conv", {}, said(activation="relu"), r"^activation\b"),
    *(("mamba2", {}, said(softplus=value), r"^softplus\b") for value in ("no", None)),
    *(("gdn", {}, said(scale=value), r"^scale\b") for value in ("2", torch.ones(()), 10**400, math.nan)),
    ("gdn", {}, lambda case: {"out": shifted(case.inputs["v"])}, r"\bout\b"),
    *(("rwkv7", {}, said(**given), told) for given, told in (
        ({"a": None}, "^a: expected a tensor, got NoneType"), ({"b": None}, "^b: expected a tensor, got NoneType"),
        ({"a": None, "b": None}, "^beta: expected a tensor, got NoneType"),
    )),
    ("rwkv7", {}, lambda case: {"b": case.inputs["b"][..., :-1]}, "^b: expected `batch token key_head key` ="),
    ("rwkv7", {}, lambda case: {"a": case.inputs["a"].double()}, "^a: expected one of"),
    *(("rwkv7", {}, *beside(name, value)) for name, value in (
        ("beta", lambda beta: beta), ("a_log", lambda beta: beta[0, 0]),
        ("sigmoid", lambda _: True), ("normalize", lambda _: True),
    )),
    *((kind, {"gates": True}, change, told) for kind in ("gdn", "kda") for change, told in (
        (said(sigmoid=1), r"\bsigmoid\b"), (said(normalize=None), r"\bnormalize\b"),
        (lambda case: {"a_log": case.shared["a_log"].long()}, r"\ba_log\b"),
        (said(a_log=None), "^dt_bias: expected None without a_log"),
    )),
    ("gdn", {"gates": True}, said(dt_bias=torch.zeros(2, 16)), r"\bdt_bias\b"),
    ("kda", {"gates": True}, said(dt_bias=torch.zeros(2)), r"\bdt_bias\b"),
    ("kda", {"gates": True}, lambda case: {"dt_bias": shifted(case.shared["dt_bias"])}, r"\bdt_bias\b"),
    *(("gdn", {}, whole(**given), told) for given, told in (
        ({"scales": None}, "^state: expected one of .* without scales, got torch.int8"),
        ({"state": torch.zeros(8, 2, 16, 16)}, "^state: expected one of .* with scales, got torch.float32"),
        ({"scales": torch.ones(8, 2, 15)}, r"^scales: expected float32 \(8, 2, 16\)"),
        ({"scales": torch.ones(7, 2, 16)}, r"^scales: expected float32 \(8, 2, 16\)"),
        ({"seed": 1}, "^lengths, seed: expected both"), ({"seed": True}, "^seed: .*got True"),
        ({"seed": -1}, "^seed: "), ({"layer": 2**31}, "^layer: "), ({"first_head": 0.0}, "^first_head: "),
    )),
    ("gdn", {}, said(lengths=torch.zeros(2, dtype=torch.int32), seed=1), "^lengths, seed: .*, beside scales"),
    ("gdn", {"dims": (2, 1, 24, 16)}, whole(), "^state: expected rows of a multiple of 16"),
    ("rwkv7", {}, whole(), "^scales: expected None beside a and b"),
    # the number of tokens is refused before their strides, and padding counts, too
    ("gdn", {"dims": (1, 1, 8, 8)}, lambda case: many(case, 2**15, 2**16),
     r"^v: expected fewer than 2\*\*31 tokens in a batch, got 32768 x 65536"),
    ("mamba2", ONE, lambda case: many(case, 1, 2**31), r"^x: .*fewer than 2\*\*31 tokens"),
    ("mamba2", ONE, lambda case: many(case, 1, 2**31 - 1), "^x: .*strides"),
    # `a` has a decay per channel, and lies in memory as `head dim state`
    ("mamba1", {"state_dim": True}, said(),
     r"^state: expected `slot head dim state` .*, got `slot head state dim`: .*a of"),
    *(("mamba3", {"dims": (1, 1, *dims)}, said(), "dim {}, state {} and angle {}".format(*dims))
      for dims in ((12, 16, 4), (8, 24, 4), (128, 128, 4), (8, 16, 12))),
    *(("mamba3", {"dims": (1, 1, *dims)}, said(), OF_WHOLE_BYTES) for dims in ((8, 16, 3), (2, 16, 4))),
    ("mamba3", {}, lambda case: {"state": tuple(case.arguments()["state"])}, "^state: expected Mamba3State.* tuple"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "change", "told"), MEANINGLESS)
def test_G1_D4_D15_D16_D19_D21_D23_what_cannot_be_meant_is_named(
    backend: Backend, generator: torch.Generator, kind: str, settings: dict[str, Any], change: Change, told: str
) -> None:
    case = made(kind, backend, generator, **({"rows": TWO, "tokens": 2} | settings))
    refused(case, backend, told, **change(case))


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

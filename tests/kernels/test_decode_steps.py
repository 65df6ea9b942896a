"""Tests of all decode steps: right outputs and states for any batch, chunks and memory, and no other changed byte."""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import OPS, Backend
from tests.kernels import test_conv, test_gated_delta, test_mamba3, test_selective
from tests.support.decode_case import (
    COINCIDING,
    Case,
    Row,
    check_chunks,
    check_rows_alone,
    far_apart,
    same_bits,
    vast,
)


class Kind(NamedTuple):
    """A kind of step: functions that build a step and compare it with exact results, and the settings of a
    small step.
    """

    make: Callable[..., Case]
    run: Callable[[Case, Backend], Tensor]
    small: dict[str, Any]


DIMS = {"dims": (1, 1, 8, 8)}
KINDS = {
    "conv": Kind(test_conv.build, test_conv.run, {"channels": 12}),
    "conv, channel major": Kind(partial(test_conv.build, channel_major=True), test_conv.run, {"channels": 12}),
    "gdn": Kind(test_gated_delta.build, test_gated_delta.run, DIMS),
    "kda": Kind(partial(test_gated_delta.build, per_key=True), test_gated_delta.run, DIMS),
    "gdn, value key": Kind(partial(test_gated_delta.build, value_key=True), test_gated_delta.run, DIMS),
    "kda, gates": Kind(
        partial(test_gated_delta.build, per_key=True, value_key=True, gates=True), test_gated_delta.run, DIMS
    ),
    "rwkv7": Kind(partial(test_gated_delta.build, per_key=True, low_rank=True), test_gated_delta.run, DIMS),
    "mamba2": Kind(test_selective.build, test_selective.run, DIMS),
    "mamba2, state dim": Kind(partial(test_selective.build, state_dim=True), test_selective.run, DIMS),
    "mamba1": Kind(partial(test_selective.build, kind="mamba1"), test_selective.run, DIMS),
    "mamba3": Kind(test_mamba3.build, test_mamba3.run, {"dims": (1, 1, 8, 8, 4)}),
}
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16 states of fp32": (torch.float16, torch.float32),
    "fp32 states of bf16": (torch.float32, torch.bfloat16),
}

# (kind, settings): sizes that do not fill a block or need several blocks; more or fewer taps than tokens
ODD: list[tuple[str, dict[str, Any]]] = [
    ("conv", {"channels": 262, "taps": 3}),
    ("conv", {"channels": 3, "taps": 6, "bias": False}),
    ("conv, channel major", {"channels": 5, "taps": 2}),
    ("conv", {"channels": 264, "state": torch.bfloat16, "inputs": torch.bfloat16}),
    ("mamba2", {"dims": (4, 2, 5, 7)}),
    ("mamba2", {"dims": (3, 3, 12, 20), "inputs": torch.bfloat16}),
    ("mamba2", {"dims": (1, 1, 20, 100), "without": ("z", "d")}),
    ("mamba2, state dim", {"dims": (3, 3, 12, 20), "inputs": torch.bfloat16}),
    ("mamba1", {"dims": (1, 1, 70, 16)}),
    ("mamba1", {"dims": (4, 2, 3, 5), "inputs": torch.float16}),
    ("gdn", {"dims": (3, 3, 5, 7), "inputs": torch.bfloat16}),
    ("gdn, value key", {"dims": (2, 1, 64, 8), "inputs": torch.bfloat16}),
    ("kda", {"dims": (3, 3, 5, 7)}),
    ("rwkv7", {"dims": (2, 1, 64, 8), "inputs": torch.bfloat16}),
    ("rwkv7", {"dims": (3, 3, 5, 7), "per_key": False, "value_key": True}),
    ("kda, gates", {"dims": (2, 1, 64, 8), "inputs": torch.float16}),
    ("mamba3", {"dims": (4, 2, 16, 32, 8), "inputs": torch.bfloat16}),
    ("mamba3", {"dims": (3, 3, 4, 32, 16), "gate": False}),
]

HALF, BRAIN = torch.float16, torch.bfloat16
# ODD and more, for the bounds. In either order of a state, lanes load whole accesses of 16 bytes, or a part of a block;
# several warps share a column; or sizes are odd, and heads grouped. Windows are longer and shorter than the step.
SIZES: list[tuple[str, dict[str, Any]]] = [
    *ODD,
    *((kind, {"taps": taps, "channels": channels, "tokens": tokens})
      for kind in ("conv", "conv, channel major")
      for taps, channels, tokens in ((2, 262, 1), (3, 12, 7), (4, 1, 3), (6, 3, 1), (6, 12, 7))),
    ("mamba1", {"dims": (1, 1, 12, 20)}),
    *(("mamba2", {"dims": dims, "inputs": inputs, "state": state, "state_dim": turned})
      for turned in (False, True)
      for dims, inputs, state in (
          ((2, 1, 24, 128), BRAIN, torch.float32), ((2, 2, 8, 72), torch.float32, BRAIN), ((1, 1, 3, 300), HALF, BRAIN),
      )),
    *((kind, {"dims": dims, "inputs": inputs, "scale": scale, "state": state, "value_key": turned})
      for kind, state in (("gdn", torch.float32), ("kda", BRAIN)) for turned in (False, True)
      for dims, inputs, scale in (
          ((2, 1, 128, 24), BRAIN, None), ((2, 2, 72, 8), torch.float32, None), ((1, 1, 300, 3), HALF, None),
          ((3, 3, 12, 20), torch.float32, 0.3), ((4, 2, 5, 7), torch.float32, 0.3),
      )),
]  # fmt: skip

each_kind = pytest.mark.parametrize("kind", KINDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def made(kind: str, backend: Backend, generator: torch.Generator, **settings: Any) -> Case:
    return KINDS[kind].make(backend, generator, **settings)


@pytest.mark.sample
@each_kind
@each_dtype
def test_G2_a_mixed_batch_agrees_with_its_statement(
    backend: Backend, generator: torch.Generator, kind: str, dtype: str
) -> None:
    """Kernel and reference are each within the bound on the same inputs.

    A kernel that rounded states between tokens would exceed the bound of fp32 outputs.
    """
    state, inputs = DTYPES[dtype]
    case = made(kind, backend, generator, state=state, inputs=inputs)
    if backend.name != "reference":
        KINDS[kind].run(case.twin(), Backend("reference", backend.device))
    KINDS[kind].run(case, backend)


@pytest.mark.sample(24)
@pytest.mark.parametrize(("kind", "sizes"), SIZES)
def test_G2_D1_D18_steps_of_every_size_and_order_agree_with_their_statement(
    backend: Backend, generator: torch.Generator, kind: str, sizes: dict[str, Any]
) -> None:
    tokens = sizes.get("tokens", 2)
    rows = [Row(1, 2, 3, tokens=tokens), Row(0, 4, tokens=1)]
    KINDS[kind].run(made(kind, backend, generator, **({"rows": rows, "tokens": tokens} | sizes)), backend)


@pytest.mark.sample(6)
@each_kind
def test_G2_repeats_bit_for_bit(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """The same step runs twice. The second time, it allocates its output."""
    first = made(kind, backend, generator)
    second = first.twin()
    assert same_bits(first.step(backend), getattr(backend, second.op)(**second.arguments()))
    assert same_bits(first.memory.whole, second.memory.whole)


@pytest.mark.sample(6)
@each_kind
def test_G2_a_row_does_not_depend_on_the_batch(backend: Backend, generator: torch.Generator, kind: str) -> None:
    state = torch.bfloat16 if kind in ("conv", "gdn", "mamba1") else torch.float32
    check_rows_alone(made(kind, backend, generator, state=state, **KINDS[kind].small), backend)


@pytest.mark.sample
@each_kind
@pytest.mark.parametrize("cuts", [[0, 1, 2, 3], [0, 1, 3], [0, 2, 3]], ids=str)
def test_G2_chunking_changes_no_bits(backend: Backend, generator: torch.Generator, kind: str, cuts: list[int]) -> None:
    """The state's dtype has all bits that the next chunk needs: those of the inputs in a window, fp32 in a state."""
    dtype = torch.bfloat16 if kind == "conv, channel major" else torch.float32
    check_chunks(made(kind, backend, generator, state=dtype, inputs=dtype, **KINDS[kind].small), backend, cuts)


@pytest.mark.sample
@each_kind
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_beyond_the_step(backend: Backend, generator: torch.Generator, kind: str, dtype: torch.dtype) -> None:
    counts = {9: 2, -3: 0} | ({2**32 + 1: 2, 1 - 2**32: 0, -(2**63): 0} if dtype is torch.int64 else {})
    case = made(
        kind, backend, generator, rows=[Row(1, 2 + i, tokens=2) for i in range(len(counts))], tokens=2,
        **KINDS[kind].small,
    )  # fmt: skip
    strange, plain = case.twin(), case.twin()
    plain.rows = [row._replace(tokens=n) for row, n in zip(case.rows, counts.values(), strict=True)]
    column = torch.tensor(list(counts), dtype=dtype, device=backend.device)
    out = getattr(backend, case.op)(**(strange.arguments() | {"tokens": column}))
    assert same_bits(out, plain.step(backend))
    assert same_bits(strange.memory.whole, plain.memory.whole)


@pytest.mark.sample(6)
@each_kind
def test_B14_padded_rows_change_nothing(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """All entries are padding, with any values in the other columns. Outputs are zeros, and no byte changes."""
    rows = [row for null in (0, -1, -7) for row in (Row(null, null, null), Row(1, null, 2), Row(3, null, 3, 1))]
    case = made(kind, backend, generator, rows=rows)
    assert not KINDS[kind].run(case, backend).any()
    case.memory.check_changed_only(set())


@each_kind
def test_B15_one_token_from_nothing_is_no_padding(backend: Backend, generator: torch.Generator, kind: str) -> None:
    case = made(kind, backend, generator, rows=[Row(0, 1, tokens=1), Row(0, 0, tokens=1)], tokens=1)
    assert bool(KINDS[kind].run(case, backend)[0].any()) and bool(case.memory.state[1].any())


@pytest.mark.sample(6)
@each_kind
def test_B16_null_reads_as_zeros(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """Slot 0 and the bytes before it are NaN, so a read of these bytes would show."""
    case = made(
        kind, backend, generator, rows=[Row(0, 1), Row(0, 0), Row(0, 2, 3, 0), Row(-1, 4), Row(-1, 0), Row(-1, 5, 6, 0)]
    )
    out = KINDS[kind].run(case, backend)
    assert bool(out[::3].isfinite().all()) and not out[[1, 2, 4, 5]].any()
    assert not case.memory.state[[2, 3, 5, 6]].any()  # rows without tokens store the zeros that they read


@pytest.mark.sample
@each_kind
@pytest.mark.parametrize("row", COINCIDING, ids=lambda row: str(row[:3]))
def test_B40_slots_of_one_row_may_coincide(backend: Backend, generator: torch.Generator, kind: str, row: Row) -> None:
    """A second row has no tokens. Its slot numbers are higher by three, and coincide in the same way."""
    other = Row(*(slot + 3 if slot > 0 else slot for slot in row[:3]), tokens=0)
    KINDS[kind].run(
        made(kind, backend, generator, rows=[row._replace(tokens=2), other], tokens=2, **KINDS[kind].small), backend
    )


@pytest.mark.sample(6)
@each_kind
def test_B40_rows_may_read_one_slot(backend: Backend, generator: torch.Generator, kind: str) -> None:
    """Several requests start from one cached state, which stays unchanged."""
    KINDS[kind].run(made(kind, backend, generator, rows=[Row(1, 2), Row(1, 3), Row(1, 4, 5)]), backend)


@pytest.mark.sample(6)
@each_kind
def test_B38_slots_beyond_2_31_elements(backend: Backend, generator: torch.Generator, kind: str) -> None:
    near = made(kind, backend, generator, rows=[Row(2, 2)], state=torch.float16)
    far = near.twin()
    far.memory.state = far_apart(3, near.memory.state[2], 2**30 + 8)
    far.memory.state[2] = near.memory.state[2]
    assert same_bits(far.step(backend), near.step(backend))
    assert same_bits(far.memory.state[2], near.memory.state[2])


class FirstProgram:
    """A kernel of which each launch runs the first program only."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.kernel[(1,) * len(grid)]


@pytest.mark.parametrize("op", ["gated_delta_step", "selective_step"])
def test_B38_padding_beyond_2_31_elements(backend: Backend, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Tokens have 2^15 heads of 2^15 elements. Only the first program runs, so only the first elements become zeros."""
    if backend.name != "interpreter":
        return  # the other programs would take too long
    module = import_module(f"memstate.kernels.{OPS[op]}")
    monkeypatch.setattr(module, f"_{op}", FirstProgram(getattr(module, f"_{op}")))

    def zeros(*shape: int) -> Tensor:
        return vast(2 * math.prod(shape), backend.device).view(torch.float16).view(shape)

    (x, out), short, few = (zeros(1, 3, 2**15, 2**15) for _ in range(2)), zeros(1, 3, 1, 1), zeros(1, 3, 2**15)
    slots = torch.zeros(1, dtype=torch.int32)
    given = {"state": zeros(2, 2**15, 1, 2**15), "read": slots, "write": slots, "snapshot": slots, "tokens": slots}
    if op == "selective_step":
        given |= {"x": x, "dt": few, "a": few[0, 0], "b": short, "c": short, "state": zeros(2, 2**15, 2**15, 1)}
    else:
        given |= {"q": short, "k": short, "v": x, "decay": few, "beta": few}
    out[0, :, 0, :8] = out[0, :, 1] = 7
    getattr(backend, op)(**given, out=out)
    assert not out[0, :, 0].any() and bool((out[0, :, 1] == 7).all())


@each_kind
def test_empty_batch(backend: Backend, generator: torch.Generator, kind: str) -> None:
    assert made(kind, backend, generator, rows=[]).step(backend).shape[0] == 0


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
@pytest.mark.parametrize("dims", [(2, 1, 1, 8), (2, 1, 8, 1)], ids=str)
def test_D1_D18_an_order_of_the_state_that_is_both_is_one(
    backend: Backend, generator: torch.Generator, kind: str, dims: tuple[int, int, int, int]
) -> None:
    """If one of the two axes has length 1, both orders are the same bytes, and must give the same results."""
    plain = made(kind, backend, generator, dims=dims)
    other = plain.twin()
    state = other.memory.state
    other.memory.state = state.as_strided(state.shape, (*state.stride()[:2], 1, dims[2]))
    assert same_bits(plain.step(backend), other.step(backend))
    assert same_bits(plain.memory.whole, other.memory.whole)

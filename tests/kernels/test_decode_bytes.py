"""Counts the bytes that decode steps move, from the addresses of their loads and stores."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="without Triton there are no kernels")

from memstate.kernels.configs import SelectiveConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.gated_delta import blocks as delta_blocks
from tests.kernels.test_decode_steps import made
from tests.kernels.test_tails import with_tail
from tests.support.addresses import LOAD, STORE, Bytes
from tests.support.decode_case import SLOTS, Case, Row
from tests.support.recorded import recorded

TOKENS, RING, PENDING = 4, 7, 2  # tokens of a step with a tail, places of a ring, pending tokens
DELTA = {"dims": (4, 2, 16, 48)}
MAMBA = {"dims": (4, 2, 24, 16)}
PLAIN: dict[str, dict[str, Any]] = {
    "conv": {"channels": 80}, "conv, channel major": {"channels": 80}, "gdn": DELTA, "gdn, value key": DELTA,
    "mamba2": MAMBA, "mamba3": {"dims": (4, 2, 16, 16, 4)},
}  # fmt: skip
TAILED: list[tuple[str, dict[str, Any]]] = [
    ("conv", {"channels": 80}), ("conv", {"channels": 80, "taps": PENDING + 1}),
    ("gdn", DELTA), ("gdn, value key", DELTA), ("rwkv7", DELTA), ("rwkv7", DELTA | {"value_key": True}),
    ("mamba2", MAMBA), ("mamba1", MAMBA),
]  # fmt: skip


def often(moved: Bytes, tensor: Tensor) -> list[set[int]]:
    """Returns for each row of a tensor the set of the numbers of accesses to its bytes. {2}: each byte had two.

    moved: the bytes of all accesses of one kind, in order.
    """
    rows = []
    for row in tensor:
        first, last = np.searchsorted(moved, (start := row.data_ptr(), start + row.nbytes))
        rows.append({*np.bincount(moved[first:last] - start, minlength=row.nbytes).tolist()})
    return rows


def times(case: Case) -> dict[str, int]:
    """Returns how often a step loads each byte of a real token, by the name of an input or a ring.

    A program computes one tile (a block of values of a head), and loads what heads and tiles share anew.
    """
    given, (heads, *sizes) = case.inputs, case.memory.state.shape[1:]
    if case.op == "conv_step":
        return {"x": 1}
    if case.op == "gated_delta_step":
        width = case.memory.state.element_size()
        tiles = -(-sizes[1] // delta_blocks(*sizes, width, 16 // width)[1])
        shared = tiles * heads // given["q"].shape[2]
        return dict.fromkeys("qkab", shared) | {"v": 1, "decay": tiles, "gate": tiles, "beta": tiles}
    if case.op == "selective_step":
        tied = given["dt"].dim() == 3
        tiles = -(-sizes[0] // SelectiveConfig().blocks(*sizes, tied)[0])
        return dict.fromkeys("bc", tiles * heads // given["b"].shape[2]) | {"x": 1, "z": 1, "dt": tiles if tied else 1}
    heads = given["dt"].shape[2]
    once = dict.fromkeys(("x", "z", "dt", "decay", "trap"), 1)
    return once | dict.fromkeys("bc", heads // given["b"].shape[2]) | {"rotation": heads}


def step(kind: str, generator: torch.Generator, tokens: int, **settings: Any) -> Case:
    """Returns a step of three rows: one works in place; one is padding; one writes another slot and a snapshot."""
    rows = [Row(1, 1, 0, tokens), Row(0, 0, 0, tokens), Row(2, 3, 4, tokens)]
    return made(kind, Backend("interpreter"), generator, rows=rows, tokens=tokens, inputs=torch.bfloat16, **settings)


def check(case: Case, first: int = 1) -> tuple[Bytes, Bytes]:
    """Runs a step. Checks that slot 2 is read once, slot 1 `first` times, that slots 1, 3 and 4 and all output are
    written once, and nothing else. Returns the loaded and the stored bytes, in order.
    """
    with recorded() as log:
        out = case.step(Backend("interpreter"))
    accesses = [(access.kind, np.unique(access.bytes())) for launch in log.launches for access in launch.accesses]
    loaded, stored = (np.sort(np.concatenate([at for of, at in accesses if of == kind])) for kind in (LOAD, STORE))
    state, rest = case.arguments()["state"], [{0}] * (SLOTS - 5)
    for plane in [state] if isinstance(state, Tensor) else state:
        assert often(loaded, plane) == [{0}, {first}, {1}, {0}, {0}, *rest]
        assert often(stored, plane) == [{0}, {1}, {0}, {1}, {1}, *rest]
    assert often(stored, out) == [{1}] * 3 and often(loaded, out) == [{0}] * 3
    return loaded, stored


@pytest.mark.sample(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", PLAIN)
def test_D25_a_step_moves_each_byte_of_a_state_once(generator: torch.Generator, kind: str, dtype: torch.dtype) -> None:
    case = step(kind, generator, 1, state=dtype, **PLAIN[kind])
    loaded, _ = check(case)
    for name, x in case.inputs.items():
        assert often(loaded, x) == [{times(case)[name]}, {0}, {times(case)[name]}], name
    if case.op == "conv_step":
        assert often(loaded, case.shared["weight"]) == [{2}] * 80


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("kind", ["gdn", "gdn, value key", "mamba2", "mamba2, state dim"])
def test_D25_a_step_moves_each_whole_number_and_scale_once(
    generator: torch.Generator, kind: str, dtype: torch.dtype
) -> None:
    case = step(kind, generator, 1, state=dtype, **PLAIN[kind.removesuffix(", state dim")])
    loaded, stored = check(case)
    scales, rest = case.memory.scales, [{0}] * (SLOTS - 5)
    assert scales is not None
    assert often(loaded, scales) == [{0}, {1}, {1}, {0}, {0}, *rest]
    assert often(stored, scales) == [{0}, {1}, {0}, {1}, {1}, *rest]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("kind", "settings"), TAILED)
def test_D25_a_tail_moves_each_byte_of_a_state_once(
    generator: torch.Generator, kind: str, settings: dict[str, Any]
) -> None:
    """Row 0 has 2 pending tokens, which begin at place 4 of the ring; row 2 has no tail.

    If the pending inputs fill a window, the step does not read the window.
    """
    case = step(kind, generator, TOKENS, **settings)
    with_tail(case, generator, RING, [2, 1, 0], [4, 0, 0], [PENDING, 2, 2], [PENDING, 2, 2])
    loaded, stored = check(case, first=settings.get("taps") != PENDING + 1)
    for name, ring in case.shared["tail"]._asdict().items():
        if ring is not None:
            assert often(loaded, ring[2]) == [{0}] * 4 + [{times(case)[name]}] * PENDING + [{0}], name
            assert often(stored, ring[2]) == [{1}] * 3 + [{0}] * 3 + [{1}], name
            assert [*often(loaded, ring[:2]), *often(stored, ring[:2])] == [{0}] * 4, name

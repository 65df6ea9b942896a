"""Spoils each tensor argument of operations in every way. It must be refused by name before a byte moves.

Refusals that depend on addresses or on two arguments: test_checks.py, test_slices.py.
"""

import re
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any, NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from tests.support import op_cases
from tests.support.op_case import Case

OWN = ("registers", "planes", "records", "rings", "record", "bitmap", "counters")  # arguments that memstate makes


class Refused(NamedTuple):
    """What an operation refuses, besides tensors that do not fit.

    written: outputs, which share no byte with an argument. rows: whether the first axis of `out` is entries, not slots.
    aligned: arguments that lanes move 16 bytes at a time.
    """

    written: tuple[str, ...] = ()
    rows: bool = False
    aligned: tuple[str, ...] = ()


NOTHING = Refused()
INNER = "all its tensors come from memstate"
PARTS = "the two steps refuse; what they may not share: test_conv_delta.py"
REFUSED: dict[str, Refused | str] = {  # op -> what it refuses, or why nothing is tested here
    "claim": INNER, "ownership": INNER, "run_data": INNER, "run_rows": INNER,
    "release": NOTHING, "resolve": NOTHING, "audit": NOTHING, "plan": NOTHING, "keep_path": NOTHING,
    "copy_slots": NOTHING, "zero_slots": NOTHING,
    "conv_step": Refused(("out", "state", "tail"), True),
    "gated_delta_step": Refused(("out", "state", "tail", "scales"), True),
    "conv_delta_step": PARTS,
    "selective_step": Refused(("out", "state", "scales", "tail"), True, ("a",)),
    "mamba3_step": Refused(("out", "state"), True),
    "gather_slots": Refused(("out",), True),
    "scatter_slots": Refused(("plane",)),
    "scatter_states": Refused(("plane", "conv")),
    "pack_slots": Refused(("out",), aligned=("out",)),
    "unpack_slots": Refused(aligned=("source",)),
    "pack_int8": Refused(("out",), aligned=("out",)),
    "unpack_int8": Refused(aligned=("source",)),
}  # fmt: skip
TOLD = {op: told for op, told in REFUSED.items() if isinstance(told, Refused)}


def shorter(axis: int) -> Callable[[Tensor], Tensor | None]:
    return lambda t: t.narrow(axis, 0, t.shape[axis] - 1) if t.dim() > axis and t.shape[axis] else None


def reordered(t: Tensor) -> Tensor | None:
    """Returns the same numbers with the last two axes in the other memory order, or None if this is not possible."""
    if t.dim() < 3 or min(t.shape[-2:]) == 1:
        return None
    return t.mT.contiguous().mT if t.is_contiguous() else t.contiguous()


SPOILT: dict[str, Callable[[Tensor], Any]] = {  # name -> a function that spoils a tensor, or returns None if it cannot
    "a list": lambda t: t.tolist(),
    "elsewhere": lambda t: t.to("meta"),
    "another dtype": lambda t: t.to(torch.complex128) if t.is_complex() else t.double(),
    "negated": lambda t: torch._neg_view(t) if t.is_floating_point() else None,  # a view whose memory has other values
    "an axis more": lambda t: t[None],
    "an axis less": lambda t: t[0] if len(t) else None,
    "spread": lambda t: t.repeat_interleave(2, -1)[..., ::2] if t.shape[-1] > 1 else None,
    "reordered": reordered,
    "shorter": shorter(0), "axis 1 shorter": shorter(1), "axis 2 shorter": shorter(2), "axis 3 shorter": shorter(3),
}  # fmt: skip
PLANES = {"plane", "conv"}  # the planes of one call may share an arena
# way of spoiling -> arguments that it does not spoil, because their length, size or memory order is free
FITS = {
    "shorter": ("ids", "state", "slots", "out", "source", "packet", "tail", "nodes"),
    "axis 1 shorter": ("plane", "tail", "parents", "nodes"),
    "axis 2 shorter": ("plane", "conv"), "axis 3 shorter": ("conv",),
    "reordered": ("state", "tail", "scales", *PLANES),
}  # fmt: skip


def given(arguments: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (name of an argument, name of its field or "", tensor) for all tensors that a caller gives."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield name, "", value
        elif isinstance(value, tuple) and name not in (*OWN, "rules"):
            yield from ((name, field, part) for field, part in value._asdict().items() if part is not None)  # type: ignore[attr-defined]


def changed(arguments: dict[str, Any], *values: tuple[str, str, Any]) -> dict[str, Any]:
    """Returns the arguments with some of them, or some of their fields, replaced."""
    for name, field, value in values:
        arguments = arguments | {name: arguments[name]._replace(**{field: value}) if field else value}
    return arguments


def made(op: str, seed: int) -> Case:
    case = op_cases.made(op, seed)
    if "registers" in case.arguments:  # operations trust the registers of a register file
        case.arguments["registers"] = case.arguments["registers"]._replace(trusted=False)
    return case


@pytest.mark.sample(70)
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("op", TOLD)
def test_G1_a_tensor_that_does_not_fit_is_named_and_nothing_changes(backend: Backend, op: str, how: str) -> None:
    for seed in range(6):
        case = made(op, seed)
        before = [whole.clone() for whole in case.memory]
        for name, field, tensor in given(case.arguments):
            if name in (*OWN, *FITS.get(how, ())) or (spoilt := SPOILT[how](tensor)) is None:
                continue
            named = field or name
            # The message may name the other tensor instead, but not that of a tree.
            others = "" if how == "a list" or name == "parents" else rf"|\w+: expected|expected .*\b{named}\b"
            with pytest.raises(ValueError, match=rf"^(?:\w+\.)?(?:{re.escape(named)}\b{others})"):
                getattr(backend, op)(**changed(case.arguments, (name, field, spoilt)))
        assert all(map(torch.equal, case.memory, before))


def may_lack(op: str, name: str) -> bool:
    """Says whether an argument may be None. Betas are left out only with other arguments in their place."""
    hint = signature(getattr(Backend, op)).parameters[name].annotation
    return name != "beta" and type(None) in get_args(hint)


@pytest.mark.parametrize("op", TOLD)
def test_G1_what_is_left_out_is_named(backend: Backend, op: str) -> None:
    case = made(op, 1)
    for name, field, _ in given(case.arguments):
        if not field and name not in OWN and not may_lack(op, name):
            with pytest.raises(ValueError, match=rf"^{name}\b"):
                getattr(backend, op)(**(case.arguments | {name: None}))
    if "packet" in case.arguments:  # a packet may be longer than its batch needs, but not shorter than a header
        with pytest.raises(ValueError, match=r"^packet: expected \d+ int32 or more"):
            getattr(backend, op)(**(case.arguments | {"packet": case.arguments["packet"][:15]}))


@pytest.mark.parametrize("op", [op for op, told in TOLD.items() if told.aligned])
def test_D4_what_begins_off_16_bytes_is_named(backend: Backend, op: str) -> None:
    refused = set()
    for case in (made(op, seed) for seed in range(16)):
        for name, _, tensor in given(case.arguments):
            if name in TOLD[op].aligned and tensor.dim() > 1:  # a tensor of one number per head needs no alignment
                whole = torch.zeros(tensor.nbytes + 4096, dtype=torch.uint8)[8:]
                shifted = whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
                with pytest.raises(ValueError, match=rf"^{name}: .*16"):
                    getattr(backend, op)(**(case.arguments | {name: shifted}))
                refused.add(name)
    assert refused == set(TOLD[op].aligned)


def overlaid(*tensors: Tensor) -> list[Tensor]:
    """Returns tensors of these shapes and strides that begin at the same address."""
    room = torch.zeros(max(t.untyped_storage().nbytes() for t in tensors), dtype=torch.uint8)
    return [room[: room.numel() // 16 * 16].view(t.dtype).as_strided(t.shape, t.stride()) for t in tensors]


@pytest.mark.parametrize("op", [op for op, told in TOLD.items() if told.written])
def test_D4_D12_what_is_written_shares_no_byte_with_anything_and_no_graph_has_it(backend: Backend, op: str) -> None:
    """An output that shares a byte with any argument, or needs gradients, is refused. test_checks.py tests which bytes
    count as shared.
    """
    for case in (made(op, seed) for seed in range(6)):
        call, before = getattr(backend, op), [whole.clone() for whole in case.memory]
        for name, part, written in given({name: case.arguments[name] for name in TOLD[op].written}):
            told = f"{name}.{part}" if part else name
            for other, field, tensor in given(case.arguments):
                together = {name, other} <= PLANES
                if tensor is not None and tensor.numel() and (name, part) != (other, field) and not together:
                    here, there = overlaid(written, tensor)
                    with pytest.raises(ValueError, match=r"^[\w.]+: (?:bytes 0x|.*shares? bytes).*"):
                        call(**changed(case.arguments, (name, part, here), (other, field, there)))
            if written.is_floating_point() or written.is_complex():
                with pytest.raises(ValueError, match=rf"^{told}: requires grad.*\.detach\(\)"):
                    call(**changed(case.arguments, (name, part, written.detach().requires_grad_())))
            slot = int(name in ("plane", "conv"))
            if not (TOLD[op].rows and name == "out") and written.shape[slot] > 1:
                strides = [0 if axis == slot else stride for axis, stride in enumerate(written.stride())]
                with pytest.raises(
                    ValueError, match=rf"^{told}: (?:slots share bytes|records of \d+ bytes lie|`.* must)"
                ):
                    call(**changed(case.arguments, (name, part, written.as_strided(written.shape, strides))))
        assert all(map(torch.equal, case.memory, before))

"""Tests that a check which remembers kinds of calls passes and refuses what the check itself does."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from memstate.kernels import remembered
from memstate.kernels.configs import ConvConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.remembered import MOST, Checked
from memstate.kernels.tables import Mamba3State, StepMarks
from memstate.kernels.tuned import trying
from tests.support.decode_case import same_bits
from tests.support.op_case import CPU
from tests.support.op_cases import Moving
from tests.support.step_forms import checked, forms

Arguments = dict[str, Any]
FULL = [
    pytest.param(op, given, id=f"{op}, {form}")
    for op, form, given in forms()
    if "tree with" in form or (op == "mamba3_step" and form == "marks")
]
each_case = pytest.mark.parametrize(("op", "given"), FULL)


class Own(Tensor):
    """A class of tensors."""


class Text(str):
    """A class of strings."""


class Name(Text, Enum):
    """Another class of strings."""

    SILU = "silu"


class OwnMarks(StepMarks):
    """A class of marks."""


def like(tensor: Tensor, memory: Tensor, start: int = 0) -> Tensor:
    """Returns a tensor of this dtype, shape and strides that begins with a byte of some memory."""
    place = memory.storage_offset() * memory.element_size() + start
    new = torch.empty(0, dtype=tensor.dtype)
    return new.set_(memory.untyped_storage(), place // new.element_size(), tensor.shape, tensor.stride())


def fresh(tensor: Tensor, start: int = 0) -> Tensor:
    """Returns a tensor of this dtype, shape and strides in memory of its own, `start` bytes behind an alignment."""
    return like(tensor, torch.zeros(2 * tensor.untyped_storage().nbytes() + 64, dtype=torch.uint8), start)


def shrunk(tensor: Tensor) -> Tensor:
    """Returns a tensor whose memory was given back."""
    new = fresh(tensor)
    new.untyped_storage().resize_(0)
    return new


def turned(tensor: Tensor) -> Tensor | None:
    """Returns a tensor whose last two axes lie in the other order; None if there is none."""
    new = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
    return None if new.stride() == tensor.stride() else new


# a change of a tensor -> the tensor, which is of another kind; None where there is no such tensor
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    **{str(dtype): lambda t, dtype=dtype: None if t.dtype == dtype else t.to(dtype) for dtype in (
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.int8,
    )},
    "off its alignment": lambda t: fresh(t, 16 + t.element_size()),
    "negative": lambda t: torch._neg_view(t),
    "requires grad": lambda t: t.clone().requires_grad_() if t.is_floating_point() else None,
    "of another class": lambda t: t.as_subclass(Own),
    "without memory": shrunk,
    "shorter": lambda t: t[:-1],
    "without elements": lambda t: t[:0],
    "on another device": lambda t: t.to("meta"),
    "sparse": Tensor.to_sparse,
    "another order": turned,
    "gaps": lambda t: None if t.dim() < 2 else torch.cat([t, t], 1)[:, : t.shape[1]],
    "no tensor": lambda t: [t],
}  # fmt: skip
OPTIONS = (
    None, True, False, 1, 0, 2, 1.0, 0.0, -0.0, 0.5, float("nan"), float("inf"), 10**400, np.float64(0.5), np.bool_(1),
    "silu", "relu", Text("silu"), Name.SILU, torch.ones(()), [1],
)  # fmt: skip


def told(check: Callable[..., Any], arguments: Arguments) -> tuple[str, Any]:
    """Returns what a check finds, or why it refuses; and its result, None if it refuses."""
    try:
        result = check(*arguments.values())
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error)}: {error}", None
    return repr(result.found if isinstance(result, Checked) else result), result


def agreed(check: Any, arguments: Arguments) -> Any:
    """Asks for one kind of call twice. Returns the last result, after a comparison with the check itself."""
    plain, _ = told(check.__wrapped__, arguments)
    for _ in range(2):
        found, result = told(check, arguments)
        assert found == plain
    return result


def leaves(arguments: Arguments) -> Iterator[tuple[Tensor, Callable[[Any], Arguments]]]:
    """Yields each tensor, and a function that returns the arguments with another one in its place."""
    for name, given in arguments.items():
        if isinstance(given, Tensor):
            yield given, lambda new, name=name: arguments | {name: new}
        for field, part in given._asdict().items() if isinstance(given, tuple) else ():
            if part is not None:
                yield (
                    part,
                    lambda new, name=name, field=field: arguments | {name: arguments[name]._replace(**{field: new})},
                )


@each_case
def test_tensors_of_another_kind_are_checked(op: str, given: Arguments) -> None:
    remembered.forget()
    check, arguments = checked(op, given)
    first, outcomes = check(*arguments.values()), set()
    for (tensor, using), (name, change) in product(leaves(arguments), CHANGES.items()):
        if (new := change(tensor)) is not None:
            result = agreed(check, using(new))
            assert result is not first, name
            outcomes.add(result is None)
    assert outcomes == {False, True} and check(*arguments.values()) is first


@each_case
def test_tensors_in_the_memory_of_others_are_checked(op: str, given: Arguments) -> None:
    """Each tensor lies where another one begins, or where it ends. Inputs may share bytes, and are one kind of call."""
    remembered.forget()
    check, arguments = checked(op, given)
    first, results = check(*arguments.values()), []
    for (tensor, using), (other, _) in product(leaves(arguments), leaves(arguments)):
        for start in (0, other.nbytes - 16, 16 - tensor.nbytes):
            if (other.data_ptr() + start - tensor.data_ptr()) % 16 == 0:
                try:
                    new = like(tensor, other, start)
                except RuntimeError:  # not enough memory there
                    continue
                results.append(agreed(check, using(new)))
    assert None in results and first in results


@each_case
def test_options_of_another_type_are_checked(op: str, given: Arguments) -> None:
    check, arguments = checked(op, given)
    for name in {"activation", "scale", "sigmoid", "normalize", "softplus"} & set(arguments):
        for one, other in product(OPTIONS, OPTIONS):
            remembered.forget()
            _, first = told(check, arguments | {name: one})
            result = agreed(check, arguments | {name: other})
            same = one is other and type(one) in (bool, int, float, str, type(None))
            assert result is None or (result is first) == same, (one, other)


@each_case
def test_other_tuples_are_checked(op: str, given: Arguments) -> None:
    check, arguments = checked(op, given)
    first, marks = check(*arguments.values()), given["marks"]
    for other in (OwnMarks(*marks), tuple(marks), [*marks], marks[0]):
        result = agreed(check, arguments | {"marks": other})
        assert result is not first and (result is not None) == isinstance(other, StepMarks)


@each_case
def test_calls_of_one_kind_have_one_result(op: str, given: Arguments) -> None:
    """Other memory, memory that shrank and grew again, parameters that need no gradients, and other threads."""
    remembered.forget()
    check, arguments = checked(op, given)
    first = check(*arguments.values())
    for tensor, using in leaves(arguments):
        grown = fresh(tensor)
        nbytes = grown.untyped_storage().nbytes()
        grown.untyped_storage().resize_(0).resize_(nbytes)
        for new in (fresh(tensor), grown, Parameter(fresh(tensor), requires_grad=False)):
            assert agreed(check, using(new)) is first
    with ThreadPoolExecutor(4) as threads:
        others = [Moving(CPU).anything(arguments) for _ in range(8)]
        assert all(result is first for result in threads.map(lambda one: check(*one.values()), others))


@each_case
def test_transformed_tensors_are_checked(op: str, given: Arguments) -> None:
    """In `torch.func.vmap` a tensor has no memory, so the check raises what it raises."""
    check, arguments = checked(op, given)
    check(*arguments.values())
    for tensor, using in leaves(arguments):
        torch.func.vmap(lambda part, using=using: (agreed(check, using(part)), part)[1])(tensor[None])


def test_planes_in_gaps_of_each_other_are_checked_at_every_call() -> None:
    """Each slot has the parts of all planes of Mamba-3, one behind the other."""
    given = next(given for op, _, given in forms() if op == "mamba3_step")
    places = [0, *accumulate(-(-plane[0].nbytes // 16) * 16 for plane in given["state"])]
    memory = torch.zeros(len(given["state"].ssm), places.pop(), dtype=torch.uint8)
    planes = [
        memory[:, at : at + plane[0].nbytes].view(plane.dtype).unflatten(1, plane.shape[1:])
        for at, plane in zip(places, given["state"], strict=True)
    ]
    check, arguments = checked("mamba3_step", given | {"state": Mamba3State(*planes)})
    assert agreed(check, arguments) is not agreed(check, arguments) is not None


def test_a_check_remembers_few_kinds() -> None:
    """A kind beyond the limit replaces all others. A trial of configurations begins and ends with none."""
    check, arguments = checked("gated_delta_step", next(given for op, _, given in forms() if "q" in given))
    ask = lambda **changed: check(*(arguments | changed).values())  # noqa: E731
    first = ask()
    assert all(ask(scale=kind) is ask(scale=kind) for kind in range(MOST)) and ask() is not first
    assert max(map(len, remembered.KNOWN)) <= MOST
    first = ask()
    with trying(ConvConfig()):
        second = ask()
    assert first is not second is not ask()


@each_case
def test_an_op_runs_again_and_refuses_what_its_check_refuses(backend: Backend, op: str, given: Arguments) -> None:
    """A call of the same kind in other memory has the same bits. A refused call raises, and changes no byte."""
    step, (given, twin) = getattr(backend, op), (Moving(backend.device).anything(given) for _ in range(2))
    name = "v" if "v" in given else "x"
    state = given["state"] if isinstance(given["state"], Tensor) else given["state"].ssm
    step(**given)
    step(**twin)
    assert all(same_bits(one, other) for (one, _), (other, _) in zip(leaves(given), leaves(twin), strict=True))
    before = state.clone()
    for match, changed in (
        ("^out: requires grad", {"out": given["out"].clone().requires_grad_()}),
        ("are shared with", {"out": given[name]}),
        ("are shared with", {name: like(given[name], state)}),
        ("^tokens: expected", {"tokens": given["tokens"].float()}),
    ):
        with pytest.raises(ValueError, match=match):
            step(**given | changed)
    assert same_bits(state, before)

"""Remembers which checks have passed, and what was launched then. Knows no op and no Triton.

An eager decode loop calls an op once per layer and step, with tensors that differ in their addresses alone. So the
checks of an op run once for each kind of call. Later calls of the kind only compare addresses: does what the op writes
still lie apart from the rest? A kernel keeps its compiled launch in the result of the check, see
`memstate.kernels.kept.launch_step`.

A kind of call says of each tensor its dtype, shape, strides, device, the last bits of its address, and whether it is a
negative view or requires grad; and of each option its type and value. A refusal is never remembered.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from memstate.kernels import tables

T = TypeVar("T")
MOST = 512  # kinds of calls that an op remembers; then it forgets all of them
TUPLES = (tables.StepMarks, *tables.Tail.__args__, tables.Cursor, tables.Mamba3State)
OPTIONS = (bool, int, str, float)
KNOWN: list[dict[Any, Any]] = []  # of each check, the kinds of calls that have passed


class Checked(NamedTuple, Generic[T]):
    """What the check of a call has found, and the launches that have followed.

    Attributes:
        found: what the check returned.
        launches: form of a launch -> (its compiled launch, the arguments behind the tensors).
    """

    found: T
    launches: dict[str, tuple[Callable[..., object], tuple[object, ...]]]


def remembered(*written: str) -> Callable[[Callable[..., T]], Callable[..., Checked[T]]]:
    """Returns a decorator of a check that remembers the kinds of calls that have passed.

    Checked at every call are other classes of tensors than `Tensor` and `Parameter`, tensors without elements or
    memory, and calls in which something written may share bytes with another tensor.

    Args:
        written: names of the arguments that the op writes, at least two.
    """

    def of(check: Callable[..., T]) -> Callable[..., Checked[T]]:
        names = list(signature(check).parameters)
        stores = itemgetter(*map(names.index, written))
        loads = itemgetter(*(place for place, name in enumerate(names) if name not in written))
        known: dict[tuple[Any, ...], tuple[Checked[T], list[int]]] = {}
        KNOWN.append(known)

        @wraps(check)
        def checked(*arguments: Any) -> Checked[T]:
            parts: list[object] = []
            addresses: list[int] = []
            stored = len(addresses) if _describe(stores(arguments), parts, addresses) else None
            if stored is None or not _describe(loads(arguments), parts, addresses):
                return Checked(check(*arguments), {})
            key: tuple[Any, ...] = tuple(parts)
            if (passed := known.get(key)) is None:
                made = Checked(check(*arguments), {})
                if len(known) >= MOST:
                    known.clear()
                kinds = (place for place, part in enumerate(key) if isinstance(part, torch.dtype))
                known[key] = made, [_span(*key[place : place + 3]) for place in kinds]
                return made
            before, spans = passed
            for one in range(stored):
                start = addresses[one]
                end = start + spans[one]
                for other, address in enumerate(addresses):
                    if address < end and address + spans[other] > start and other != one:
                        return Checked(check(*arguments), {})
            return before

        return checked

    return of


def forget() -> None:
    """Forgets all kinds of calls, with their launches."""
    for known in KNOWN:
        known.clear()


def _describe(arguments: tuple[Any, ...], parts: list[object], addresses: list[int]) -> bool:
    """Appends what the kind of a call depends on, and the addresses of its tensors. Returns whether that is all."""
    for each in arguments:
        kind = type(each)
        if each is None:
            parts.append(None)
        elif kind is Tensor or kind is Parameter:
            try:
                address = each.data_ptr()
                parts += (each.dtype, each.shape, each.stride(), each.device, address % tables.ACCESS_BYTES)
                parts += (each.is_neg(), each.requires_grad)
            except RuntimeError:  # a tensor without memory or strides, as inside of `torch.func.vmap`
                return False
            if not address:  # a tensor without elements, or whose memory was given back
                return False
            addresses.append(address)
        elif kind in OPTIONS:
            parts += (kind, repr(each) if kind is float else each)  # 0.0 equals -0.0
        elif kind in TUPLES:
            parts.append(kind)
            if not _describe(each, parts, addresses):
                return False
        else:
            return False
    return True


def _span(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Returns the bytes from the start to the end of a tensor that has elements."""
    return dtype.itemsize * (1 + sum(map(int.__mul__, shape, strides)) - sum(strides))

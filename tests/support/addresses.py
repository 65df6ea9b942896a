"""Compares the bytes that a launch touches with those that it may touch, and finds conflicts between its programs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.int64]
LOAD, STORE, ATOMIC = "loads", "stores", "updates"
NOTHING: Bytes = np.zeros(0, np.int64)


class Stray(Exception):
    """An access outside the tensors of its launch or to a null slot, or a store where the operation may not store."""


def spans(tensor: Tensor) -> Bytes:
    """Returns exactly the bytes that a tensor views, as ranges: `range 2`, the start and the end of each."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if tensor.numel() == 0:
        return NOTHING.reshape(0, 2)
    if tensor.is_contiguous():
        return np.array([[start, start + tensor.nbytes]])
    at = np.zeros(1, np.int64)
    for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = (at[:, None] + np.arange(count) * stride).ravel()
    at = start + np.unique(at) * size
    first = np.flatnonzero(np.diff(at, prepend=at[0] - size - 1) != size)
    return np.stack([at[first], at[np.append(first[1:], len(at)) - 1] + size], 1)


class Spans:
    """The ranges of bytes of several tensors. Adjacent tensors stay two ranges; overlapping ones become one."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        ranges = sorted(map(tuple, np.concatenate([NOTHING.reshape(0, 2), *map(spans, tensors)]).tolist()))
        merged: list[list[int]] = []
        for start, end in ranges:
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.starts, self.ends = np.array(merged, np.int64).reshape(-1, 2).T

    def hold(self, at: Bytes, size: int) -> NDArray[np.bool_]:
        """Returns for each access of `size` bytes whether it lies within one range."""
        if not len(self.starts):
            return np.zeros(len(at), bool)
        last = np.searchsorted(self.starts, at, side="right") - 1
        return (last >= 0) & (at + size <= self.ends[last])

    def meet(self, at: Bytes, size: int) -> NDArray[np.bool_]:
        """Returns for each access of `size` bytes whether it touches a byte of a range."""
        if not len(self.starts):
            return np.zeros(len(at), bool)
        last = np.searchsorted(self.starts, at + size - 1, side="right") - 1
        return (last >= 0) & (at < self.ends[last])


class Access(NamedTuple):
    """One load, store or atomic of one program.

    at: addresses that the lanes access; masked lanes are left out. lane: numbers of these lanes among all `lanes`.
    phase: number of barriers that the program had passed.
    """

    program: int
    kind: str
    at: Bytes
    size: int
    lane: Bytes
    lanes: int
    phase: int

    def bytes(self) -> Bytes:
        return (self.at[:, None] + np.arange(self.size)).ravel()


@dataclass
class Limits:
    """Limits of the memory that a launch may touch, beyond those of its arguments.

    reach: tensors whose addresses are in arguments; the launch may touch them. null: slot 0 of planes, which it may not
    touch. changes: the only memory to which it may store; None: everything that it may touch.
    """

    reach: Sequence[Tensor] = ()
    null: Sequence[Tensor] = ()
    changes: Sequence[Tensor] | None = None


class Launch:
    """The accesses of the programs of one launch. Each is checked before it is carried out."""

    def __init__(self, kernel: str, arguments: Mapping[str, Tensor], limits: Limits, warps: int = 4) -> None:
        self.kernel, self.programs, self.warps = kernel, 0, warps
        self.named = dict(arguments) | {f"what it reaches [{i}]": tensor for i, tensor in enumerate(limits.reach)}
        self.accesses: list[Access] = []
        self._allowed, self._null = Spans(self.named.values()), Spans(limits.null)
        self._changes = self._allowed if limits.changes is None else Spans(limits.changes)

    def add(self, access: Access) -> None:
        """Records an access. Raises: Stray with the program, the address and the tensor nearest to it."""
        self.accesses.append(access)
        outside = ~self._allowed.hold(access.at, access.size)
        if outside.any():
            raise Stray(self.say(access, access.at[outside][0], "outside the tensors of the launch"))
        null = self._null.meet(access.at, access.size)
        if null.any():
            raise Stray(self.say(access, access.at[null][0], "in a null slot"))
        if access.kind != LOAD and not (kept := self._changes.hold(access.at, access.size)).all():
            raise Stray(self.say(access, access.at[~kept][0], "which the operation may not change"))

    def say(self, access: Access, at: int, what: str) -> str:
        return f"{self.kernel}: program {access.program} {access.kind} {access.size} bytes at {self.where(at)}, {what}"

    def where(self, at: int) -> str:
        """Returns the tensor that has this address, or the nearest one, and the distance from its start in bytes."""
        known = {name: spans(tensor) for name, tensor in self.named.items() if tensor.numel()}
        if not known:
            return f"{at:#x}"
        away = {name: int(np.maximum(0, np.maximum(r[:, 0] - at, at + 1 - r[:, 1])).min()) for name, r in known.items()}
        name = min(away, key=lambda name: (away[name], known[name][-1, 1] - known[name][0, 0]))
        return f"{name} {at - int(known[name][0, 0]):+d} of {int(known[name][-1, 1] - known[name][0, 0])}"

    def allowed(self) -> Bytes:
        """Returns the bytes that a program may load."""
        ranges = [np.arange(start, end) for tensor in self.named.values() for start, end in spans(tensor)]
        return np.unique(np.concatenate([NOTHING, *ranges]))

    def touched(self, *kinds: str, program: int | None = None) -> Bytes:
        """Returns the bytes touched by accesses of these kinds (of all kinds if none is named), sorted."""
        selected = [a.bytes() for a in self.accesses if a.kind in (kinds or (a.kind,)) and program in (None, a.program)]
        return np.unique(np.concatenate([NOTHING, *selected]))

    def shared(self) -> Bytes:
        """Returns the bytes that one program changes and another touches. Only there the order of programs matters."""
        return _shared(self.accesses, [np.full(a.at.shape, a.program) for a in self.accesses])

    def contested(self) -> Bytes:
        """Returns the shared bytes that some program touches with a plain load or store, not with an atomic."""
        return np.intersect1d(self.shared(), self.touched(LOAD, STORE))

    def conflicts(self) -> list[str]:
        """Returns a line for each conflict: bytes that programs contest, or lanes of a program between two barriers."""
        lines = self._tell(self.contested(), self.accesses, "")
        for program, phase in sorted({(access.program, access.phase) for access in self.accesses}):
            between = [a for a in self.accesses if (a.program, a.phase) == (program, phase)]
            # Lane i of two blocks of one size is assumed to be the same thread, and so are all scalars.
            lanes = _shared(between, [a.lanes * 2**32 + a.lane for a in between])
            plain = [a.bytes() for a in between if a.kind != ATOMIC]
            lanes = np.intersect1d(lanes, np.concatenate([NOTHING, *plain]))
            lines += self._tell(lanes, between, ", by several lanes without a barrier between")
        return lines

    def _tell(self, contested: Bytes, accesses: Sequence[Access], how: str) -> list[str]:
        """Returns a line for each range of contested bytes. In a range, the same programs touch all bytes."""
        who: dict[int, set[str]] = {at: set() for at in contested.tolist()}
        for access in accesses if who else ():
            for at in np.intersect1d(access.bytes(), contested).tolist():
                who[at].add(f"program {access.program} {access.kind}")
        last = [at for at in who if who.get(at + 1) != who[at]]
        return [f"{self.kernel}: bytes up to {self.where(at)}: {', '.join(sorted(who[at]))}{how}" for at in last]


def _shared(accesses: Sequence[Access], who: Sequence[Bytes]) -> Bytes:
    """Returns the bytes that two programs or threads touch and one changes. who: for each access, who each lane is."""
    if not any(access.kind != LOAD for access in accesses):
        return NOTHING
    touched, at = np.unique(np.concatenate([a.bytes() for a in accesses]), return_inverse=True)
    names, name = np.unique(
        np.concatenate([np.repeat(n, a.size) for a, n in zip(accesses, who, strict=True)]), return_inverse=True
    )
    each = np.unique(at * len(names) + name) // len(names)  # a byte once per program or thread
    changed = np.concatenate([a.bytes() for a in accesses if a.kind != LOAD])
    return np.intersect1d(touched[np.bincount(each, minlength=len(touched)) > 1], changed)


@dataclass
class Log:
    """All recorded launches, in order."""

    launches: list[Launch] = field(default_factory=list)

    def conflicts(self) -> list[str]:
        return [conflict for launch in self.launches for conflict in launch.conflicts()]

    def order(self) -> list[tuple[int, str]]:
        """Returns (program, kind) of all accesses in order: the schedule."""
        return [(access.program, access.kind) for launch in self.launches for access in launch.accesses]

"""How tensor parallelism cuts one axis: whole heads, groups or channels to a rank. Knows no plane and no byte.

8 units on 2 ranks    0 1 2 3 | 4 5 6 7     each rank holds 4
2 units on 4 ranks    0 | 0 | 1 | 1         each rank holds 1, every unit is on 2 ranks
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from memstate.errors import InvalidArgument


@dataclass(frozen=True)
class Part:
    """Some of an axis: `units` heads, groups or channels of `size` elements each, `(unit size)` in einops letters.

    Raises: InvalidArgument.
    """

    name: str
    units: int
    size: int = 1

    def __post_init__(self) -> None:
        require_name("part", self.name)
        for what, count in (("units", self.units), ("size", self.size)):
            object.__setattr__(self, what, whole(f"part {self.name}: {what}", count))

    @property
    def length(self) -> int:
        """Elements along the axis."""
        return self.units * self.size


class Owned(NamedTuple):
    """What a rank holds of one part: the elements `whole` of the uncut axis are the elements `local` of its own."""

    part: str
    whole: slice
    local: slice


def slices(parts: Sequence[Part]) -> dict[str, slice]:
    """Where each part lies on the axis that the parts make up, by name."""
    ends = [sum(part.length for part in parts[: count + 1]) for count in range(len(parts))]
    return {part.name: slice(end - part.length, end) for part, end in zip(parts, ends, strict=True)}


def shard(owner: str, parts: Sequence[Part], ranks: int) -> tuple[Part, ...]:
    """The parts that one of `ranks` ranks holds: an equal share of the units, or one unit that other ranks hold too.

    owner: names the parts in an error. Raises: InvalidArgument if neither number divides the other.
    """
    ranks = whole(f"{owner}: ranks", ranks)
    for part in parts:
        if part.units % ranks and ranks % part.units:
            raise InvalidArgument(
                f"{owner}: part {part.name} has {part.units} units of {part.size} for {ranks} ranks:"
                " one of the two numbers must divide the other"
            )
    return tuple(replace(part, units=max(1, part.units // ranks)) for part in parts)


def owned(owner: str, parts: Sequence[Part], ranks: int, rank: int) -> list[Owned]:
    """What rank `rank` of `ranks` holds, part by part; with more ranks than units, neighbours hold the same unit.

    Neighbours, so that heads, which are cut the same way, stay with the group they belong to. owner: see `shard`.
    Raises: InvalidArgument.
    """
    held = shard(owner, parts, ranks)
    if not is_whole(rank) or not 0 <= rank < ranks:
        raise InvalidArgument(f"{owner}: rank {rank!r}, expected 0 to {ranks - 1}")
    uncut, local, found, rank, ranks = slices(parts), slices(held), [], int(rank), int(ranks)
    for part, share in zip(parts, held, strict=True):
        first = uncut[part.name].start + rank * part.units // ranks * part.size
        found.append(Owned(part.name, slice(first, first + share.length), local[part.name]))
    return found


def is_whole(value: object) -> bool:
    """Whether it is a whole number, of Python or numpy; True and False are no numbers."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def whole(what: str, count: Any, least: int = 1) -> int:
    """A whole number of `least` or more as an int. Raises: InvalidArgument with `what` it is."""
    if not is_whole(count) or count < least:
        raise InvalidArgument(f"{what} {count!r}: expected {least} or more")
    return int(count)


def require_name(what: str, name: object) -> None:
    """Refuses a name that is no text or an empty one. Raises: InvalidArgument."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"a {what} needs a name, a text; got {name!r}")


def items(what: str, values: Any, kind: type) -> tuple[Any, ...]:
    """Several values of one kind as a tuple; one alone, or a text, is no sequence. Raises: InvalidArgument."""
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if found is None or not all(isinstance(value, kind) for value in found):
        raise InvalidArgument(f"{what} {values!r}: expected a sequence of {kind.__name__}")
    return found


def require_fit(owner: str, parts: Sequence[Part], shape: tuple[int, ...], axis: int) -> None:
    """Refuses parts that are not exactly one axis of a shape. Raises: InvalidArgument, with the owner's name."""
    names = [part.name for part in parts]
    if len(set(names)) != len(names):
        raise InvalidArgument(f"{owner}: parts {names}, expected each name once")
    axes = len(shape) if parts else 1  # without parts the axis says nothing
    if not is_whole(axis) or not 0 <= axis < axes:
        raise InvalidArgument(f"{owner}: axis {axis!r} of shape {shape} with {len(parts)} parts: nothing to cut there")
    total = sum(part.length for part in parts)
    if parts and total != shape[axis]:
        sizes = " + ".join(f"{part.name} {part.units} * {part.size}" for part in parts)
        raise InvalidArgument(
            f"{owner}: parts {sizes} = {total}, but axis {axis} of shape {shape} has {shape[axis]} elements"
        )

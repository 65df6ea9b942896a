"""How tensor parallelism cuts one axis: whole heads, groups or channels to a rank. Knows no plane and no byte.

8 units on 2 ranks    0 1 2 3 | 4 5 6 7     each rank holds 4
2 units on 4 ranks    0 | 0 | 1 | 1         each rank holds 1, every unit is on 2 ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from memstate.checks import is_whole, require_name, whole
from memstate.errors import InvalidArgument


@dataclass(frozen=True)
class Part:
    """A part of an axis that tensor parallelism cuts by whole units: heads, groups or channels.

    Args:
        name: of the part, such as "q".
        units: how many units there are.
        size: elements of a unit; the axis is `(unit size)` in einops letters.

    Raises:
        InvalidArgument: the name is empty, or a number is below 1.

    Example:
        >>> from memstate import Part
        >>> Part("q", units=16, size=128).length
        2048
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
    """What a rank holds of one part: the elements `whole` of the uncut axis are the elements `local` of its own.

    Example:
        >>> import torch
        >>> from memstate import Part, Plane
        >>> plane = Plane("conv", (8, 3), torch.float32, parts=(Part("x", 8),))
        >>> plane.owned(ranks=2, rank=1)
        [Owned(part='x', whole=slice(4, 8, None), local=slice(0, 4, None))]
    """

    part: str
    whole: slice
    local: slice


def slices(parts: Sequence[Part]) -> dict[str, slice]:
    """Where each part lies on the axis that the parts make up, by name."""
    ends = [sum(part.length for part in parts[: count + 1]) for count in range(len(parts))]
    return {part.name: slice(end - part.length, end) for part, end in zip(parts, ends, strict=True)}


def shard(owner: str, parts: Sequence[Part], ranks: int) -> tuple[Part, ...]:
    """The parts that one of `ranks` ranks holds: an equal share of the units, or one unit that other ranks hold too.

    Args:
        owner: names the parts in an error.
        parts: of the uncut axis.
        ranks: how many ranks there are.

    Raises:
        InvalidArgument: neither number divides the other.
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
    """What rank `rank` of `ranks` holds, part by part.

    With more ranks than units, neighbours hold the same unit. Heads are cut the same way, so they stay with the group
    they belong to.

    Args:
        owner: names the parts in an error.
        parts: of the uncut axis.
        ranks: how many ranks there are.
        rank: which one of them.

    Raises:
        InvalidArgument: there is no such rank, or the parts cannot be cut.
    """
    held = shard(owner, parts, ranks)
    if not is_whole(rank) or not 0 <= rank < ranks:
        raise InvalidArgument(f"{owner}: rank {rank!r}, expected 0 to {ranks - 1}")
    uncut, local, found, rank, ranks = slices(parts), slices(held), [], int(rank), int(ranks)
    for part, share in zip(parts, held, strict=True):
        first = uncut[part.name].start + rank * part.units // ranks * part.size
        found.append(Owned(part.name, slice(first, first + share.length), local[part.name]))
    return found


def require_fit(owner: str, parts: Sequence[Part], shape: tuple[int, ...], axis: int) -> None:
    """Refuses parts that are not exactly one axis of a shape, with the owner's name."""
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

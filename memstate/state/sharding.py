"""Says how tensor parallelism cuts one axis: into whole heads, groups or channels. Knows no plane and no byte.

8 units on 2 ranks    0 1 2 3 | 4 5 6 7     each rank holds 4
2 units on 4 ranks    0 | 0 | 1 | 1         each rank holds 1, and each unit is on 2 ranks
"""

from dataclasses import dataclass
from typing import NamedTuple

from memstate.checks import require_name, whole


@dataclass(frozen=True)
class Part:
    """A part of an axis that tensor parallelism cuts by whole units: heads, groups or channels.

    Args:
        name: name of the part, such as "q".
        units: number of units.
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
        """Elements of the part along the axis."""
        return self.units * self.size


class Owned(NamedTuple):
    """The share of one part that a rank holds: elements `whole` of the uncut axis, `local` of the rank's own axis.

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

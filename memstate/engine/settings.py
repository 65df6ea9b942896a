"""Defines settings of a manager, and refuses settings that contradict each other."""

from dataclasses import dataclass

from memstate.checks import INT32_MAX, is_count, is_whole, require_switch, shown
from memstate.errors import ConfigurationError
from memstate.requests.tracking import Tracking
from memstate.sizes import INT64_MAX
from memstate.state.layout import StateLayout


@dataclass(frozen=True, kw_only=True)
class Pages:
    """KV pages of requests.

    Args:
        size: tokens of a page. The length of a published snapshot is a multiple of `size`.
        count: number of pages; the manager hands out ids 1 to `count`. 0: the caller manages KV itself.
        per_row: largest number of pages of one request, the width of the page table.

    Raises:
        ConfigurationError: a value is not a whole number from 0 to 2**31 - 1; `size` is 0; or only one of `count` and
            `per_row` is given.

    Example:
        >>> Pages(count=1024, size=16, per_row=64)
        Pages(size=16, count=1024, per_row=64)
    """

    size: int
    count: int = 0
    per_row: int = 0

    def __post_init__(self) -> None:
        numbers = (self.count, self.size, self.per_row)
        if not all(map(is_count, numbers)) or self.size < 1:
            raise ConfigurationError(
                f"{self}: expected whole numbers from 0 to {INT32_MAX}, and at least 1 token in a page"
            )
        if (self.count > 0) != (self.per_row > 0):
            raise ConfigurationError(f"{self}: give count and per_row, or neither where KV is the caller's")


MOST_TAIL = 1 << 10  # largest Forward(tail=), in tokens


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Says what the kernels of the forward can do.

    Args:
        in_place: the kernels update one slot, `step.write`. memstate copies the states that become snapshots.
        direct_hits: the first step of a resumed request reads the snapshot itself instead of a copy. None: True with
            Redirect and without `in_place`, otherwise False.
        grid: inside a chunk, the forward can store states at multiples of this number of tokens. 1: it takes
            `step.marks`, as memstate's own kernels do; 64: flash-linear-attention. None: it has a state only at the end
            of a chunk.
        packed: whether multiples of `grid` count from the start of the packed batch, as in Mamba-2's chunk scan, not
            from the start of each row's chunk. If so, `StateManager.chunk` ends chunks at marks.
        tail: largest number of tokens of a row in a step with drafts. memstate's own kernels keep the inputs of these
            tokens in rings of 3 * tail - 1 tokens, planes of `StateLayout(rows=)`; other kernels keep what they need
            themselves. 0: no drafts.
        pad: number in `step.read`, `step.write` and `step.snapshot` where there is no slot: in padding, and for rows
            without a snapshot. 0: the null slot, which no request owns. -1: for kernels that skip negative numbers and
            have no null slot. memstate's own kernels take both.

    Raises:
        ConfigurationError: a value is neither True nor False, `grid` does not fit the rest, or `pad` is another number.

    Example:
        >>> Forward(grid=64)
        Forward(in_place=False, direct_hits=None, grid=64, packed=False, pad=0, tail=0)
    """

    in_place: bool = False
    direct_hits: bool | None = None
    grid: int | None = None
    packed: bool = False
    pad: int = 0
    tail: int = 0

    def __post_init__(self) -> None:
        for name in ("in_place", "packed"):
            require_switch(name, getattr(self, name))
        if self.direct_hits is not None:
            require_switch("direct_hits", self.direct_hits)
        if self.grid is not None and (not is_count(self.grid) or self.grid < 1):
            raise ConfigurationError(f"grid={self.grid!r}: expected a whole number of tokens from 1 on, or None")
        if self.grid is not None and self.in_place:
            raise ConfigurationError(
                f"grid={self.grid} with in_place=True: kernels that update one slot have the state at the end of a "
                "chunk only; leave grid out, and end chunks at next_boundary(row)"
            )
        if type(self.pad) is not int or self.pad not in (0, -1):
            raise ConfigurationError(f"pad={self.pad!r}: expected 0, the null slot, or -1, which other kernels skip")
        if not is_count(self.tail) or self.tail > MOST_TAIL:
            raise ConfigurationError(f"tail={self.tail!r}: expected a whole number of tokens from 0 to {MOST_TAIL}")
        if self.packed and self.grid is None:
            raise ConfigurationError("packed=True says where multiples of grid count from: give grid as well")


def validate_sizes(
    slots: int, max_requests: int, preallocated: int, max_batch: int | None, snapshots: int | None
) -> None:
    """Refuses sizes that cannot serve even one request. `memstate.engine.sizing` refuses sizes that are too large.

    Raises:
        ConfigurationError: a size is not a whole number of 0 or more, or it is too small.
    """
    if not _is_size(slots):
        raise ConfigurationError(f"slots={shown(slots)}: expected a whole number of at least 1")
    numbers = (max_requests, preallocated, max_batch or 1, snapshots or 0)
    if not all(map(_is_size, numbers)) or max_requests < 1 or max_batch == 0:
        raise ConfigurationError(
            f"max_requests={shown(max_requests)}, preallocated={shown(preallocated)}, max_batch={shown(max_batch)}, "
            f"snapshots={shown(snapshots)}: expected whole numbers from 0 on, at least 1 request and 1 entry in a batch"
        )


def _is_size(value: object) -> bool:
    """Returns whether a value is a whole number from 0 to the largest int64, so that bytes can be computed from it."""
    return is_whole(value) and 0 <= int(value) <= INT64_MAX


def validate_tail(layout: StateLayout, tail: int) -> None:
    """Refuses rings that are too short for steps with drafts.

    Raises:
        ConfigurationError: rings are too short. The error names them.
    """
    least = 3 * tail - 1
    rings = layout.rows.planes if layout.rows is not None else ()
    if short := [plane.name for plane in rings if plane.fill is None and plane.shape[:1] < (least,)]:
        raise ConfigurationError(
            f"tail={tail} with rings {short} of fewer than {least} tokens: build the layout with tail={tail}, too"
        )


def validate_tracking(tracking: Tracking, slots: int, unit: int, overlap: bool) -> None:
    """Refuses a strategy that does not work with the other settings.

    Raises:
        ConfigurationError: the strategy does not work with the other settings.
    """
    if not isinstance(tracking, Tracking):
        raise ConfigurationError(f"tracking={tracking!r}: expected NoTracking, PingPong, LazyPingPong or Redirect")
    tracking.validate(unit, overlap)
    needed = 1 + tracking.lanes_at_admission(overlap)
    if slots < needed:
        raise ConfigurationError(f"slots={slots}: a request under {tracking} needs {needed}; none could be admitted")


def validate_layout(layout: StateLayout) -> None:
    """Refuses anything but a layout.

    Raises:
        ConfigurationError: the argument is not a StateLayout.
    """
    if not isinstance(layout, StateLayout):
        raise ConfigurationError(f"layout={layout!r}: expected a StateLayout")

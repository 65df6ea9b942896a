"""Settings of a manager: what belongs together is one object, and contradictions are refused with the reason."""

from dataclasses import dataclass

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.requests.tracking import Tracking
from memstate.state.layout import StateLayout


@dataclass(frozen=True, kw_only=True)
class Pages:
    """KV pages of requests.

    Args:
        size: tokens of a page. Snapshots stand for whole pages.
        count: page ids that the manager hands out, 1 to count. 0: the caller manages KV itself.
        per_row: pages that one request can have, the width of the page table.

    Raises:
        ConfigurationError: for sizes that are no counts, or a count without per_row.

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
            raise ConfigurationError(f"{self}: expected whole numbers from 0 on, and at least 1 token in a page")
        if (self.count > 0) != (self.per_row > 0):
            raise ConfigurationError(f"{self}: give count and per_row, or neither where KV is the caller's")


@dataclass(frozen=True, kw_only=True)
class Forward:
    """What the forward's kernels can do.

    Args:
        in_place: they update one slot, `step.write`. memstate copies what snapshots need, before and after.
        speculation: steps may be windows of tokens of which some are accepted. Needs `overlap=False`.
        direct_hits: the first step reads a resumed snapshot instead of a copy of it. None: with Redirect, unless in
            place.

    Raises:
        ConfigurationError: for a value that is no switch.

    Example:
        >>> Forward(in_place=True)
        Forward(in_place=True, speculation=False, direct_hits=None)
    """

    in_place: bool = False
    speculation: bool = False
    direct_hits: bool | None = None

    def __post_init__(self) -> None:
        for name, switch in (("in_place", self.in_place), ("speculation", self.speculation)):
            require_switch(name, switch)
        if self.direct_hits is not None:
            require_switch("direct_hits", self.direct_hits)


def require_switch(name: str, switch: object, why: str = "") -> None:
    """Raises: ConfigurationError for what is neither True nor False."""
    if not isinstance(switch, bool):
        raise ConfigurationError(f"{name}={switch!r}: expected True or False{why}")


def validate_sizes(
    slots: int, max_requests: int, preallocated: int, max_batch: int | None, snapshots: int | None
) -> None:
    """Raises: ConfigurationError for sizes that are no counts, or too small to serve one request."""
    if not is_count(slots):
        raise ConfigurationError(f"slots={slots!r}: expected a whole number of at least 1")
    numbers = (max_requests, preallocated, max_batch or 1, snapshots or 0)
    if not all(map(is_count, numbers)) or max_requests < 1 or max_batch == 0:
        raise ConfigurationError(
            f"max_requests={max_requests}, preallocated={preallocated}, max_batch={max_batch}, snapshots={snapshots}: "
            "expected whole numbers from 0 on, at least 1 request and 1 entry in a batch"
        )


def validate_tracking(tracking: Tracking, slots: int, page_size: int, overlap: bool, speculation: bool) -> None:
    """Raises: ConfigurationError where a strategy cannot work with the rest."""
    if not isinstance(tracking, Tracking):
        raise ConfigurationError(f"tracking={tracking!r}: expected NoTracking, PingPong, LazyPingPong or Redirect")
    tracking.validate(page_size, overlap)
    if speculation and overlap:
        raise ConfigurationError(
            "speculation with overlap: the next plan needs the lengths that were accepted; use overlap=False"
        )
    needed = 1 + tracking.lanes_at_admission(overlap)
    if slots < needed:
        raise ConfigurationError(f"slots={slots}: a request under {tracking} needs {needed}; none could be admitted")


def validate_layout(layout: StateLayout) -> None:
    """Raises: ConfigurationError for a layout that is none."""
    if not isinstance(layout, StateLayout):
        raise ConfigurationError(f"layout={layout!r}: expected a StateLayout")

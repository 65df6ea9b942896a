"""What a manager's settings must satisfy together, checked at construction with the reason. Changes nothing."""

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.requests.tracking import Tracking
from memstate.state.layout import StateLayout


def validate_kinds(layout: StateLayout, **switches: object) -> None:
    """Raises: ConfigurationError for a layout that is none, or a switch that is neither on nor off."""
    if not isinstance(layout, StateLayout):
        raise ConfigurationError(f"layout={layout!r}: expected a StateLayout")
    for name, switch in switches.items():
        if not isinstance(switch, bool) and not (name == "direct_hits" and switch is None):
            depth = (
                ": a depth of 0 or 1; with more unsettled steps a dead one could overwrite a live snapshot"
                if name == "overlap"
                else ""
            )
            raise ConfigurationError(f"{name}={switch!r}: expected True or False{depth}")


def validate_sizes(
    slots: int, max_requests: int, preallocated: int, max_batch: int | None, holders: int | None, pages: int,
    page_size: int, pages_per_row: int,
) -> None:  # fmt: skip
    """Raises: ConfigurationError for sizes that cannot be meant."""
    if not is_count(slots):
        raise ConfigurationError(f"slots={slots!r}: expected a whole number of at least 1")
    numbers = (max_requests, preallocated, max_batch or 1, holders or 0, pages, page_size, pages_per_row)
    if not all(map(is_count, numbers)) or max_requests < 1 or max_batch == 0 or page_size < 1:
        raise ConfigurationError(
            f"max_requests={max_requests}, preallocated={preallocated}, max_batch={max_batch}, holders={holders}, "
            f"pages={pages}, page_size={page_size}, pages_per_row={pages_per_row}: expected whole numbers from 0 on, "
            "at least 1 request, 1 entry in a batch and 1 token in a page"
        )
    if (pages > 0) != (pages_per_row > 0):
        raise ConfigurationError(
            f"pages={pages}, page_size={page_size}, pages_per_row={pages_per_row}: give all three, or none"
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

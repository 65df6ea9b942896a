"""Settings of a prefix cache, with checks of their values."""

from dataclasses import dataclass, field

from memstate.checks import is_count, require_switch
from memstate.errors import ConfigurationError
from memstate.prefix.placement import Ends, Placement
from memstate.prefix.policies import LruPages, PagePolicy, ReturnRate, StatePolicy


@dataclass(frozen=True)
class Prefix:
    """Configures the prefix cache of one manager. Two managers cannot share it, because policies remember nodes.

    Args:
        states: The policy that decides which states are cached and evicted.
        pages: The policy that decides which pages are evicted. None: the one that `states` needs, or `LruPages`.
        most_states: Limit of the cached states. None: only the number of slots limits them.
        evict: Whether cached states may be evicted for snapshots and marks of the next step. For requests they always
            may.
        placement: Chooses the lengths of prompts at which states are kept.
        keyed: Whether states are found by the keys of an engine's own KV blocks, `Request(keys=)`, instead of tokens. A
            block has as many tokens as a page.

    Raises:
        ConfigurationError: A setting has a wrong type or value.

    Example:
        >>> from memstate.prefix.policies import Lru
        >>> Prefix(states=Lru(), most_states=100).of_pages
        LruPages(tombstones=True)
    """

    states: StatePolicy = field(default_factory=ReturnRate)
    pages: PagePolicy | None = None
    most_states: int | None = None
    evict: bool = True
    placement: Placement = field(default_factory=Ends)
    keyed: bool = False

    @property
    def of_pages(self) -> PagePolicy:
        """The policy for pages: `pages`, or the one that goes with `states`."""
        return self.pages or self.states.pages() or LruPages()

    def __post_init__(self) -> None:
        if not isinstance(self.states, StatePolicy) or not isinstance(self.pages, PagePolicy | None):
            raise ConfigurationError(
                f"states={self.states!r}, pages={self.pages!r}: expected a StatePolicy and a PagePolicy, such as Lru() "
                "and LruPages()"
            )
        if not isinstance(self.placement, Placement):
            raise ConfigurationError(f"placement={self.placement!r}: expected a Placement, such as Ends()")
        if self.most_states is not None and not is_count(self.most_states):
            raise ConfigurationError(f"most_states={self.most_states!r}: expected a whole number from 0 on, or None")
        require_switch("evict", self.evict)
        require_switch("keyed", self.keyed)

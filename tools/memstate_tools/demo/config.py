"""The settings of a demo run."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

from memstate.cli.policies import placement_of
from memstate.errors import InvalidArgument
from memstate.state.layout import Order
from memstate_tools import names
from memstate_tools.demo.sizes import ModelSize
from memstate_tools.demo.trees import DraftTree, tree_of
from memstate_tools.demo_options import DemoOptions

STRATEGIES: tuple[str, ...] = get_args(names.Strategy)
MODELS: tuple[str, ...] = get_args(names.Model)
LAYOUTS: dict[str, Order] = {"layer-major": "layer_major", "slot-major": "slot_major"}
ENGINES: tuple[str, ...] = get_args(names.Engine)
STATE_ORDERS: tuple[names.StateOrder, ...] = get_args(names.StateOrder)
# model -> orders of its state, the default first
ORDERS_OF = {"gdn": STATE_ORDERS[:2], "kda": STATE_ORDERS[:2], "mamba2": STATE_ORDERS[2:]}


@dataclass(frozen=True, kw_only=True)
class DemoConfig(DemoOptions):
    """The settings of a demo run: the options, and settings without an option.

    Args:
        device: Where tensors live.
        batch: Rows of the padded batch, one more than the requests that run at a time.
        size: Sizes of the model.

    Raises:
        InvalidArgument: Two settings do not go together, or a value is not allowed.
    """

    device: str = "cpu"
    batch: int = 4
    size: ModelSize = field(default_factory=ModelSize)

    def __post_init__(self) -> None:
        placement_of(self.placement)
        orders = ORDERS_OF[self.model]
        if self.state_order is None:
            object.__setattr__(self, "state_order", orders[0])
        elif self.state_order not in orders:
            raise InvalidArgument(f"state-order {self.state_order}: expected {' or '.join(orders)} of {self.model}")
        if len(self.tree) > self.chunk:
            raise InvalidArgument(
                f"speculate {self.speculate} with chunk {self.chunk}: a chunk has at least as many tokens as a step of "
                f"decode, {len(self.tree)}"
            )
        if self.storage_path is not None and self.storage not in ("file", "objects"):
            raise InvalidArgument(f"storage-path: it is for storage file or objects, not {self.storage}")
        if self.storage_path is None and self.storage == "objects":
            raise InvalidArgument("storage objects: say where with storage-path, such as s3://bucket/prefix")
        if self.park and self.host_slots is None and self.storage == "none":
            raise InvalidArgument("park: requests are parked in host memory: give it room with host-slots")
        if self.track_every % self.page_size:
            raise InvalidArgument(
                f"track-every {self.track_every} is no multiple of page-size {self.page_size}: snapshots share pages"
            )

    @cached_property
    def tree(self) -> DraftTree:
        """The tree of tokens of a decode step. A next token is sampled after each of them."""
        return tree_of(self.speculate)

    @property
    def speculates(self) -> bool:
        """Whether steps may have guesses, so that rows have tails for them."""
        return self.speculate != "0"

    @property
    def tails(self) -> int:
        """Number of tokens that a step may keep in the tail of a row; 0: rows have no tails."""
        return max(len(self.tree) * self.speculates, -(-self.tail // 2))

    @property
    def slack(self) -> int:
        """Number of tokens by which a row may be longer than the host knows when it plans."""
        return self.overlap * self.tree.depth

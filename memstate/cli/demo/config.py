"""The settings of a demo run."""

from dataclasses import dataclass, field
from typing import get_args

from memstate.checks import INT32_MAX
from memstate.cli import names
from memstate.cli.demo.sizes import ModelSize
from memstate.cli.demo_options import DemoOptions
from memstate.cli.policies import placement_of
from memstate.errors import InvalidArgument
from memstate.state.layout import Order

STRATEGIES: tuple[str, ...] = get_args(names.Strategy)
MODELS: tuple[str, ...] = get_args(names.Model)
LAYOUTS: dict[str, Order] = {"layer-major": "layer_major", "slot-major": "slot_major"}
STATE_ORDERS: tuple[str, ...] = get_args(names.StateOrder)
ORDERS_OF = {"gdn": STATE_ORDERS[:2], "kda": STATE_ORDERS[:2], "mamba2": STATE_ORDERS[2:]}  # the default first
ENGINES: tuple[str, ...] = get_args(names.Engine)
CHOICES: dict[str, tuple[str | None, ...]] = {
    "strategy": STRATEGIES, "model": MODELS, "layout": tuple(LAYOUTS), "engine": ENGINES,
    "state_order": (None, *STATE_ORDERS), "storage": get_args(names.Storage), "write": get_args(names.Write),
    "sabotage": (None, *get_args(names.Sabotage)),
}  # fmt: skip
LEAST = {
    "slots": 1, "track_every": 1, "page_size": 1, "batch": 2, "chunk": 1, "sessions": 0, "mooncake_segment": 0,
    "requests": 1, "pages": 1, "host_slots": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DemoConfig(DemoOptions):
    """The options, and what has none.

    Args:
        device: Where tensors live.
        batch: Rows of the padded batch, one more than requests can run at a time.
        size: Sizes of the model.

    Raises:
        InvalidArgument: A setting has no meaning, alone or with the others.
    """

    device: str = "cpu"
    batch: int = 4
    size: ModelSize = field(default_factory=ModelSize)

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InvalidArgument(f"{name} {getattr(self, name)!r}: expected {', '.join(filter(None, allowed))}")
        placement_of(self.placement)
        orders = ORDERS_OF[self.model]
        if self.state_order is None:
            object.__setattr__(self, "state_order", orders[0])
        elif self.state_order not in orders:
            raise InvalidArgument(f"state-order {self.state_order}: expected {' or '.join(orders)} of {self.model}")
        if self.storage_path is not None and self.storage != "file":
            raise InvalidArgument(f"storage-path {self.storage_path}: it is for storage file, not {self.storage}")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                shown = f"{name.replace('_', '-')} {value!r}"
                raise InvalidArgument(f"{shown}: expected a whole number of at least {least}")
        if self.chunk > INT32_MAX:
            raise InvalidArgument(f"chunk {self.chunk}: expected at most {INT32_MAX} tokens")
        if not -(2**63) <= self.seed < 2**63:
            raise InvalidArgument(f"seed {self.seed}: expected a 64-bit whole number")
        if not 0.0 <= self.fail_claims <= 1.0:
            raise InvalidArgument(f"fail-claims {self.fail_claims}: expected a probability from 0 to 1")
        if self.track_every % self.page_size:
            raise InvalidArgument(
                f"track-every {self.track_every} is no multiple of page-size {self.page_size}: snapshots share pages"
            )

    @property
    def order(self) -> Order:
        """The layout's name in `StateLayout`."""
        return LAYOUTS[self.layout]

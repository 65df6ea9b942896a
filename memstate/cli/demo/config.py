"""The settings of a demo run."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from memstate.checks import INT32_MAX
from memstate.cli import names
from memstate.cli.demo.sizes import ModelSize
from memstate.cli.policies import placement_of
from memstate.errors import InvalidArgument
from memstate.state.layout import Order
from memstate.tiers.settings import Write

STRATEGIES: tuple[str, ...] = get_args(names.Strategy)
MODELS: tuple[str, ...] = get_args(names.Model)
LAYOUTS: dict[str, Order] = {"layer-major": "layer_major", "slot-major": "slot_major"}
STATE_ORDERS: tuple[str, ...] = get_args(names.StateOrder)
ORDERS_OF = {"gdn": STATE_ORDERS[:2], "kda": STATE_ORDERS[:2], "mamba2": STATE_ORDERS[2:]}  # the default first
ENGINES: tuple[str, ...] = get_args(names.Engine)
CHOICES: dict[str, tuple[str | None, ...]] = {
    "strategy": STRATEGIES, "model": MODELS, "layout": tuple(LAYOUTS), "engine": ENGINES,
    "state_order": (None, *STATE_ORDERS),
    "storage": get_args(names.Storage), "write": get_args(Write), "sabotage": (None, *get_args(names.Sabotage)),
}  # fmt: skip
LEAST = {
    "slots": 1, "track_every": 1, "page_size": 1, "batch": 2, "chunk": 1, "sessions": 0, "mooncake_segment": 0,
    "requests": 1, "pages": 1, "host_slots": 1,
}  # fmt: skip


@dataclass(frozen=True)
class DemoConfig:
    """What `memstate demo` is told.

    Args:
        strategy: When snapshots are taken.
        backend: Name of the backend.
        device: Where tensors live.
        requests: Turns of all conversations together. None: the default or, with `input`, the whole file.
        slots: Capacity of the state pool.
        track_every: Tokens between snapshots.
        fail_claims: Probability that an optional claim fails.
        input: File with conversations.
        overlap: Whether the next step is planned before the last one is settled.
        pages: KV pages in all. None: few enough that they run out now and then.
        page_size: Tokens in a page.
        seed: Of conversations, arrivals and weights.
        plant_leak: Whether a register is emptied by hand after the last request.
        sabotage: How a snapshot is replaced by a wrong state.
        batch: Rows of the padded batch, one more than requests can run at a time.
        chunk: Tokens of a prefill step.
        placement: Where prompts keep states.
        model: Kind of the recurrent layers.
        layout: Order of the state planes.
        state_order: Order of a recurrent state in memory. None: "key-value", of mamba2 "dim-state".
        engine: See `memstate.cli.demo.engines`.
        sessions: The first so many conversations run as streaming sessions.
        host_slots: States that fit in host memory; KV pages in proportion. None: no host memory or, with storage, twice
            the slots.
        storage: What lies below host memory.
        storage_path: Folder of the files. None: a temporary one.
        mooncake_master: host:port.
        mooncake_segment: Bytes that the run itself gives to the store.
        write: When states are written to host memory.
        inspect: File for an inspection after the last request.
        size: Sizes of the model.

    Raises:
        InvalidArgument: A setting has no meaning, alone or with the others.
    """

    strategy: str = "redirect"
    backend: str = "auto"
    device: str = "cpu"
    requests: int | None = None
    slots: int = 12
    track_every: int = 16
    fail_claims: float = 0.0
    input: Path | None = None
    overlap: bool = True
    pages: int | None = None
    page_size: int = 8
    seed: int = 0
    plant_leak: bool = False
    sabotage: str | None = None
    batch: int = 4
    chunk: int = 64
    placement: str = "ends"
    model: str = "gdn"
    layout: str = "layer-major"
    state_order: str | None = None
    engine: str = "own"
    sessions: int = 0
    host_slots: int | None = None
    storage: str = "none"
    storage_path: Path | None = None
    mooncake_master: str = "127.0.0.1:50051"
    mooncake_segment: int = 0
    write: Write = "through"
    inspect: Path | None = None
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

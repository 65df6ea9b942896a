"""The settings of a demo run, checked at the door."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from memstate.cli import names
from memstate.cli.demo.mixers import MIXERS
from memstate.cli.demo.sizes import ModelSize
from memstate.errors import InvalidArgument
from memstate.state.layout import Order
from memstate.tiers.settings import Write

STRATEGIES: tuple[str, ...] = get_args(names.Strategy)
MODELS = tuple(MIXERS)
LAYOUTS: dict[str, Order] = {"layer-major": "layer_major", "slot-major": "slot_major"}
ENGINES: tuple[str, ...] = get_args(names.Engine)


@dataclass(frozen=True)
class DemoConfig:
    """What `memstate demo` is told.

    requests: turns of all conversations together, None for the default or, with `input`, the whole file. slots:
    capacity of the state pool. track_every, page_size: tokens. pages: KV pages in all, None for enough of them to run
    short now and then. fail_claims: probability that an optional claim fails. batch: rows of the padded batch, one
    more than requests can run at a time. chunk: tokens of a prefill step. model: kind of the recurrent layers. layout:
    order of the state planes. engine: see `memstate.cli.demo.engines`. sessions: so many conversations, the first ones,
    run as streaming sessions. host_slots: states that fit host memory, None for no host memory, or with storage twice
    the slots; KV pages in proportion. storage: what lies below it; storage_path: the files' folder, None for one that
    goes with the run. mooncake_master: host:port; mooncake_segment: bytes that the run itself gives to the store.
    write: when states go down. snapshot: file for a picture of all owners after the last turn. size: of the model.
    Raises: InvalidArgument.
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
    chunk: int = 8
    model: str = "gdn"
    layout: str = "layer-major"
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
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("model", self.model, MODELS)
        one_of("layout", self.layout, tuple(LAYOUTS))
        one_of("engine", self.engine, ENGINES)
        one_of("storage", self.storage, get_args(names.Storage))
        one_of("write", self.write, get_args(Write))
        if self.storage_path is not None and self.storage != "file":
            raise InvalidArgument(f"storage-path {self.storage_path}: it is for storage file, not {self.storage}")
        if self.sabotage is not None:
            one_of("sabotage", self.sabotage, get_args(names.Sabotage))
        smallest = {"slots": 1, "track_every": 1, "page_size": 1, "batch": 2, "chunk": 1, "sessions": 0}
        for name, least in smallest.items():
            at_least(name, getattr(self, name), least)
        at_least("mooncake_segment", self.mooncake_segment, 0)
        for name in ("requests", "pages", "host_slots"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
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


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raises: InvalidArgument where `value` is not among `allowed`."""
    if value not in allowed:
        raise InvalidArgument(f"{name} {value!r}: expected {', '.join(allowed)}")


def at_least(name: str, value: int, least: int) -> None:
    """Raises: InvalidArgument where `value` is not a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"{name.replace('_', '-')} {value!r}: expected a whole number of at least {least}")

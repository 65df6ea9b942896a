"""The settings of the tiers below the device, checked at the door."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from memstate.checks import INT32_MAX, is_count
from memstate.errors import ConfigurationError
from memstate.state.planes import Planes
from memstate.tiers.prefetch.settings import Prefetch
from memstate.tiers.stores.base import Store

Write = Literal["through", "selective", "back"]
METHODS = ("register", "exists", "get", "put", "discard", "close")


@dataclass(frozen=True)
class Tiers:
    """Host memory and storage below a manager's prefix cache.

    model: names weights, quantisation and whatever else makes states comparable: records of another name are never
    found. Size of the host tier, one of: host_slots (with KV: and host_pages, default in the device's proportion),
    host_bytes, host_ratio (of the device's slots and pages). dense_slots: records on the device, for states that slots
    give up: with int8 they take a quarter of float32's bytes. reserve: share of host memory that prefetches leave to
    what comes from the device. kv: the planes of KV pages, as a `Planes` whose slots are pages; None where KV is the
    caller's.
    write: when states go to host memory: "through", as soon as they are cached; "selective", with their second hit;
    "back", when the device gives them up. The first two also keep what is given up before its turn: "through" all of
    it, "selective" what was hit once.
    store: keeps what reaches host memory beyond this process, None for nothing. prefetch: how it comes back. threads:
    that read and write it. rank, ranks: this process's place in tensor parallelism. group: a gloo group of
    torch.distributed that nobody else uses, over which several ranks agree.
    load_threshold: tokens that a hit in host memory must save to be worth its way. staging: states that fit each of the
    two device buffers in between (KV pages as many as fit the same bytes); 0: kernels reach into host memory.
    layer_groups: in how many parts the layers of a state arrive. layerwise: the forward calls `wait_layer` before it
    reads one. int8: planes kept as 8-bit integers below the slots: name -> axis over which values share a scale.
    executor, clock: instead of threads and time.monotonic, for tests.
    Raises: ConfigurationError.
    """

    model: str
    host_slots: int | None = None
    host_pages: int | None = None
    host_bytes: int | None = None
    host_ratio: float | None = None
    dense_slots: int = 0
    reserve: float = 0.1
    kv: Planes | None = None
    write: Write = "through"
    store: Store | None = None
    prefetch: Prefetch = field(default_factory=Prefetch)
    threads: int = 4
    rank: int = 0
    ranks: int = 1
    group: Any = None
    load_threshold: int = 1
    staging: int = 2
    layer_groups: int = 4
    layerwise: bool = False
    int8: Mapping[str, int] = field(default_factory=dict)
    executor: Executor | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        sizes = [size for size in (self.host_slots, self.host_bytes, self.host_ratio) if size is not None]
        if not isinstance(self.model, str) or not self.model:
            raise ConfigurationError(
                f"model={self.model!r}: a text that names the weights; other models' states differ"
            )
        if len(sizes) != 1 or (self.host_pages is not None and self.host_slots is None):
            raise ConfigurationError(
                f"host_slots={self.host_slots}, host_pages={self.host_pages}, host_bytes={self.host_bytes}, "
                f"host_ratio={self.host_ratio}: give one of host_slots (with host_pages), host_bytes and host_ratio"
            )
        if self.host_bytes is not None and (type(self.host_bytes) is not int or self.host_bytes < 1):
            raise ConfigurationError(f"host_bytes={self.host_bytes!r}: expected a whole number of bytes from 1 on")
        whole = {
            "host_slots": self.host_slots or 0, "host_pages": self.host_pages or 0,
            "dense_slots": self.dense_slots, "load_threshold": self.load_threshold, "staging": self.staging,
            "rank": self.rank,
        }  # fmt: skip
        positive = {"threads": self.threads, "ranks": self.ranks, "layer_groups": self.layer_groups}
        for name, value in (whole | positive).items():
            if not is_count(value) or (name in positive and value < 1):
                least = int(name in positive)
                raise ConfigurationError(f"{name}={value!r}: expected a whole number from {least} to {INT32_MAX}")
        ratio = self.host_ratio if self.host_ratio is not None else 1.0
        if not isinstance(ratio, int | float) or not 0 < ratio < float("inf"):
            raise ConfigurationError(f"host_ratio={ratio!r}: expected a number above 0")
        if not isinstance(self.reserve, int | float) or not 0 <= self.reserve < 1:
            raise ConfigurationError(f"reserve={self.reserve!r}: expected a share from 0 up to, but not, 1")
        if self.write not in get_args(Write):
            raise ConfigurationError(f"write={self.write!r}: expected {', '.join(get_args(Write))}")
        if self.rank >= self.ranks or (self.group is None) != (self.ranks == 1):
            raise ConfigurationError(
                f"rank={self.rank}, ranks={self.ranks}, group={self.group!r}: ranks count from 0, and several of them "
                "need a torch.distributed group to agree over"
            )
        if self.dense_slots and self.ranks > 1:
            raise ConfigurationError(
                f"dense_slots={self.dense_slots} with {self.ranks} ranks: they do not agree on them"
            )
        if not isinstance(self.kv, Planes | None) or not isinstance(self.prefetch, Prefetch):
            raise ConfigurationError(f"kv={self.kv!r}, prefetch={self.prefetch!r}: expected a Storage and a Prefetch")
        if self.host_pages and self.kv is None:
            raise ConfigurationError(f"host_pages={self.host_pages} without kv: whose pages?")
        if not (isinstance(self.store, Store | None) and not isinstance(self.store, type)):
            raise ConfigurationError(
                f"store={self.store!r}: expected a store, such as FileStore(path), with {', '.join(METHODS)}"
            )
        if (
            not isinstance(self.int8, Mapping)
            or not callable(self.clock)
            or not isinstance(self.executor, Executor | None)
        ):
            raise ConfigurationError(
                f"int8={self.int8!r}, executor={self.executor!r}, clock={self.clock!r}: expected axes by plane, an "
                "Executor of concurrent.futures, and a function that gives seconds"
            )
        if not isinstance(self.layerwise, bool):
            raise ConfigurationError(f"layerwise={self.layerwise!r}: expected True or False")

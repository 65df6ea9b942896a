"""Settings of the tiers below the device, with checks of their values."""

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
LEAST = {  # the smallest value of each setting that is a whole number
    "host_slots": 1, "host_pages": 1, "ahead": 0, "staging": 1, "rank": 0, "threads": 1, "ranks": 1,
}  # fmt: skip
DERIVED = ("host_pages", "ahead")  # settings that may be None: then they are computed from other settings


@dataclass(frozen=True)
class Tiers:
    """Configures host memory and storage below a manager's prefix cache.

    Args:
        model: Name that stands for the weights, their quantisation and all else on which states depend. Records under
            another name are never used.
        host_slots: States for which host memory has room, 1 or more.
        host_pages: KV pages for which host memory has room. None: in the same proportion to `host_slots` as on the
            device.
        reserve: Share of host memory, from 0 up to 1, that prefetches leave for saves from the device.
        kv: Planes of the KV pages, in which a slot is a page. None if the caller manages KV.
        write: When states are copied to host memory. "through": as soon as they are cached. "selective": at their
            second hit. "back": when the device evicts them. If the device evicts a state before that, "through" saves
            it then, and "selective" saves it if it has had one hit.
        store: Storage that outlives the process. None: no storage.
        prefetch: How records come back from storage.
        threads: Threads that read and write storage.
        rank: Number of this process among the tensor-parallel ranks, from 0 on.
        ranks: Number of tensor-parallel ranks.
        group: gloo group of torch.distributed over which several ranks agree; nothing else may use it. When a manager
            is built, it waits for the other ranks and compares its settings with theirs.
        ahead: With "selective" and "back": while fewer than `ahead` slots are free, `poll` copies the next `ahead`
            states to host memory before the device evicts them. None: a sixteenth of `host_slots`, at most 64.
        staging: States for which each of the two staging buffers on the device has room, 1 or more. The two buffers for
            KV pages have the same size, but at least 32 MiB for each of these states. States that the device evicts
            while staging is full are lost.
        int8: Names of planes that records hold as 8-bit integers. The value of a name is the axis along which values
            share a scale.
        executor: Executor that replaces the threads, for tests.
        clock: Function that replaces `time.monotonic`, for tests.

    Raises:
        ConfigurationError: A setting is out of range, or two of them contradict each other.

    Example:
        >>> Tiers("tiny model, weights of today", host_slots=16, write="back").host_slots
        16
    """

    model: str
    host_slots: int
    host_pages: int | None = None
    reserve: float = 0.1
    kv: Planes | None = None
    write: Write = "through"
    store: Store | None = None
    prefetch: Prefetch = field(default_factory=Prefetch)
    threads: int = 4
    rank: int = 0
    ranks: int = 1
    group: Any = None
    ahead: int | None = None
    staging: int = 2
    int8: Mapping[str, int] = field(default_factory=dict)
    executor: Executor | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigurationError(
                f"model={self.model!r}: a text that names the weights; other models' states differ"
            )
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not (is_count(value) and value >= least) and not (name in DERIVED and value is None):
                raise ConfigurationError(f"{name}={value!r}: expected a whole number from {least} to {INT32_MAX}")
        if not isinstance(self.reserve, int | float) or not 0 <= self.reserve < 1:
            raise ConfigurationError(f"reserve={self.reserve!r}: expected a share from 0 up to, but not, 1")
        if self.write not in get_args(Write):
            raise ConfigurationError(f"write={self.write!r}: expected {', '.join(get_args(Write))}")
        if self.rank >= self.ranks or (self.group is None) != (self.ranks == 1):
            raise ConfigurationError(
                f"rank={self.rank}, ranks={self.ranks}, group={self.group!r}: ranks count from 0, and several of them "
                "need a torch.distributed group to agree over"
            )
        if not isinstance(self.kv, Planes | None) or not isinstance(self.prefetch, Prefetch):
            raise ConfigurationError(f"kv={self.kv!r}, prefetch={self.prefetch!r}: expected Planes and a Prefetch")
        if self.kv is not None and not self.kv.layout.payload_bytes_per_slot:
            raise ConfigurationError(f"kv={self.kv!r}: its pages have 0 bytes, so there is no KV to save; leave kv out")
        if self.host_pages is not None and self.kv is None:
            raise ConfigurationError(f"host_pages={self.host_pages} without kv: give the planes of the pages")
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

"""Host memory and storage of the demo, and the prefetches of requests that wait. Knows no slot."""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from memstate.cli.demo.config import DemoConfig
from memstate.cli.demo.streams import Streams
from memstate.cli.demo.work import Work
from memstate.engine.manager import StateManager
from memstate.state.planes import Planes
from memstate.tiers import FileStore, Mooncake, MooncakeStore, Prefetch, Store, Tiers

NAP_S = 0.0005  # where nothing can run until storage has answered


@contextmanager
def storage_of(config: DemoConfig) -> Iterator[Store | None]:
    """Yields the storage of a run; without a path, files in a temporary folder.

    Raises:
        ConfigurationError: The storage cannot be used.
    """
    if config.storage == "mooncake":
        yield MooncakeStore(Mooncake(config.mooncake_master, segment_bytes=config.mooncake_segment))
    elif config.storage == "file" and config.storage_path is not None:
        yield FileStore(config.storage_path)
    elif config.storage == "file":
        with tempfile.TemporaryDirectory(prefix="memstate-demo-") as folder:
            yield FileStore(Path(folder))
    else:
        yield None


def tiers_of(config: DemoConfig, store: Store | None, kv: Planes) -> Tiers | None:
    """Returns the settings of the tiers; None where the run has none."""
    if config.host_slots is None and store is None:
        return None
    return Tiers(
        model=f"demo {config.model} {config.size} seed {config.seed}", kv=kv, store=store,
        host_slots=config.host_slots or 2 * config.slots, write=config.write,
        prefetch=Prefetch(threshold=config.page_size, stop="wait_complete"),
    )  # fmt: skip


class Fetches:
    """Begins a prefetch for every request that waits, and says who need not wait for one any more."""

    def __init__(self, mem: StateManager, streams: Streams) -> None:
        self.mem, self.streams = mem, streams
        self.tiers = mem.tiers if mem.tiers is not None and mem.tiers.prefetcher is not None else None

    def arrived(self, waiting: Sequence[Work]) -> list[Work]:
        """Returns the requests at the front of a queue whose prefetches are over."""
        if self.tiers is None:
            return list(waiting)
        for work in waiting:
            if work.fetch is None:
                work.fetch = self.mem.prefetch(work.tokens, session=self.streams.of(work))
        ready = 0
        while ready < len(waiting) and (fetch := waiting[ready].fetch) and self.tiers.ready(fetch):
            ready += 1
        return list(waiting[:ready])

    def nap(self) -> None:
        """Lets threads work where the loop has nothing to do."""
        if self.tiers is not None:
            time.sleep(NAP_S)

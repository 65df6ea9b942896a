"""Makes the host memory and the storage of a demo run."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memstate.state.planes import Planes
from memstate.tiers import FileStore, Mooncake, MooncakeStore, Objects, Prefetch, Store, Tiers
from memstate_tools.demo.config import DemoConfig


@contextmanager
def storage_of(config: DemoConfig) -> Iterator[Store | None]:
    """Yields the storage of a run. Storage "file" without a path uses a temporary folder.

    Raises:
        ConfigurationError: The storage cannot be used.
    """
    if config.storage == "mooncake":
        yield MooncakeStore(Mooncake(config.mooncake_master, segment_bytes=config.mooncake_segment))
    elif config.storage == "objects":
        yield Objects(str(config.storage_path))
    elif config.storage == "file" and config.storage_path is not None:
        yield FileStore(config.storage_path)
    elif config.storage == "file":
        with tempfile.TemporaryDirectory(prefix="memstate-demo-") as folder:
            yield FileStore(Path(folder))
    else:
        yield None


def tiers_of(config: DemoConfig, store: Store | None, kv: Planes) -> Tiers | None:
    """Returns the settings of the tiers; None if the run has none."""
    if config.host_slots is None and store is None:
        return None
    return Tiers(
        model=f"demo {config.model} {config.size} seed {config.seed}", kv=kv, store=store,
        host_slots=config.host_slots or 2 * config.slots, write=config.write,
        prefetch=Prefetch(threshold=config.page_size, stop="wait_complete"),
    )  # fmt: skip

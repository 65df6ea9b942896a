"""Settings of the connector: reads and checks vLLM's `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memstate.checks import is_count, shown
from memstate.errors import ConfigurationError
from memstate.sizes import byte_count
from memstate.tiers.stores.base import Store
from memstate.tiers.stores.file import FileStore
from memstate.tiers.stores.objects import Objects

COUNTS = ("threads", "store_tokens")
# Loads get 1/8 of the staging memory, saves the rest: a load can go through it in parts, and no forward waits for it.
INWARD = 8


@dataclass(frozen=True)
class Settings:
    """The settings that `kv_connector_extra_config` can give.

    Args:
        host_blocks: Number of vLLM's blocks for which host memory has room, on each rank. Give this or `host_bytes`.
        host_bytes: Bytes of blocks in host memory, on each rank, as a number or as a text such as "64GiB".
        staging_bytes: Bytes of the staging buffers on the device, on each rank. Blocks for which they have no room
            wait.
        store: Folder of a `FileStore` below host memory, or URL of `Objects`. None: no store.
        store_capacity: Limit of the bytes in the folder, given like `host_bytes`. None: until the disk is full.
        store_tokens: The store is read only if it has more of a prompt than host memory: at least this many tokens.
        threads: Number of threads that read and write the store.
        model: Name that stands for the weights. None: their path and files stand for them.

    Raises:
        ConfigurationError: A value is missing or out of range.
        InvalidArgument: A number of bytes is not valid.

    Example:
        >>> Settings(host_bytes="64GiB").host_bytes
        68719476736
    """

    host_blocks: int | None = None
    host_bytes: int | str | None = None
    staging_bytes: int | str = 256 << 20
    store: str | None = None
    store_capacity: int | str | None = None
    store_tokens: int = 256
    threads: int = 4
    model: str | None = None

    def __post_init__(self) -> None:
        if (self.host_blocks is None) == (self.host_bytes is None):
            raise ConfigurationError(
                f"host_blocks={shown(self.host_blocks)} and host_bytes={shown(self.host_bytes)}: say how much host "
                "memory each rank gets, as exactly one of the two"
            )
        for name in ("host_bytes", "staging_bytes", "store_capacity"):
            if name == "staging_bytes" or getattr(self, name) is not None:
                object.__setattr__(self, name, byte_count(name, getattr(self, name)))
        for name in (*COUNTS, *(("host_blocks",) if self.host_bytes is None else ())):
            if not is_count(value := getattr(self, name)) or value < 1:
                raise ConfigurationError(f"{name}={shown(value)}: expected a whole number from 1 on")
        for name in ("store", "model"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigurationError(f"{name}={shown(getattr(self, name))}: expected a text")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Settings":
        """Returns the settings in a `kv_connector_extra_config`.

        Raises:
            ConfigurationError: A key is unknown, or a value is missing or out of range.
            InvalidArgument: A number of bytes is not valid.
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, given.keys() - set(names))):
            raise ConfigurationError(f"kv_connector_extra_config has {unknown}: expected some of {names}")
        return cls(**given)

    def records(self, kv_cache_config: Any) -> int:
        """Returns for how many blocks host memory has room: the same number in the scheduler and on each rank.

        Args:
            kv_cache_config: vLLM's configuration of the KV cache.

        Raises:
            ConfigurationError: There is not even room for one block.
        """
        if self.host_blocks is not None:
            return self.host_blocks
        whole: int = kv_cache_config.kv_cache_tensors[0].size  # bytes of the allocation in which all tensors lie
        nbytes = whole // int(kv_cache_config.num_blocks)
        if not (count := int(self.host_bytes or 0) // nbytes):
            raise ConfigurationError(f"host_bytes={self.host_bytes}: a block takes {nbytes}; set {nbytes} or more")
        return count

    def staged(self, nbytes: int) -> tuple[int, int]:
        """Returns (records for which the staging buffer of loads has room, records for which that of saves has room).

        Args:
            nbytes: Bytes of a record.

        Raises:
            ConfigurationError: There is no room for one record in each buffer.
        """
        if (count := int(self.staging_bytes) // nbytes) < 2:
            raise ConfigurationError(
                f"staging_bytes={self.staging_bytes}: a block takes {nbytes} and two must fit; set {2 * nbytes} or more"
            )
        inward = max(1, count // INWARD)
        return inward, count - inward

    def open_store(self) -> Store | None:
        """Returns the store, or None if there is none.

        Raises:
            ConfigurationError: The folder or the objects cannot be used.
            InvalidArgument: The URL is not valid.
        """
        if self.store is None:
            return None
        kind = Objects if "://" in self.store else FileStore
        return kind(self.store, capacity=None if self.store_capacity is None else int(self.store_capacity))

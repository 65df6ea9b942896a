"""Settings of the connector, read from vLLM's `kv_connector_extra_config` and checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memstate.checks import is_count, shown
from memstate.errors import ConfigurationError
from memstate.sizes import byte_count
from memstate.tiers.stores.base import Store
from memstate.tiers.stores.file import FileStore

COUNTS = ("threads", "store_tokens")
# Loads get an eighth of staging, saves the rest: a load can pass in several turns, and no forward waits for it.
INWARD = 8


@dataclass(frozen=True)
class Settings:
    """What `kv_connector_extra_config` can say.

    Args:
        host_blocks: Blocks of vLLM that host memory has room for, on each rank. Exactly one of this and `host_bytes`.
        host_bytes: The same in bytes of blocks, as a number or as a text such as "64GiB".
        staging_bytes: Bytes of the staging buffers on the device, on each rank. What does not fit waits there.
        store: Folder of a `FileStore` below host memory. None: no store.
        store_capacity: Bytes that the folder may take, as `host_bytes`. None: until the disk is full.
        store_tokens: Tokens that the store must have beyond host memory to be read.
        threads: Threads that read and write the store.
        model: Name of the weights, in place of their path and their files. None: these tell them apart.

    Raises:
        ConfigurationError: A value is missing or out of range.
        InvalidArgument: A number of bytes is none.

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
            InvalidArgument: A number of bytes is none.
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, given.keys() - set(names))):
            raise ConfigurationError(f"kv_connector_extra_config has {unknown}: expected some of {names}")
        return cls(**given)

    def records(self, kv_cache_config: Any) -> int:
        """Returns the blocks that host memory has room for, the same number in the scheduler and on each rank.

        Args:
            kv_cache_config: vLLM's configuration of the KV cache.

        Raises:
            ConfigurationError: There is no room for one.
        """
        if self.host_blocks is not None:
            return self.host_blocks
        whole: int = kv_cache_config.kv_cache_tensors[0].size  # of the allocation that all tensors lie in
        nbytes = whole // int(kv_cache_config.num_blocks)
        if not (count := int(self.host_bytes or 0) // nbytes):
            raise ConfigurationError(f"host_bytes={self.host_bytes}: a block takes {nbytes}; set {nbytes} or more")
        return count

    def staged(self, nbytes: int) -> tuple[int, int]:
        """Returns the records that fit the staging buffer of loads, and that of saves.

        Args:
            nbytes: Bytes of a record.

        Raises:
            ConfigurationError: There is not room for one of each.
        """
        if (count := int(self.staging_bytes) // nbytes) < 2:
            raise ConfigurationError(
                f"staging_bytes={self.staging_bytes}: a block takes {nbytes} and two must fit; set {2 * nbytes} or more"
            )
        inward = max(1, count // INWARD)
        return inward, count - inward

    def open_store(self) -> Store | None:
        """Returns the store, None for none.

        Raises:
            ConfigurationError: The folder cannot be used.
        """
        if self.store is None:
            return None
        return FileStore(self.store, capacity=None if self.store_capacity is None else int(self.store_capacity))

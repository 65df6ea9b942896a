"""Settings of the connector: reads and checks vLLM's `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memstate.checks import is_count, shown
from memstate.errors import ConfigurationError
from memstate.sizes import byte_count
from memstate.tiers.stores.base import Store
from memstate.tiers.stores.file import FileStore

COUNTS = ("threads", "store_tokens")
# Loads get an eighth of the staging memory, saves the rest: a load can pass in parts, and no forward waits for it.
INWARD = 8


@dataclass(frozen=True)
class Settings:
    """The settings that `kv_connector_extra_config` can give.

    Args:
        host_blocks: Blocks of vLLM that fit in host memory, on each rank. Give either this or `host_bytes`.
        host_bytes: Bytes of blocks in host memory, on each rank, as a number or as a text such as "64GiB".
        staging_bytes: Bytes of the staging buffers on the device, on each rank. Blocks that do not fit wait.
        store: Folder of a `FileStore` below host memory. None: no store.
        store_capacity: Most bytes in the folder, in the form of `host_bytes`. None: until the disk is full.
        store_tokens: Fewest tokens beyond host memory that the store must have to be read.
        threads: Threads that read and write the store.
        model: Name of the weights, used instead of their path and files. None: path and files name them.

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
        """Returns how many blocks fit in host memory: the same number in the scheduler and on each rank.

        Args:
            kv_cache_config: vLLM's configuration of the KV cache.

        Raises:
            ConfigurationError: Not even one block fits.
        """
        if self.host_blocks is not None:
            return self.host_blocks
        whole: int = kv_cache_config.kv_cache_tensors[0].size  # bytes of the allocation in which all tensors lie
        nbytes = whole // int(kv_cache_config.num_blocks)
        if not (count := int(self.host_bytes or 0) // nbytes):
            raise ConfigurationError(f"host_bytes={self.host_bytes}: a block takes {nbytes}; set {nbytes} or more")
        return count

    def staged(self, nbytes: int) -> tuple[int, int]:
        """Returns how many records fit in the staging buffer of loads, and in that of saves.

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
            ConfigurationError: The folder cannot be used.
        """
        if self.store is None:
            return None
        return FileStore(self.store, capacity=None if self.store_capacity is None else int(self.store_capacity))

"""Settings of the connector, read from vLLM's `kv_connector_extra_config` and checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from memstate.checks import is_count, shown
from memstate.errors import ConfigurationError
from memstate.tiers.stores.base import Store
from memstate.tiers.stores.file import FileStore

LEAST = {"host_blocks": 1, "staging": 1, "threads": 1, "store_tokens": 1}


@dataclass(frozen=True)
class Settings:
    """What `kv_connector_extra_config` can say.

    Args:
        host_blocks: Blocks of vLLM that host memory has room for, on each rank.
        staging: Blocks that fit each of the two staging buffers on the device, 1 or more. What a step saves beyond them
            is not saved.
        store: Folder of a `FileStore` below host memory. None: no store.
        store_capacity: Bytes that the folder may take. None: until the disk is full.
        store_tokens: Tokens that the store must have beyond host memory to be read.
        threads: Threads that read and write the store.
        model: Name of the weights, in place of their path and their files. None: these tell them apart.

    Raises:
        ConfigurationError: A value is out of range.

    Example:
        >>> Settings(host_blocks=1000).staging
        32
    """

    host_blocks: int
    staging: int = 32
    store: str | None = None
    store_capacity: int | None = None
    store_tokens: int = 256
    threads: int = 4
    model: str | None = None

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not is_count(value) or value < least:
                raise ConfigurationError(f"{name}={shown(value)}: expected a whole number from {least} on")
        for name in ("store", "model"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigurationError(f"{name}={shown(getattr(self, name))}: expected a text")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Settings":
        """Returns the settings in a `kv_connector_extra_config`.

        Raises:
            ConfigurationError: A key is missing or unknown, or a value is out of range.
        """
        names = [field.name for field in fields(cls)]
        if unknown := sorted(given.keys() - set(names)):
            raise ConfigurationError(f"kv_connector_extra_config has {unknown}: expected some of {names}")
        if "host_blocks" not in given:
            raise ConfigurationError(
                "kv_connector_extra_config without host_blocks: say how many blocks of vLLM host memory holds"
            )
        return cls(**given)

    def open_store(self) -> Store | None:
        """Returns the store, None for none.

        Raises:
            ConfigurationError: The folder cannot be used.
        """
        return FileStore(self.store, capacity=self.store_capacity) if self.store is not None else None

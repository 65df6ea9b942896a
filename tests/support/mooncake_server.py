"""Starts a real Mooncake master with its metadata server."""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from memstate.tiers.stores.mooncake_client import INSTALL, LIBRARIES, Mooncake
from tests.support.loopback import HOST, Program

LEASE_MS = 3000  # time after a read in which a record is not evicted


def missing() -> str:
    """Returns why Mooncake cannot be used here, or an empty string."""
    if importlib.util.find_spec("mooncake") is None:
        return f"the package is not installed: {INSTALL}"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"{error}: apt-get install {' '.join(LIBRARIES)}"
    return ""


class Master(Program):
    """A master process."""

    def __init__(self) -> None:
        super().__init__(3)

    def settings(self, http: bool = False, **others: Any) -> Mooncake:
        """Returns settings of a client of this master. http: whether the client uses the metadata server."""
        metadata = {"metadata": f"http://{HOST}:{self.ports[1]}/metadata"} if http else {}
        return Mooncake(**{"master": f"{HOST}:{self.ports[0]}", "segment_bytes": 32 << 20, **metadata, **others})

    def command(self) -> list[str]:
        port, metadata, metrics = self.ports
        flags = {
            "rpc_address": HOST, "rpc_port": port, "rpc_thread_num": 2, "default_kv_lease_ttl": LEASE_MS,
            "enable_http_metadata_server": "true", "http_metadata_server_host": HOST,
            "http_metadata_server_port": metadata, "metrics_host": HOST, "metrics_port": metrics,
        }  # fmt: skip
        return ["-m", "mooncake.cli", *(f"-{name}={value}" for name, value in flags.items())]


@contextmanager
def running_master() -> Iterator[Master]:
    """Runs a master during the block. Skips the test if Mooncake cannot be used."""
    if why := missing():
        pytest.skip(f"Mooncake: {why}")
    master = Master()
    try:
        yield master
    finally:
        master.kill()

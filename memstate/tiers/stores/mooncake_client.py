"""Sets up the client of a Mooncake store from its settings. Knows no record.

The client is C++ with its own threads. Its set-up holds Python's lock, for more than a minute if the master does not
answer. So `connect` first tries by itself whether the addresses answer.
"""

import importlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from memstate.errors import ConfigurationError
from memstate.sizes import format_bytes

INSTALL = "pip install '.[mooncake]' in a checkout of memstate"
LIBRARIES = ("libibverbs1", "librdmacm1", "libnuma1", "libcurl4", "liburing2")  # Debian packages
P2P = "P2PHANDSHAKE"  # as `metadata`: no metadata server, clients ask each other
# The only texts that are safe: with another one, the client's set-up hangs or ends the process.
METADATA = re.compile(rf"{P2P}|(http|https|etcd|redis)://[^/]+.*")
ADDRESS = re.compile(r".+:([0-9]{1,5})")
LEAST_SEGMENT = 16 << 20  # bytes; the client refuses smaller segments

Client = Any  # mooncake.store.MooncakeDistributedStore
Protocol = Literal["tcp", "rdma"]

INVALID, EXISTS = -600, -705
ABSENT = (-703, -704, -710, -712)  # codes: the record is being written, was never written, was removed, was evicted
CODES = {
    -1: "INTERNAL_ERROR", -101: "SEGMENT_NOT_FOUND", -200: "NO_SPACE", INVALID: "INVALID_PARAMS", -701: "INVALID_READ",
    -702: "INVALID_REPLICA", -707: "LEASE_EXPIRED", -800: "TRANSFER_FAIL", -801: "CHECKSUM_MISMATCH",
    -900: "RPC_FAIL", -901: "RPC_TIMEOUT",
}  # fmt: skip

_set_up = threading.Lock()  # one set-up at a time: the client reads its time limits from environment variables


def name_of(code: int) -> str:
    """Returns the name of a code of the client."""
    return CODES.get(code, str(code))


@dataclass(frozen=True)
class Mooncake:
    """Settings of a Mooncake store: where it is, and what this process adds to it.

    Args:
        master: host:port of the store's master.
        hostname: Name under which other machines reach this one. "": the local address of the connection to the master.
        metadata: URL of the metadata server, the same for all clients. Default: the clients ask each other.
        protocol: "tcp" or "rdma". "rdma" needs an RDMA network.
        device: RDMA adapters, comma-separated. "": the client looks for them.
        segment_bytes: Bytes of host memory that this process gives to the store: 16 MiB or more, or 0 for none.
        buffer_bytes: Bytes of the client's own buffer. Only records on a disk of the store pass through it.
        replicas: Number of copies of each record, on different segments.
        timeout: Seconds within which the master must answer.

    Raises:
        ConfigurationError: A setting is out of range.

    Example:
        >>> Mooncake("10.0.0.1:50051", segment_bytes=64 << 20).protocol
        'tcp'
    """

    master: str
    hostname: str = ""
    metadata: str = P2P
    protocol: Protocol = "tcp"
    device: str = ""
    segment_bytes: int = 0
    buffer_bytes: int = 0
    replicas: int = 1
    timeout: float = 5.0

    def __post_init__(self) -> None:
        looked_up = isinstance(self.master, str) and "://" in self.master  # the client chooses one of several masters
        for name in ("master", "hostname", "metadata"):
            address = getattr(self, name)
            if not isinstance(address, str) or not (address or (name == "hostname" and not looked_up)):
                raise ConfigurationError(f"{name}={address!r}: expected an address")
        if not METADATA.fullmatch(self.metadata):
            raise ConfigurationError(
                f"metadata={self.metadata!r}: expected {P2P}, or a URL of http, https, etcd or redis as all clients of "
                "the store have it, such as http://10.0.0.1:8080/metadata"
            )
        if self.protocol not in get_args(Protocol) or not isinstance(self.device, str):
            raise ConfigurationError(f"protocol={self.protocol!r}, device={self.device!r}: expected tcp or rdma")
        least = {"segment_bytes": 0, "buffer_bytes": 0, "replicas": 1}
        for name, value in ((name, getattr(self, name)) for name in least):
            if not isinstance(value, int) or isinstance(value, bool) or value < least[name]:
                raise ConfigurationError(f"{name}={value!r}: expected a whole number from {least[name]} on")
        if 0 < self.segment_bytes < LEAST_SEGMENT:
            raise ConfigurationError(
                f"segment_bytes={self.segment_bytes}: expected {LEAST_SEGMENT} ({format_bytes(LEAST_SEGMENT)}) or more,"
                " or 0 to give no memory to the store"
            )
        if not isinstance(self.timeout, int | float) or not 0.001 <= self.timeout <= 3600:
            raise ConfigurationError(f"timeout={self.timeout!r}: expected seconds, from 0.001 to 3600")


def connect(settings: Mooncake) -> tuple[Client, Any]:
    """Sets up a client.

    Returns:
        The client, and its configuration for writes of records.

    Raises:
        ConfigurationError: The client is not installed or refuses the settings, or an address does not answer.
    """
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise ConfigurationError(
            f"Mooncake's client cannot be loaded: {error}; {INSTALL}, and on Debian apt-get install "
            f"{' '.join(LIBRARIES)}"
        ) from error
    hostname = settings.hostname
    if "://" not in settings.master:
        reached_from = _answers("master", settings.master, settings.timeout)
        hostname = hostname or reached_from
    if settings.metadata.startswith(("http://", "https://")):
        _answers("metadata server", settings.metadata.split("/")[2], settings.timeout)
    client = module.MooncakeDistributedStore()
    with _set_up, _limits(settings.timeout):
        code = client.setup(
            hostname, settings.metadata, settings.segment_bytes, settings.buffer_bytes, settings.protocol,
            settings.device, settings.master,
        )  # fmt: skip
    if code:
        raise ConfigurationError(f"Mooncake's client refuses {settings}: {name_of(code)}; its log on stderr says why")
    config = module.ReplicateConfig()
    config.replica_num = settings.replicas
    return client, config


def _answers(what: str, address: str, timeout: float) -> str:
    """Connects to an address, and returns the local address of the connection."""
    parts = ADDRESS.fullmatch(address)
    if not parts or int(parts[1]) > 65535:
        raise ConfigurationError(f"Mooncake {what} at {address}: expected host:port, such as 10.0.0.1:50051")
    try:
        with socket.create_connection((address.rpartition(":")[0].strip("[]"), int(parts[1])), timeout) as connection:
            return str(connection.getsockname()[0])
    except (OSError, ValueError) as error:  # ValueError: the name of the host is not valid
        raise ConfigurationError(
            f"Mooncake {what} at {address}: {error}; expected host:port of one that runs, see docs/mooncake.md"
        ) from error


@contextmanager
def _limits(timeout: float) -> Iterator[None]:
    """Sets how long the client waits for a master that does not answer. It tries to connect three times."""
    limits = {"MC_RPC_TIMEOUT_MS": timeout, "MC_RPC_CONNECT_TIMEOUT_MS": timeout / 3}
    before = {name: os.environ.get(name) for name in limits}
    os.environ.update({name: str(max(1, round(1000 * seconds))) for name, seconds in limits.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

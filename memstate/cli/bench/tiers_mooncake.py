"""A Mooncake store on loopback for the time of a benchmark: a master, and a second process that has the memory.

A client copies to and from its own memory past the network. Only what lies in another process goes the way that records
of other machines go. Knows nothing of what is measured.
"""

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from memstate.errors import ConfigurationError
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore
from memstate.tiers.stores.mooncake_client import EXTRA, LIBRARIES

HOST = "127.0.0.1"
PATIENCE_S = 30.0  # for a start that takes one second
READY = "ready"
LOG_LEVEL = "MC_LOG_LEVEL"
HOLD = "import sys; from memstate.cli.bench.tiers_mooncake import hold; hold(sys.argv[1], int(sys.argv[2]))"


class Unavailable(Exception):
    """There can be no Mooncake store here, and why."""


@contextmanager
def loopback(segment_bytes: int) -> Iterator[MooncakeStore]:
    """Yields a client of a store of so many bytes, which lie in another process.

    Raises:
        Unavailable: There can be no store here.
    """
    with _quiet():
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:
            remedy = f"pip install '{EXTRA}', and on Debian apt-get install {' '.join(LIBRARIES)}"
            raise Unavailable(f"{' '.join(str(error).split())}; {remedy}") from error
        with _master() as address, _holder(address, segment_bytes):
            try:
                store = MooncakeStore(Mooncake(address))
            except ConfigurationError as error:
                raise Unavailable(" ".join(str(error).split())) from error
            try:
                yield store
            finally:
                store.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Limits the client's log to errors, unless the environment sets its level."""
    said = LOG_LEVEL in os.environ
    os.environ.setdefault(LOG_LEVEL, "ERROR")
    try:
        yield
    finally:
        if not said:
            del os.environ[LOG_LEVEL]


def hold(address: str, segment_bytes: int) -> None:
    """Gives memory to the store of a master until stdin ends: what the second process does."""
    store = MooncakeStore(Mooncake(address, segment_bytes=segment_bytes))
    print(READY, flush=True)
    sys.stdin.read()
    store.close()


@contextmanager
def _master() -> Iterator[str]:
    """host:port of a master process. Raises: Unavailable."""
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):  # together, so that no port is given twice
            one.bind((HOST, 0))
        port, metrics = (one.getsockname()[1] for one in (first, second))
    flags = {"rpc_address": HOST, "rpc_port": port, "rpc_thread_num": 2, "metrics_host": HOST, "metrics_port": metrics}
    command = [sys.executable, "-m", "mooncake.cli", *(f"-{name}={value}" for name, value in flags.items())]
    master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + PATIENCE_S
        while not _answers(port):
            if master.poll() is not None or time.monotonic() > end:
                raise Unavailable(f"mooncake_master on port {port} does not answer; its status is {master.returncode}")
            time.sleep(0.02)
        yield f"{HOST}:{port}"
    finally:
        _end(master)


@contextmanager
def _holder(address: str, segment_bytes: int) -> Iterator[None]:
    """Raises: Unavailable."""
    command = [sys.executable, "-c", HOLD, address, str(segment_bytes)]
    pipe = subprocess.PIPE
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    try:
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != READY:
            raise Unavailable(f"no process could give {segment_bytes} bytes to the store at {address}")
        yield
    finally:
        _end(holder)


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), 1.0):
        return True
    return False


def _end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    process.kill()  # nothing of it is worth keeping
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()

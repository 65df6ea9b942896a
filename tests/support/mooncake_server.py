"""Starts and kills a real Mooncake master with its metadata server, on loopback ports that stay the same."""

import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from memstate.tiers.stores.mooncake_client import INSTALL, LIBRARIES, Mooncake

HOST = "127.0.0.1"
PATIENCE_S = 60.0  # limit for a start, which usually takes one second
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


class Master:
    """A master process. Raises: RuntimeError if it does not answer in time."""

    def __init__(self) -> None:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            sockets = first, second, third  # all open at once, so that the ports differ
            for one in sockets:
                one.bind((HOST, 0))
            self.port, self.metadata_port, self.metrics_port = (one.getsockname()[1] for one in sockets)
        self.start()

    def settings(self, http: bool = False, **others: Any) -> Mooncake:
        """Returns settings of a client of this master. http: whether the client uses the metadata server."""
        metadata = {"metadata": f"http://{HOST}:{self.metadata_port}/metadata"} if http else {}
        return Mooncake(**{"master": f"{HOST}:{self.port}", "segment_bytes": 32 << 20, **metadata, **others})

    def start(self) -> None:
        """Starts the process, and waits until it answers."""
        flags = {
            "rpc_address": HOST, "rpc_port": self.port, "rpc_thread_num": 2, "default_kv_lease_ttl": LEASE_MS,
            "enable_http_metadata_server": "true", "http_metadata_server_host": HOST,
            "http_metadata_server_port": self.metadata_port, "metrics_host": HOST, "metrics_port": self.metrics_port,
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mooncake.cli", *(f"-{name}={value}" for name, value in flags.items())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + PATIENCE_S
        for port in (self.port, self.metadata_port):
            while not self._answers(port):
                if self.process.poll() is not None or time.monotonic() > end:
                    self.kill()
                    raise RuntimeError(f"mooncake_master on port {port}: ended with {self.process.returncode}")
                time.sleep(0.02)

    def kill(self) -> None:
        """Kills the process, as a crash does."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stops all threads of the process during the block. Its connections stay open, but it does not answer."""
        os.kill(self.process.pid, signal.SIGSTOP)
        while not self._stopped():
            time.sleep(0.001)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def _stopped(self) -> bool:
        states = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(state.read_text().rpartition(")")[2].split()[0] == "T" for state in states)

    @staticmethod
    def _answers(port: int) -> bool:
        with suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return True
        return False


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


def until(what: Callable[[], Any], told: str) -> None:
    """Waits until `what()` is true. Raises: TimeoutError."""
    end = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(told)
        time.sleep(0.05)

"""Runs a Mooncake store on loopback during a benchmark: a master, and a second process that gives the memory.

A client reads and writes its own memory without the network. Only records in another process take the path of records
on other machines.
"""

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from memstate.errors import ConfigurationError
from memstate.tiers.stores.mooncake import Mooncake, MooncakeStore
from memstate.tiers.stores.mooncake_client import INSTALL, LIBRARIES

HOST = "127.0.0.1"
PATIENCE_S = 30.0  # most seconds of a start, which usually takes one second
HOLD = "import sys; from memstate_tools.bench.tiers_mooncake import hold; hold(sys.argv[1], int(sys.argv[2]))"


class Unavailable(Exception):
    """Says that there can be no such store here, and why."""


@contextmanager
def loopback(segment_bytes: int) -> Iterator[MooncakeStore]:
    """Yields a client of a store with `segment_bytes` bytes, which lie in another process.

    Raises:
        Unavailable: There can be no store here.
    """
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        remedy = f"{INSTALL}, and on Debian apt-get install {' '.join(LIBRARIES)}"
        raise Unavailable(f"{' '.join(str(error).split())}; {remedy}") from error
    with ExitStack() as processes:
        address = _start_master(processes)
        holder = start(processes, "-c", HOLD, address, str(segment_bytes))
        if not (holder.stdout and holder.stdout.readline()):
            raise Unavailable(f"no process could give {segment_bytes} bytes to the store at {address}")
        try:
            store = MooncakeStore(Mooncake(address))
        except ConfigurationError as error:
            raise Unavailable(" ".join(str(error).split())) from error
        processes.callback(store.close)
        yield store


def hold(address: str, segment_bytes: int) -> None:
    """Gives memory to the store of a master until stdin ends. Runs in the second process."""
    store = MooncakeStore(Mooncake(address, segment_bytes=segment_bytes))
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def _start_master(processes: ExitStack) -> str:
    port, metrics = free_ports(2)
    flags = {"rpc_address": HOST, "rpc_port": port, "rpc_thread_num": 2, "metrics_host": HOST, "metrics_port": metrics}
    master = start(processes, "-m", "mooncake.cli", *(f"-{name}={value}" for name, value in flags.items()))
    return answering("mooncake_master", port, master)


def free_ports(count: int) -> list[int]:
    """Returns ports of loopback that no program uses."""
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]  # all at once, so that ports differ
        for one in bound:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in bound]


def answering(name: str, port: int, process: "subprocess.Popen[str]") -> str:
    """Waits until a server answers. Returns its host:port.

    Raises:
        Unavailable: It has ended, or does not answer in time.
    """
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return f"{HOST}:{port}"
        time.sleep(0.02)
    raise Unavailable(f"{name} on port {port} does not answer; its status is {process.returncode}")


def start(processes: ExitStack, *arguments: str) -> "subprocess.Popen[str]":
    """Starts a process of this Python. The process is killed when `processes` ends, since its data is not needed."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *arguments], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )
    processes.enter_context(process)
    processes.callback(process.kill)
    return process

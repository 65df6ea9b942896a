"""Starts, kills and freezes a server on loopback ports that stay the same."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
PATIENCE_S = 60.0  # limit for a start, which usually takes one or two seconds


class Program:
    """A server in a process. Raises: RuntimeError if it does not answer in time.

    Args:
        ports: number of ports that it needs; it answers at the first two.
    """

    def __init__(self, ports: int) -> None:
        with ExitStack() as sockets:
            bound = [sockets.enter_context(socket.socket()) for _ in range(ports)]  # all at once, so that ports differ
            for one in bound:
                one.bind((HOST, 0))
            self.ports = [one.getsockname()[1] for one in bound]
        self.start()

    def command(self) -> list[str]:
        """Returns the arguments for Python."""
        raise NotImplementedError

    def start(self) -> None:
        """Starts the process, and waits until it answers."""
        void = subprocess.DEVNULL
        self.process = subprocess.Popen([sys.executable, *self.command()], stdout=void, stderr=void)
        end = time.monotonic() + PATIENCE_S
        for port in self.ports[:2]:
            while not self._answers(port):
                if self.process.poll() is not None or time.monotonic() > end:
                    self.kill()
                    raise RuntimeError(f"{type(self).__name__} on port {port}: ended with {self.process.returncode}")
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


def until(what: Callable[[], Any], told: str) -> None:
    """Waits until `what()` is true. Raises: TimeoutError."""
    end = time.monotonic() + PATIENCE_S
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(told)
        time.sleep(0.05)

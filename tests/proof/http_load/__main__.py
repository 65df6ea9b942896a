"""Loads examples/serve_http with many clients, some of which go away. Checks the answers and what is left.

    python -m tests.proof.http_load [--minutes 10] [--clients 100] [--rounds 7]

The example runs in its own process, on a small model in fp32. First the model with its own cache answers each prompt
alone. Prompts for which two tokens are almost equally likely are left out, because a batch rounds differently than a
single row. Then clients request these answers, whole or as streams. 30 % of the requests end because the client goes
away, before the first token or later. One client reads slowly. At last, pairs of rounds run the same requests over
HTTP, and without HTTP through `Server.stream`.

The server has its own CPU core. Python runs only one of its threads at a time; on two cores, its threads would
change cores again and again.

Prints a line every minute. Ends with 1 if an answer is wrong, if a request, row or fault is left, or if memory grows.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.proof.http_load.load import Case, Load, prepare
from tests.proof.http_load.serving import serve
from tests.support.sources import ROOT


def run(folder: str, cases: list[Case], clients: int, minutes: float, rounds: int) -> int:
    """Starts the server with the model of a folder, runs the load on it, and returns the exit status."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.proof.http_load", "--serve", folder, str(port)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        apart(process.pid)
        try:
            return asyncio.run(Load(port, folder, cases, clients).run(60 * minutes, rounds))
        finally:
            process.terminate()


def apart(server: int) -> None:
    """Gives the first CPU core to the server, and the others to this process."""
    first, *others = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    if others:
        os.sched_setaffinity(server, {first})
        os.sched_setaffinity(0, others)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.http_load")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve[0], int(given.serve[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run(folder, prepare(Path(folder)), given.clients, given.minutes, given.rounds)


if __name__ == "__main__":
    sys.exit(main())

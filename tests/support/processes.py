"""Ranks of a group as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(module: str, ranks: int, place: Path) -> list[tuple[str, str]]:
    """Runs `python -m module RANK RANKS PLACE` for every rank at once; returns what each wrote and its errors."""
    settings = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, "text": True}
    commands = [[sys.executable, "-m", module, str(rank), str(ranks), str(place)] for rank in range(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, **settings, **pipes) for command in commands]  # type: ignore[call-overload]
    try:
        return [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()

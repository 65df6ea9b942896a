"""Starts other processes: Python without the settings of the tests, ranks of a group, forked children, and a venv."""

import os
import subprocess
import sys
import sysconfig
import traceback
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ran(
    *command: object, cwd: Path = ROOT, without: Sequence[str] = (), **more: object
) -> "subprocess.CompletedProcess[str]":
    """Runs a program, whose environment lacks some names and has others, to its end, however it ends."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {name: str(value) for name, value in more.items()}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)


def python(*arguments: object, cwd: Path = ROOT, without: Sequence[str] = ("TRITON_INTERPRET",), **more: str) -> str:
    """Runs Python in another process, whose environment lacks some names and has others; returns what it prints."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")])}
    done = ran(sys.executable, *arguments, cwd=cwd, without=without, **(paths | more))
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_ranks(module: str, ranks: int, place: Path) -> list[tuple[str, str]]:
    """Runs `python -m module RANK RANKS PLACE` for all ranks at once. Returns (stdout, stderr) of each rank."""
    settings = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, "text": True}
    commands = [[sys.executable, "-m", module, str(rank), str(ranks), str(place)] for rank in range(ranks)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, **settings, **pipes) for command in commands]  # type: ignore[call-overload]
    try:
        return [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()


def in_child(work: Callable[[], object]) -> int:
    """Forks a child that runs `work`, then exits without clean-up of Python objects. Returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def bare(folder: Path) -> Path:
    """Makes a virtual environment with the packages of the running one, without this project. Returns its Python."""
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in os.scandir(place):
            if "memstate" not in entry.name and not entry.name.endswith(".pth"):  # a .pth file may point to a checkout
                (own / entry.name).symlink_to(entry.path)
    return folder / "bin" / "python"

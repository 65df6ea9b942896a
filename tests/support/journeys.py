"""Counts the Python frames of memstate in four journeys, which are common calls of a manager.

The second run of each journey is counted, on the reference backend. Every Python from 3.11 on gives the same number:
list, set and dict comprehensions do not count, because 3.12 runs them without a frame. A generator counts once, because
3.13 ends some generators without a call.
"""

import gc
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memstate as ms

INSIDE = str(Path(ms.__file__).parent.resolve())
KERNELS = str((Path(ms.__file__).parent / "kernels").resolve())  # in a checkout, this folder is a link
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")


def manager(**settings: Any) -> ms.StateManager:
    """Returns a manager whose rows never reach a boundary."""
    layout = ms.StateLayout([ms.Plane("ssm", (2, 8, 8), torch.float32)], layers=2)
    never = ms.Redirect(every=2**20)
    usual: dict[str, Any] = {"slots": 32, "max_requests": 8, "tracking": never, "backend": "reference", "device": "cpu"}
    return ms.StateManager(layout, **usual | settings)


def admit() -> Callable[[], object]:
    """Returns a call that admits a request without tokens."""
    mem = manager()
    return lambda: mem.admit([ms.Request("a")])


def step() -> Callable[[], object]:
    """Returns a call that plans and settles a decode step of one row, without a forward."""
    mem = manager()
    rows = mem.admit([ms.Request("a")])
    return lambda: mem.settle(mem.plan(rows))


def end() -> Callable[[], object]:
    """Returns a call that ends a row and keeps nothing of it."""
    mem = manager()
    rows = list(mem.admit([ms.Request(who) for who in range(4)]))
    return lambda: mem.end([rows.pop()])


def miss() -> Callable[[], object]:
    """Returns a call that admits a request whose prompt the prefix cache does not have."""
    mem = manager(pages=ms.Pages(size=4, count=64, per_row=16), prefix=ms.Prefix())
    return lambda: mem.admit([ms.Request("a", tokens=list(range(16)))])


JOURNEYS = {"admit": admit, "plan+settle": step, "end": end, "admit-with-cache": miss}


def frames() -> dict[str, int]:
    """Returns journey -> number of frames of memstate."""
    counts = {}
    for name, start in JOURNEYS.items():
        act = start()
        act()
        counts[name] = count(act, _ours)
    return counts


def count(act: Callable[[], object], ours: Callable[[str], bool]) -> int:
    """Returns the number of frames of the call `act` that are in our files. ours: whether a file is ours."""
    frames, generators = 0, set()

    def note(frame: Any, event: str, of: Any) -> None:
        nonlocal frames
        code = frame.f_code
        if event != "call" or code.co_name in INLINED or frame in generators:
            return
        if code.co_flags & inspect.CO_GENERATOR:
            generators.add(frame)
        frames += ours(code.co_filename)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # otherwise finalizers would be counted
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return frames


def _ours(name: str) -> bool:
    return any(Path(folder) in Path(name).resolve().parents for folder in (INSIDE, KERNELS))

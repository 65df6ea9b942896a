"""Kills or stops a process at each line of examples/many_machines/worker.py, while requests move between two of them:

    python -m tests.proof.moved_kills --kills 300 [--seed 1]

For each kill, an owner and two new processes serve three requests, which are computed in the first process, move to the
second one, pause there, and move back. One of the two gets SIGKILL or SIGSTOP at a line of its code. A process that was
stopped goes on: soon, or after its requests were given to the other one, or after all have ended.

Ends with 1 if the owner's tokens are not those of an undisturbed run, if anything is left in a process that lives, or
if a process ends by an error.
"""

import argparse
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from tests.support.sources import ROOT

FOLDER = ROOT / "examples" / "many_machines"
sys.path.insert(0, str(FOLDER))

import front  # noqa: E402
import moves  # noqa: E402
import worker  # noqa: E402

FILES = {str(FOLDER / name) for name in ("worker.py", "owner.py")}
PROMPTS = {f"request {n}": tuple(70 * n + at for at in range(9 + 5 * n)) for n in range(3)}
MOST = 48  # tokens of a request, with its prompt
PATIENCE_S = 0.3
SLEEPS_S = (0.02, 2 * PATIENCE_S, 99.0)  # at most until all requests have ended
LATEST_S = 20.0
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


class Wrong(AssertionError):
    """A fault; the text says where a process was killed or stopped."""


class Point(NamedTuple):
    """A process gets a signal when it comes to a line, as `file:number`, for the n-th time."""

    place: int
    line: str
    nth: int
    signal: signal.Signals


def traced(at: int, point: Point | None, folder: Path, place: str, line: Connection) -> None:
    """Runs a process that gets the signal of a point. Without a point, it writes how often it came to each line."""
    seen = Counter[str]()

    def trace(frame: FrameType, event: str, given: object) -> Any:
        if event == "line":
            here = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            seen[here] += 1
            if point is not None and (point.line, point.nth) == (here, seen[here]):
                os.kill(os.getpid(), point.signal)
        return trace

    sys.settrace(lambda frame, event, given: trace if frame.f_code.co_filename in FILES else None)
    worker.work(place, line)
    sys.settrace(None)
    if point is None:
        (folder / str(at)).write_text("\n".join(f"{here} {n}" for here, n in seen.items()))


class Watched(front.Front):
    """An owner's process that lets a stopped process go on.

    Args:
        sleep: seconds after which it goes on, at most until all requests have ended.
        given: what `Front` takes.

    Attributes:
        stops: how many processes were stopped.
    """

    def __init__(self, sleep: float, *given: Any) -> None:
        super().__init__(*given)
        self.sleep, self.stops, self.since, self.began = sleep, 0, dict[int, float](), time.monotonic()

    def turn(self) -> None:
        super().turn()
        if time.monotonic() > self.began + LATEST_S:
            raise Wrong(f"no end after {LATEST_S:.0f} s: {self.runs()} run, {list(self.lines)} live")
        for process in self.processes.values():
            with suppress(ChildProcessError):
                if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                    since = self.since.setdefault(process.pid, time.monotonic())
                    if time.monotonic() > since + self.sleep or (self.owners and not self.runs()):
                        os.kill(process.pid, signal.SIGCONT)
                        self.stops += 1

    def stop_all(self) -> None:
        """Kills all processes, after a fault."""
        for process in self.processes.values():
            process.kill()
            process.join()


def serve(at: front.Front) -> None:
    """Serves three requests that move, pause, and move back."""
    first, second, third = PROMPTS
    for name, prompt in PROMPTS.items():
        at.ask(name, prompt, MOST, 0)
    for name, prompt in PROMPTS.items():
        at.move(name, len(prompt), then=1)
    at.move(first, len(PROMPTS[first]) + 8)
    at.move(third, len(PROMPTS[third]) + 12, then=0)
    at.until(lambda: at.owners[second].ended)
    if first in at.paused:
        at.give(first, 1)
    at.until(lambda: not at.runs())


def life(point: Point | None, sleep: float, folder: Path, expected: dict[str, Any]) -> bool:
    """Runs an owner and two processes. One of them gets a signal at a point, if it comes there: returns whether it did.

    Raises:
        Wrong: tokens differ, something is left, or a process ended in another way.
    """
    works = tuple(partial(traced, at, point if point and point.place == at else None, folder) for at in (0, 1))
    at = Watched(sleep, str(folder / "records"), mp.get_context("fork"), works, PATIENCE_S)
    try:
        serve(at)
        at.end()
    except SystemExit as error:
        raise Wrong(str(error)) from error
    finally:
        at.stop_all()
    if wrong := [name for name in PROMPTS if at.owners[name].tokens != expected[name]]:
        raise Wrong(f"wrong tokens of {wrong}")
    ended = {place: process.exitcode for place, process in at.processes.items()}
    killed = point is not None and ended[point.place] == -point.signal == -signal.SIGKILL
    lives = {0, 1} - {point.place} if point and killed else {0, 1}
    if any(ended[place] for place in lives) or not lives <= {*at.left}:
        raise Wrong(f"processes ended with {ended}; {[*at.left]} said what is left")
    if point is None and at.computed != len(PROMPTS) * (MOST - 1):
        raise Wrong(f"{at.computed} tokens computed: some twice, although nobody disturbed")
    return killed or at.stops > 0


def kill(kills: int, seed: int, tell: Callable[[str], None]) -> str:
    """Kills and stops processes, at other lines each time. Returns the figures, in words.

    Raises:
        Wrong: something is wrong.
    """
    chance, began = random.Random(seed), time.monotonic()
    expected = {name: moves.undisturbed(prompt, MOST) for name, prompt in PROMPTS.items()}
    done, tried, reached = Counter[str](), 0, set[tuple[int, str]]()
    with tempfile.TemporaryDirectory(prefix="memstate-moved-") as place:
        life(None, 0, Path(place), expected)
        counts = {at: dict(one.split() for one in (Path(place) / str(at)).read_text().split("\n")) for at in (0, 1)}
        points = list[Point]()
        while done.total() < kills:
            if not points:  # all lines, each once, in any order
                points = [
                    Point(at, line, chance.randint(1, int(n)), chance.choice(SIGNALS))
                    for at in counts for line, n in counts[at].items()
                ]  # fmt: skip
                chance.shuffle(points)
            point, sleep = points.pop(), chance.choice(SLEEPS_S)
            with tempfile.TemporaryDirectory(prefix="memstate-moved-") as folder:
                try:
                    came = life(point, sleep, Path(folder), expected)
                except Wrong as wrong:
                    raise Wrong(f"seed {seed}, {point}, asleep for {sleep} s: {wrong}") from wrong
            tried += 1
            if came:
                done[point.signal.name] += 1
                reached.add(point[:2])
            if tried % 20 == 0:
                tell(f"{done.total()} of {tried}")
    lines = sum(map(len, counts.values()))
    return (
        f"{done['SIGKILL']} kills and {done['SIGSTOP']} stops in {tried} runs, at {len(reached)} of {lines} lines, "
        f"{time.monotonic() - began:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    front.START_S = 1.0
    try:
        print(f"{kill(chosen.kills, chosen.seed, lambda line: print(line, flush=True))}, nothing wrong")
    except Wrong as wrong:
        print(f"WRONG: {wrong}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

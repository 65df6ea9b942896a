"""Runs a million steps with tiers and sessions, and checks that objects, bytes and step times do not grow.

    python -m tests.proof.long_run [--steps 1000000] [--windows 10]

Prints a line for each window of steps: steps so far, median and 99th percentile of a step in microseconds, number of
objects that the garbage collector tracks, megabytes of the process. Ends with 1 if a figure of the last third of the
windows is above that of the third before it by more than its tolerance.
"""

import argparse
import gc
import random
import resource
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

import memstate as ms
from memstate.testing import MemoryStore

LAYOUT = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
KV = ms.StateLayout([ms.Plane("k", (4,), torch.float32)], layers=1)
ROWS, PAGE, TOPICS = 8, 4, 400
TOLERANCE = {"objects": 1.02, "megabytes": 1.02, "median us": 1.15}


class Forgetful(MemoryStore):
    """A store that keeps only the last 256 records, so that it does not grow with the run."""

    def put(self, names, buffers):  # type: ignore[no-untyped-def]
        outcomes = super().put(names, buffers)
        for name in list(self.records)[: max(0, len(self.records) - 256)]:
            del self.records[name]
        self.calls.clear()
        return outcomes


class Service:
    """Serves conversations and single prompts with a manager that is short of slots, pages and records."""

    def __init__(self, seed: int) -> None:
        self.random, self.serial = random.Random(seed), 0
        kv = ms.Planes(KV, 512, ms.Backend("reference"))
        tiers = ms.Tiers(model="long run", host_slots=64, host_pages=512, kv=kv, store=Forgetful())
        self.mem = ms.StateManager(
            LAYOUT, slots=64, max_requests=ROWS, tracking=ms.Redirect(every=PAGE), backend="reference",
            pages=ms.Pages(size=PAGE, count=512, per_row=32), prefix=ms.Prefix(), tiers=tiers,
            sessions=ms.SessionLimits(per_session=2),
        )  # fmt: skip
        self.talks = {n: self.mem.sessions.open(n) for n in range(ROWS)}
        self.said: dict[int, list[int]] = {n: [] for n in self.talks}
        self.texts: dict[ms.Row, list[int]] = {}
        self.goals: dict[ms.Row, int] = {}
        self.turns: dict[ms.Row, int] = {}

    def begin(self) -> None:
        """Admits one request if there is room: a turn of a conversation, or a single prompt about a topic."""
        idle = [n for n in self.talks if n not in self.turns.values()]
        self.serial += 1
        talk = self.random.choice(idle) if idle and self.random.random() < 0.5 else None
        if talk is None:
            start = [self.random.randrange(TOPICS)] * 9
        elif len(self.said[talk]) > 80:  # ends the conversation, and opens another one with the same name
            self.mem.sessions.close(self.talks[talk])
            self.talks[talk], self.said[talk], start = self.mem.sessions.open(talk), [], [talk]
        else:
            start = self.said[talk]
        text = [*start, *(self.random.randrange(1 << 20) for _ in range(self.random.randrange(2, 7)))]
        session = self.talks[talk] if talk is not None else None
        goal = len(text) + self.random.randrange(1, 13)
        try:
            (row,) = self.mem.admit([ms.Request(self.serial, tokens=text, session=session, length=goal)])
        except (ms.OutOfSlots, ms.OutOfPages):
            return
        self.texts[row], self.goals[row] = text, goal
        if talk is not None:
            self.turns[row] = talk

    def step(self) -> None:
        """Runs one iteration of the loop: an admission, a step of all rows, the ends of requests, a poll."""
        if len(self.texts) < ROWS:
            self.begin()
        rows = list(self.texts)
        tokens = []
        for row in rows:
            left = len(self.texts[row]) - self.mem.info(row).length
            if not left:
                self.texts[row].append(self.random.randrange(1 << 20))
            tokens.append(left or 1)
        self.mem.settle(self.mem.plan(rows, tokens))
        over = [row for row in rows if len(self.texts[row]) == self.goals[row]]
        if over:
            self.mem.end(over, keep="cache", tokens=[self.texts[row] for row in over])
        for row in over:
            text, talk = self.texts.pop(row), self.turns.pop(row, None)
            del self.goals[row]
            if talk is not None:
                self.said[talk] = text
        self.mem.poll()


def window(service: Service, steps: int) -> dict[str, float]:
    """Runs the steps of a window. Returns its figures."""
    took = []
    for _ in range(steps):
        begin = time.perf_counter()
        service.step()
        took.append(time.perf_counter() - begin)
    gc.collect()
    took.sort()
    with open("/proc/self/statm") as file:
        megabytes = int(file.read().split()[1]) * resource.getpagesize() / 1e6
    return {
        "median us": 1e6 * median(took), "99 % us": 1e6 * took[len(took) * 99 // 100],
        "objects": len(gc.get_objects()), "megabytes": megabytes,
    }  # fmt: skip


def rises(lines: Sequence[dict[str, float]]) -> list[str]:
    """Compares the last third of the windows with the third before it. Returns a line for each figure that grew."""
    third = len(lines) // 3
    before, last = lines[-2 * third : -third], lines[-third:]
    return [
        f"{name}: {median(line[name] for line in last):.1f} after {median(line[name] for line in before):.1f}"
        for name, limit in TOLERANCE.items()
        if median(line[name] for line in last) > limit * median(line[name] for line in before)
    ]


def main(arguments: Sequence[str]) -> int:
    """Runs the program. Returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    service, lines = Service(given.seed), []
    for at in range(given.windows):
        lines.append(window(service, given.steps // given.windows))
        figures = ", ".join(f"{name} {value:,.1f}" for name, value in lines[-1].items())
        print(f"{(at + 1) * (given.steps // given.windows):9,} steps: {figures}", flush=True)
    service.mem.audit().raise_if_leaking()
    wrong = rises(lines)
    print("\n".join(["rises:", *wrong]) if wrong else "no figure rises, and nothing leaks")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

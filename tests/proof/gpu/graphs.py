"""Checks that steps replayed as CUDA graphs give the same bits as the same steps run eagerly.

Two managers get the same calls. One replays a graph of ownership, plan and forward, which it captured at the first use.
The other launches the kernels in every step. Between steps, requests end and others start, some of them from snapshots.
Every tenth step is all padding.
"""

import random
from collections import deque
from typing import Any

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.engine.test_graphs import LAYOUT, WIDTH, Forward, Inputs
from tests.proof.gpu.machine import Machine, Result, TimeIsUp
from tests.support.decode_case import same_bits

EVERY = 4
STRATEGIES = (ms.NoTracking(EVERY), ms.PingPong(EVERY), ms.LazyPingPong(EVERY), ms.Redirect(EVERY))
BATCHES, TOY_BATCHES = (1, 7, 64, 256), (2,)
REPLAYS, TOY_REPLAYS = 250, 5  # number of replays for each strategy and batch size
LAST = 2.0  # seconds kept for the last checks and the exit


class Side:
    """A manager with its rows and its forward. replays: whether its steps replay a graph."""

    def __init__(self, machine: Machine, tracking: ms.Tracking, batch: int, inputs: Inputs, replays: bool) -> None:
        self.machine, self.replays = machine, replays
        self.mem = ms.StateManager(
            LAYOUT, slots=5 * batch + 8, max_requests=batch + 1, max_batch=batch, tracking=tracking,
            backend=machine.backend, device=machine.device,
        )  # fmt: skip
        for block in self.mem.planes.plane_map.blocks:
            block[:, 1:].fill_(0xFF)  # NaN, so that a wrong read shows
        self.forward = Forward(self.mem, Backend(machine.backend, machine.device), inputs)
        self.captured: Any = None
        self.flying: deque[ms.Step] = deque()
        self.rows = list(self.mem.admit([ms.Request(i) for i in range(batch)]))
        ms.warm_up(self.mem)
        for _ in range(2):  # compiles the forward for this batch size, on padding
            step = self.mem.plan([None] * batch)
            self.forward.eager(step)
            self.mem.settle(step)
        machine.wait()

    def turn_over(self, at: int, name: str, resume: bool) -> None:
        """Ends a request and admits another one. resume: whether it starts from a snapshot of the ended request."""
        (snap,) = self.mem.end([self.rows[at]], keep="handle" if resume else None)
        (self.rows[at],) = self.mem.admit([ms.Request(name, resume=snap)])
        if snap:
            self.mem.drop([snap])

    def plan(self, chosen: list[int | None], most: list[int]) -> ms.Step:
        batch = [None if at is None else self.rows[at] for at in chosen]
        room = [self.mem.info(row).next_boundary - self.mem.info(row).length if row else 0 for row in batch]
        if self.replays and self.captured is None:
            self.captured = self.machine.capture(lambda: self.forward.eager(self.mem.launch(len(batch))))
        step = self.mem.plan(batch, [min(pair) for pair in zip(room, most, strict=True)], replay=self.captured)
        if not self.replays:
            self.forward.eager(step)
        self.flying.append(step)
        return step

    def settle(self) -> None:
        if len(self.flying) > 1:
            self.mem.settle(self.flying.popleft())


def differing(a: Side, b: Side) -> list[str]:
    """Returns the names of outputs, blocks of slots and step vectors in which both sides differ."""
    blocks = zip(a.mem.planes.plane_map.blocks, b.mem.planes.plane_map.blocks, strict=True)
    pairs = {f"block {number}": pair for number, pair in enumerate(blocks)}
    pairs |= {f"output {name}": (a.forward.out[name], b.forward.out[name]) for name in a.forward.out}
    pairs |= {
        name: (getattr(a.flying[-1].record, name), getattr(b.flying[-1].record, name))
        for name in ("read", "write", "snapshot", "tokens")
    }
    return [name for name, pair in pairs.items() if not same_bits(*pair)]


def course(machine: Machine, tracking: ms.Tracking, batch: int, seed: int, replays: int) -> tuple[int, int, str]:
    """Runs `replays` steps on both sides. Returns the numbers of steps and written slots, and the first difference."""
    inputs = Inputs(batch, machine.device, torch.Generator().manual_seed(seed))
    sides = [Side(machine, tracking, batch, inputs, replayed) for replayed in (True, False)]
    rng, seen = random.Random(seed), set()
    for t in range(replays):
        if t % 3 == 2:
            at, resume = rng.randrange(batch), rng.random() < 0.5
            for side in sides:
                side.turn_over(at, f"new {t}", resume)
        order = rng.sample(range(batch), batch)
        padding = t % 10 == 4
        chosen = [None if padding or (batch > 1 and rng.random() < 0.2) else at for at in order]
        most = [rng.randint(1, WIDTH) for _ in chosen]
        inputs.draw()
        steps = [side.plan(chosen, most) for side in sides]
        if wrong := differing(*sides):
            return t, len(seen), f"step {t}: {', '.join(wrong)} differ"
        if t % 5 == 0:
            seen |= set(steps[0].write.tolist()) - {0}
        for side in sides:
            side.settle()
        if (machine.hurry and t >= 40) or machine.left < LAST:
            replays = t + 1
            break
    for side in sides:
        side.mem.device.check()
        side.mem.audit().raise_if_leaking()
    return replays, len(seen), ""


def prove(machine: Machine, result: Result) -> None:
    """Compares replayed and eager steps for every strategy and batch size."""
    result |= {"replays": {}, "slots_seen": {}}
    asked = 1 if machine.compiling else TOY_REPLAYS if machine.toy else REPLAYS
    short = []
    for tracking in STRATEGIES[3:] if machine.toy else STRATEGIES:
        for batch in TOY_BATCHES if machine.toy else BATCHES:
            seed = random.SystemRandom().randrange(2**31)
            name = f"{type(tracking).__name__}, batch {batch}"
            machine.go_on(f"before {name}", LAST)
            made, seen, wrong = course(machine, tracking, batch, seed, asked)
            result["replays"][name], result["slots_seen"][name] = made, seen
            if wrong:
                result["failures"].append(f"{name}, seed {seed}: {wrong}")
            elif made < asked:
                short.append(f"{name}: {made} of {asked} replays")
            machine.keep(result)
    if short:
        raise TimeIsUp("; ".join(short))

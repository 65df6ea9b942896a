"""Checks that serving compiles nothing after `warm_up`, and measures steps while states are evicted.

The check covers the kernels that the manager itself launches, in scenarios with every strategy, snapshots, hits on the
device and in host memory, eviction, int8 records, speculation, sleep and wake. The measured steps are those of a decode
loop: without an eviction, and while 64 states are copied to host memory.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from statistics import quantiles
from typing import Any

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.presets import qwen3_next
from memstate_tools.bench.copy import TOY
from memstate_tools.bench.forward import BenchForward
from tests.proof.gpu.machine import Machine, Result

PAGE, EVERY = 4, 8
PROMPT = EVERY  # tokens of a prompt; it ends at a boundary, where one state is kept
LAYERS = 12  # with these layers, a step of all rows takes about a millisecond
ROWS, TOY_ROWS = 64, 1
CACHED, TOY_CACHED = 64, 3  # number of states that are evicted together
QUIET, BURST, TOY_STEPS = 200, 100, 3  # numbers of steps without and with eviction
LAST = 2.0  # seconds kept to write the result and exit
SCENARIOS: dict[str, dict[str, Any]] = {
    "none": {"tracking": ms.NoTracking(EVERY)},
    "ping-pong": {"tracking": ms.PingPong(EVERY)},
    "lazy": {"tracking": ms.LazyPingPong(EVERY)},
    "redirect": {"tracking": ms.Redirect(EVERY)},
    "int8 records": {"tracking": ms.Redirect(EVERY), "int8": {"ssm": 2}},
    "in place": {"tracking": ms.PingPong(EVERY), "forward": ms.Forward(in_place=True)},
    "speculation": {"tracking": ms.Redirect(EVERY), "forward": ms.Forward(tail=3), "overlap": False},
}  # fmt: skip


class Server:
    """A manager with prefix cache and host memory, after its warm-up, and a forward of one token per row."""

    def __init__(
        self, machine: Machine, layout: ms.StateLayout, rows: int, cached: int, int8: dict[str, int] | None = None,
        staging: int = 2, **settings: Any,
    ) -> None:  # fmt: skip
        self.machine, self.made = machine, 0
        self.mem = ms.StateManager(
            layout, slots=3 * rows + 2 * cached + 4, max_requests=rows + 2, pages=ms.Pages(size=PAGE),
            prefix=ms.Prefix(),
            tiers=ms.Tiers(
                "proof", host_slots=cached + 4, write="back", reserve=0.0, int8=int8 or {}, staging=staging
            ),
            backend=machine.backend, device=machine.device, **settings,
        )  # fmt: skip
        for plane in self.mem.planes.values():
            plane.normal_()
        self.mem.device.scrub_null()
        ms.warm_up(self.mem)
        self.forward = BenchForward(Backend(machine.backend, machine.device), self.mem.planes, rows)
        machine.wait()

    def prompt(self) -> list[int]:
        """Returns a prompt. No two prompts of a server begin with the same token."""
        self.made += 1
        return [1000 * self.made + at for at in range(PROMPT)]

    def start(self, prompts: list[list[int]]) -> ms.Rows:
        """Admits prompts, and plans and settles their tokens. No forward runs, because contents do not matter."""
        rows = self.mem.admit([ms.Request(f"{tokens[0]}", tokens=[*tokens, 1]) for tokens in prompts])
        left = [PROMPT - self.mem.info(row).length for row in rows]
        if max(left) > 0:
            self.mem.settle(self.mem.plan(rows, left))
        return rows

    def step(self, rows: ms.Rows, run: bool = True) -> None:
        """Runs a step of one token per row. With tails, each row has also two drafts, of which one is accepted."""
        mem = self.mem
        if tail := mem.forward.tail:  # no forward, because its kernels belong to the engine
            mem.accept(mem.plan(rows, tail, drafts=tail - 1), [2] * len(rows))
            return
        step = mem.plan(rows)
        if run and len(rows) == len(self.forward.x):
            self.forward(step)  # type: ignore[arg-type]  # a step has the vectors of a record
        mem.settle(step)

    def cache(self, prompts: list[list[int]]) -> None:
        """Leaves a state of each prompt in the prefix cache."""
        for at in range(0, len(prompts), 2):
            some = prompts[at : at + 2]
            self.mem.end(self.start(some), keep="cache", tokens=[[*prompt, 1] for prompt in some])
        self.mem.submit()


def scenario(server: Server) -> Iterator[str]:
    """Makes the calls of an engine. Before each group of calls, yields its name."""
    mem = server.mem
    prompts = [server.prompt() for _ in range(3)]
    yield "steps over boundaries"
    rows = server.start([server.prompt() for _ in range(2)])
    for _ in range(EVERY + 2):
        server.step(rows)
    yield "snapshots"
    kept = [snap for snap in mem.publish(rows) if snap]
    if kept:
        (again,) = mem.admit([ms.Request("again", resume=kept[0])])
        mem.submit()
        mem.end([again])
        mem.drop(kept)
    yield "slots by id"
    ids = mem.pool.claim(2)
    mem.pool.copy(ids[:1], ids[1:])
    mem.pool.zero(ids)
    mem.pool.release(ids)
    mem.end(rows)
    yield "the prefix cache"
    server.cache(prompts)
    rows = server.start(prompts[:1])
    mem.end(rows)
    yield "eviction to host memory"
    mem.prefix.evict_states(len(prompts))  # type: ignore[union-attr]
    mem.submit()
    mem.poll()
    server.machine.wait()
    yield "hits in host memory"
    rows = server.start(prompts[1:2])
    mem.poll()
    mem.end(rows)
    yield "sleep and wake"
    mem.submit()
    mem.device.sleep()
    mem.device.wake()
    yield "an audit"
    mem.audit().raise_if_leaking()
    mem.device.check()


def compiled_after_warm_up(machine: Machine, result: Result) -> None:
    """Runs each scenario in a new manager. It is a failure if a kernel is compiled or loaded during a scenario."""
    layout = TOY if machine.toy else replace(qwen3_next(), layers=1)
    by_scenario: dict[str, Any] = result.setdefault("compiled_after_warm_up", {})
    for name, settings in list(SCENARIOS.items())[3 if machine.toy else 0 : 4 if machine.toy else None]:
        machine.go_on(f"before {name}", LAST)
        server = Server(machine, layout, 2, 3, **settings)
        if not server.mem.forward.tail:  # compiles the forward, as an engine would before
            step = server.mem.plan([None, None])
            server.forward(step)  # type: ignore[arg-type]
            server.mem.settle(step)
            machine.wait()
        late: dict[str, dict[str, int]] = {}
        before, doing = machine.compilations.all, ""
        for doing_next in chain(scenario(server), ["the end"]):
            new = machine.compilations.all - before
            if new and doing:
                late[doing] = dict(new)
            before, doing = machine.compilations.all, doing_next
        server.mem.close()
        by_scenario[name] = late
        if late and not machine.compiling:
            said = "; ".join(f"{doing}: {', '.join(kernels)}" for doing, kernels in late.items())
            result["failures"].append(f"{name}: compiled after warm_up: {said}")
        machine.keep(result)


def spread_of(seconds: list[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile of `seconds`, in microseconds, and how many there are."""
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {"p50_us": round(cuts[49] * 1e6, 1), "p99_us": round(cuts[98] * 1e6, 1), "steps": len(seconds)}


def timed(
    server: Server, rows: ms.Rows, steps: int, first: Callable[[], object] = lambda: None
) -> tuple[list[float], list[float]]:
    """Times steps, each from the end of the step before it. first: a function that the first step calls.

    Returns: seconds of each step on the device, and on the host.
    """
    cuda, marks = not server.machine.toy, [time.perf_counter()]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)] if cuda else []
    for event in events[:1]:
        event.record()
    first()
    for number in range(steps):
        server.mem.poll()
        server.step(rows)
        marks.append(time.perf_counter())
        for event in events[number + 1 : number + 2]:
            event.record()
    server.machine.wait()
    host = [b - a for a, b in pairwise(marks)]
    return [a.elapsed_time(b) / 1000 for a, b in pairwise(events)] if cuda else host, host


def latency(machine: Machine, result: Result) -> None:
    """Measures a decode loop in one manager on one stream, first without, then with an eviction."""
    toy = machine.toy
    layout = TOY if toy else replace(qwen3_next(), layers=LAYERS)
    rows, cached = (TOY_ROWS, TOY_CACHED) if toy else (ROWS, CACHED)
    quiet, burst = (TOY_STEPS, TOY_STEPS) if toy or machine.compiling else (QUIET, BURST)
    # Staging has room for all states. Without room, states would be lost at once, and the eviction would delay no step.
    server = Server(machine, layout, rows, cached, staging=cached, tracking=ms.Redirect(EVERY))
    room = server.mem.stats().tiers
    assert room.staging_bytes >= 2 * cached * room.state_bytes, "staging holds fewer states"
    server.cache([server.prompt() for _ in range(cached)])
    batch = server.start([server.prompt() for _ in range(rows)])
    timed(server, batch, 4)
    figures = result["latency"] = {"rows": rows, "states_going_down": cached, "layers": layout.layers}
    evicted: list[int] = []

    def evict() -> None:
        evicted.append(server.mem.prefix.evict_states(cached))  # type: ignore[union-attr]
        server.mem.submit()

    for name, steps, first in (("quiet", quiet, lambda: None), ("eviction", burst, evict)):
        device, host = timed(server, batch, steps, first)
        figures[name] = {
            "device": spread_of(device), "host": spread_of(host),
            "first_steps_device_us": [round(seconds * 1e6, 1) for seconds in device[:8]],
        }  # fmt: skip
    if evicted != [cached]:
        result["failures"].append(f"{evicted} of {cached} states evicted")
    tiers = server.mem.stats().tiers
    figures["states_out"] = out = getattr(tiers, "states_out", None)
    if out != cached:
        result["failures"].append(f"{out} of {cached} states reached host memory: few were on their way")
    server.mem.close()


def prove(machine: Machine, result: Result) -> None:
    """Checks compilations, then measures latency. No latency counts as a failure."""
    compiled_after_warm_up(machine, result)
    machine.go_on("before the latency of steps", 2 * LAST)
    latency(machine, result)

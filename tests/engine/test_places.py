"""Slots may change places in the packet of a plan: with their states, and behind the close of the step before.

Nothing outside of the registers and the bitmap knows by number which slot it has. A later move of slots, such as one
that makes the pool smaller, stands on this.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.engine.stepping import Stepping
from memstate.engine.world import World
from tests.support.demo_talks import demo, right
from tests.support.parked import OTHER, TEXT, Station
from tests.support.planes import MAKERS, every_strategy

MOVED = 5  # slots that change places in a step


class Places:
    """Exchanges random slots of a manager: bytes in all planes, ids in registers, bits of the bitmap."""

    def __init__(self, world: World) -> None:
        self.planes, self.allocator, self.slots = world.planes, world.allocator, world.registers.table.slots
        self.random, self.exchanged = random.Random(7), 0

    def exchange(self) -> None:
        of = self.random.sample(range(1, self.allocator.capacity + 1), MOVED)
        to = [*of[1:], of[0]]
        for layer in (layer for plane in self.planes.values() for layer in plane):
            layer[to] = layer[of]
        now = torch.arange(self.allocator.capacity + 1, dtype=torch.int32, device="cpu")
        now[of] = torch.tensor(to, dtype=torch.int32, device="cpu")
        self.exchanged += int(torch.isin(self.slots, now[of]).sum())
        self.slots.copy_(now[self.slots.long()])
        words = self.allocator.bitmap.numpy().view(np.uint8)
        bits = np.unpackbits(words, bitorder="little")
        bits[to] = bits[of]
        words[:] = np.packbits(bits, bitorder="little")


def moving(patch: pytest.MonkeyPatch, moment: str = "in the packet") -> list[Places]:
    """Lets each plan of new managers exchange slots at a moment. Their `Places` will be in the list."""
    made, real = list[Places](), Stepping.__init__

    def init(self: Stepping, world: World) -> None:
        real(self, world)
        made.append(places := Places(world))

        def around(of: object, name: str, after: bool = False) -> None:
            call: Callable[..., Any] = getattr(of, name)

            def moved(*given: Any, **more: Any) -> Any:
                if not after:
                    places.exchange()
                answer = call(*given, **more)
                if after:
                    places.exchange()
                return answer

            patch.setattr(of, name, moved)

        if moment == "in the packet":  # the plan asks for the vectors of its step behind the close, before its launches
            around(self._log, "record")
        elif moment == "before the close":
            around(self._commands, "lift")
        else:
            around(self, "plan", after=True)

    patch.setattr(Stepping, "__init__", init)
    return made


def unnoticed(monkeypatch: pytest.MonkeyPatch, **form: Any) -> None:
    made = moving(monkeypatch)
    report = right(park=True, host_slots=60, requests=6, **form)
    assert made[0].exchanged > report.meter.steps and report.meter.parked > 0


@pytest.mark.sample
@pytest.mark.parametrize("strategy", ["redirect", "ping-pong", "lazy", "none"])
@pytest.mark.parametrize("engine", ["own", "in-place", "arena"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_demo_does_not_notice_where_states_lie(
    monkeypatch: pytest.MonkeyPatch, strategy: str, engine: str, overlap: int
) -> None:
    unnoticed(monkeypatch, strategy=strategy, engine=engine, overlap=overlap)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "form", [{"tail": 8}, {"speculate": "4"}, {"speculate": "tree", "overlap": 0}, {"storage": "file"}], ids=str
)
def test_tails_drafts_and_stores_do_not_notice(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    unnoticed(monkeypatch, **form)


@pytest.mark.parametrize("moment", ["between plan and forward", "before the close"])
def test_at_another_moment_it_is_noticed(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """In place, the snapshot of a step is copied when it is closed, from the slots that its vectors name."""
    made = moving(monkeypatch, moment)
    report = demo(park=True, host_slots=60, requests=6, strategy="ping-pong", engine="in-place")
    assert made[0].exchanged and not report.identical


@every_strategy
@pytest.mark.sample
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_random_programs_that_park_do_not_notice(
    monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool, in_place: bool
) -> None:
    """Each step checks the bytes of the states and of the KV that it reads. A part of the requests has one prompt."""
    made, dice = moving(monkeypatch), random.Random(f"{name} {overlap} {in_place}")
    at = Station({"host_slots": 20}, tracking=MAKERS[name](), overlap=overlap, in_place=in_place)
    mem, parked, waiting, flying = at.mem, Counter[str](), list[ms.Parked](), list[ms.Step]()

    def rows(most: int) -> list[ms.Row]:
        running = [row for row in at.text if isinstance(row, ms.Row)]
        return dice.sample(running, min(most, len(running)))

    def meddle(step: object = None) -> None:
        if (leaving := rows(1)) and dice.random() < 0.4:
            waiting.extend(at.park(*leaving, known=dice.random() < 0.5))
            parked["behind" if step else "before"] += 1
        elif leaving and dice.random() < 0.2:
            mem.end(leaving, keep="cache", tokens=[at.text.pop(row) for row in leaving])
        if waiting and dice.random() < 0.4 and mem.stats().rows_used < 4:
            one = waiting.pop(0)
            (row,) = mem.admit([ms.Request("again", resume=one)])
            at.text[row] = at.text.pop(one)
        elif dice.random() < 0.3 and mem.stats().rows_used < 4:
            at.admit(dice.choice((TEXT, OTHER))[: dice.randint(1, 12)])

    for _ in range(60):
        meddle()
        if going := rows(3):
            room = [mem.info(row).next_boundary - mem.info(row).length for row in going]
            step, texts = at.plan(going, dice.choice((1, min(room))))
            meddle(step)
            at.forward(step, texts)
            flying.append(step)
        while len(flying) > (overlap and len(going) > 0):
            mem.settle(flying.pop(0))
        mem.poll()
    for step in flying:
        mem.settle(step)
    at.look(*rows(4))
    at.finish()
    assert made[0].exchanged > 30 and min(parked["behind"], parked["before"]) > 3

"""Builds a manager in the middle of its work, and lists the public calls that can come next.

A scene is always built the same way, so that each call of a test starts from an equal manager.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.tokens import BYTES
from tests.proof.injection.keyed import Keyed
from tests.support import owners
from tests.support.endings import close_idle, finish
from tests.support.planes import LAYOUT, fold
from tests.support.serving import EVERY, PAGE, chosen
from tests.support.tiered import Tiered, kv_of, whole
from tests.support.virtual import ByHand, MemoryStore

Call = Callable[[], Any]
A, B, C = whole(1, 6), whole(2, 5), whole(3, 4)  # A and B are cached on the device, C in host memory
CHAT, TALK = whole(4, 4), whole(5, 3)
TAIL = ms.Plane("tail", (3,), torch.int32, fill=1000)
WITH_ROWS = replace(LAYOUT, rows=ms.StateLayout((TAIL,), 2))


class Scene(Tiered):
    """A manager with prompts cached on the device and in host memory, sessions, a snapshot, and steps in flight.

    Args:
        name: the strategy.
        in_place: whether the forward updates slots in place.
        overlap: whether the next step is planned before a step is settled.
        layout: layout of the states.
        tail: limit of the tokens of a step that go into a tail; 0 for no tails.
    """

    def __init__(
        self, name: str, in_place: bool = False, overlap: bool = True, layout: ms.StateLayout = LAYOUT, tail: int = 0
    ) -> None:
        self.tails: dict[ms.Row, int] = {}  # row -> number of tokens in its memory
        self.store, self.jobs, self.in_gap = MemoryStore(), ByHand(), False
        super().__init__(
            Backend("reference"), name, every=EVERY, slots=30, rows=12, pages=64, in_place=in_place, overlap=overlap,
            tiers={"store": self.store, "executor": self.jobs, "write": "through", "threads": 1}, journal=8,
            layout=layout, tail=tail,
        )  # fmt: skip
        mem = self.mem
        self.pass_down(C)
        self.drain()
        for prompt in (A, B):
            self.turn(prompt)
        self.chat, self.talk = mem.sessions.open("chat"), mem.sessions.open("talk")
        self.turn(CHAT, session=self.chat)
        self.turn(TALK, session=self.talk)
        self.talker = self.start([*TALK, 1, 2, 3], session=self.talk)
        maker = self.start(whole(6))
        self.prefill(maker, publish=False)
        mem.settle(self.step([maker]))
        self.of_snapshot = list(self.text[maker])
        (self.kept,) = mem.end([maker], keep="handle")
        self.idle, self.first = self.start(whole(7)), self.start([*A, 5, 6, 7])
        self.second = self.start([*B[: 4 * PAGE], 9, 9, 9, 9, 9])
        self.empty_row = mem.admit([ms.Request("remote", length=PAGE)])[0]
        self.run([self.first, self.second, self.talker], publish=False)
        self.steps = [self.step([self.first, self.second, self.talker], most=EVERY)]
        self.by_id = mem.pool.claim(2)
        self.fetched = mem.prefetch([*C, 1])

    def _forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> None:
        """Runs a forward. If rows have memory, checks there how many tokens they had, and adds those of the step."""
        by_number = {row.index: row for row in self.mem.rows}
        for number, tokens in zip(step.numbers.tolist(), fed, strict=True) if self.mem.planes.rows else ():
            if row := by_number.get(number):
                tail, before = self.mem.planes.rows["tail"][:, number], self.tails.get(row, 0)
                assert (tail == TAIL.fill + before).all(), f"{row}: {tail.tolist()}, expected {before} tokens"
                self.tails[row] = before + len(tokens)
                tail += len(tokens)
        if self.mem.forward.tail:
            self._fold(step, fed)
        else:
            super()._forward(step, fed)

    def _fold(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> None:
        """Runs a forward of rows with tails. Stores the states to which the cursor of the step points."""
        by_number, table = {row.index: row for row in self.mem.rows}, self.mem.device.page_table.tolist()
        columns = (
            step.numbers, step.lengths, step.read, step.write, step.snapshot, step.cursor.label, step.cursor.store,
        )  # fmt: skip
        for new, number, before, read, *slots, label, store in zip(fed, *(c.tolist() for c in columns), strict=True):
            if not number:
                continue
            own = self.text[by_number[number]]
            text = (*own[:before], *new)
            assert not label or not self.planes.wrong({read: text[:label]}), f"row {number} reads another state"
            for slot in filter(None, slots if store >= 0 else ()):
                for name, plane in self.mem.planes.items():
                    plane[:, slot] = (fold(text[: label + store]) * self.planes.weights[name]).to(plane.dtype)
            for name, values in zip("kv", kv_of(text, PAGE), strict=True):
                for at in range(before, len(text)):
                    page, place = divmod(at, PAGE)
                    self.pages_kv[name][:, table[number][page], place] = values[:, page, place]
            if len(text) == len(own):
                own.append(chosen(fold(text)))
        if step.drafted:
            step.accepted.copy_(
                torch.tensor([min(1, n) for n in step.numbers.tolist()], dtype=torch.int32, device="cpu")
            )

    def guess(self, rows: Sequence[ms.Row], drafts: Sequence[int]) -> tuple[Call, list[list[int]]]:
        """Returns a call that plans the next two tokens of each row, some as drafts. Also returns these tokens."""
        ends = [self.mem.info(row).length + 2 for row in rows]
        self.mem.extend(rows, ends)
        for row, end in zip(rows, ends, strict=True):
            while len(self.text[row]) < end:
                self.text[row].append(chosen(fold(tuple(self.text[row]))))
        return lambda: self.mem.plan(rows, 2, drafts=drafts), [
            self.text[row][end - 2 : end] for row, end in zip(rows, ends, strict=True)
        ]

    def guessed(self) -> ms.Step:
        """Runs two steps with drafts. Returns the second, not accepted yet. Each row has a token in its tail."""
        for _ in range(2):
            self.settled()
            plan, fed = self.guess([self.first, self.second], [2, 1])
            step: ms.Step = plan()
            self._forward(step, fed)
            self.mem.submit(step)
            self.steps.append(step)
        return step

    def guessed_again(self) -> ms.Step:
        """Calls `guessed`, and plans and runs one more step. Returns the step of `guessed`, to be accepted next."""
        step, rows = self.guessed(), [self.first, self.second]
        self.guess(rows, [2, 1])
        for row in rows:
            self.text[row].append(chosen(fold(tuple(self.text[row]))))
        self.mem.extend(rows, [len(self.text[row]) + 1 for row in rows])
        late = self.mem.plan(rows, 2, drafts=[2, 1])
        self._forward(late, [self.text[row][n : n + 2] for row, n in zip(rows, late.lengths.tolist(), strict=True)])
        self.mem.submit(late)
        self.steps.append(late)
        return step

    def over(self, step: ms.Step) -> None:
        """Ends a step: accepts one token of each row if the step has drafts, otherwise settles it."""
        if step.drafted:
            self.mem.accept(step, [min(1, n) for n in step.numbers.tolist()], written=True)
        else:
            self.mem.settle(step)

    def settled(self) -> "Scene":
        """Settles all steps, and returns the scene."""
        while self.steps:
            self.over(self.steps.pop(0))
        return self

    def gap(self) -> "Scene":
        """Settles all steps, and plans one without launching its forward. Returns the scene."""
        self.settled()
        self.in_gap = True
        rows = [self.first, self.second]
        if self.mem.forward.tail:
            self.guessed()
            self.settled()
            self.steps.append(self.guess(rows, [1, 2])[0]())
            return self
        self.mem.extend(rows, [self.mem.info(row).length + EVERY for row in rows])
        self.steps.append(self.mem.plan(rows, [1, 1]))
        return self

    def land(self) -> None:
        """Launches the forward of the step that `gap` planned."""
        pairs = zip((self.first, self.second), self.steps[-1].before.tolist(), strict=True)
        fed = [self.text[row][n : n + 1 + (self.mem.forward.tail > 0)] for row, n in pairs]
        self._forward(self.steps[-1], fed)
        self.mem.submit(self.steps[-1])

    def work_in_threads(self) -> None:
        """Runs all jobs of threads to their end."""
        for job in self.jobs.jobs:
            if not job.future.done() and job.begin():
                job.finish()

    def next_batch(self) -> tuple[list[ms.Row | None], list[int]]:
        """Returns rows, with padding, and numbers of tokens, for a step that reaches boundaries."""
        rows = [self.first, self.second, self.idle]
        ends = [min(self.mem.info(row).next_boundary, len(self.text[row])) for row in rows]
        tokens = [max(1, end - self.mem.info(row).length) for row, end in zip(rows, ends, strict=True)]
        self.mem.extend(rows, [self.mem.info(row).length + n for row, n in zip(rows, tokens, strict=True)])
        return [*rows, None], [*tokens, 0]

    # Checks

    def look_at_what_is_published(self) -> None:
        """Asserts that states of sessions and snapshots, and their KV, are those of their tokens."""
        self.mem.submit()
        for session, talk in owners.sessions(self.mem).opened.items():
            tokens = np.frombuffer(talk.prompt.key, np.int64).tolist()
            assert len(talk.prompt.key) % BYTES == 0 and session == talk.handle
            for snap in talk.kept:
                self._look_at(snap, tokens[: snap.length], talk.pages)
        if self.kept is not None and owners.states(self.mem).get(self.kept.register) == self.kept:
            self._look_at(self.kept, self.of_snapshot[: self.kept.length], self.kept.pages)

    def _look_at(self, snap: ms.Snapshot, tokens: list[int], pages: Any) -> None:
        assert len(tokens) == snap.length
        assert not self.planes.wrong({self.slot(snap.register): tuple(tokens)}), f"{snap} is not what its tokens say"
        there = self.kv[list(pages)].reshape(-1)[: snap.length].tolist()
        assert there == tokens, f"KV of {snap} is not what its tokens say"

    def finish(self, serve: bool = True) -> None:
        """Checks every byte that is left, ends everything, and checks that all is free.

        Args:
            serve: whether to serve requests from the states that are left before everything ends.
        """
        for step in list(self.mem._parts.stepping._log.unsettled):
            self.over(step)
        self.mem.end([row for row in self.mem.rows if owners.table(self.mem).ids[row.index] == "more"])
        self.look_at_what_is_published()
        self.mem.pool.release(self.mem.audit().leaked)  # slots claimed by id
        if not serve:
            close_idle(self.mem)
            self.mem.end(self.mem.rows)
            close_idle(self.mem)
            self.look()
            return
        if any(one.session == self.chat and not one.running for one in self.mem.sessions.infos()):
            self.turn([*CHAT, 8, 8, 8], session=self.chat)
        for prompt in ([*A, 1], [*B, 2], [*C, 3], whole(9)):
            self.turn(prompt)
        self.work()
        finish(self)


SCENES: dict[str, tuple[Any, ...]] = {
    "redirect": ("redirect", False, True),
    "redirect in place": ("redirect", True, False),
    "redirect with rows": ("redirect", False, True, WITH_ROWS),
    "redirect with tails": ("redirect", False, True, WITH_ROWS, 2),
    "lazy": ("lazy", False, True),
    "ping-pong": ("ping-pong", False, False),
    "lazy in place": ("lazy", True, True),
    "none": ("none", False, True),
}


@cache
def scene(name: str) -> Scene | Keyed:
    """Returns the scene of this name; callers must not change it."""
    return Keyed() if name == "keyed" else Scene(*SCENES[name])


def calls(scene: Scene | Keyed) -> dict[str, Callable[[], Call]]:
    """Returns the public calls by name; each function prepares the scene for a call, and returns the call."""
    if isinstance(scene, Keyed):
        return scene.calls()
    mem, s = scene.mem, scene

    def plan() -> Call:
        if not mem.overlap:
            s.settled()
        if mem.forward.tail:
            s.guessed()
            s.settled()
            return s.guess([s.first, s.second], [2, 1])[0]
        rows, tokens = s.next_batch()
        return lambda: mem.plan(rows, tokens)

    def accept() -> Call:
        if not mem.forward.tail:
            return lambda: mem.settle(s.steps[0])
        step = s.guessed()
        return lambda: mem.accept(step, [1, 2], finished=[False, True, False][: len(step.numbers)])

    def accept_late() -> Call:
        if not mem.forward.tail:
            return lambda: mem.settle(s.steps[0])
        step = s.guessed_again()
        return lambda: mem.accept(step, [1, 1], finished=[False, True], written=True)

    def launch() -> Call:
        rows, tokens = s.next_batch()
        return lambda: mem.plan(rows, tokens, replay=lambda: mem.launch(len(rows)))

    def settle_and_end() -> Call:
        step = s.steps.pop(0)
        return lambda: mem.settle(step, [True, False, False])

    def many() -> Call:
        requests = [ms.Request(f"n{i}", tokens=whole(20 + i)) for i in range(2)]
        short_of_pages()
        s.by_id = torch.cat([s.by_id, mem.pool.claim(mem.free_slots - 1)])
        return lambda: mem.admit(requests)

    def short_of_pages() -> None:
        s.settled()
        mem.end([s.second])
        mem.admit([ms.Request("more", length=PAGE * (mem.free_pages - 1))])

    def extend() -> Call:
        short_of_pages()
        return lambda: mem.extend([s.first], [mem.info(s.first).length + 4 * PAGE])

    def idle_session() -> Call:
        s.settled()
        assert mem.prefix is not None
        mem.prefix.evict_states(99)
        assert mem.stats().held_by_sessions
        s.by_id = torch.cat([s.by_id, mem.pool.claim(mem.free_slots - mem._parts.admission.per_request + 1)])
        return lambda: mem.admit([ms.Request("room")])

    def without_room() -> Call:
        """Returns an admission of requests with all kinds of start. It fails, as the last one finds no pages."""
        s.settled()
        requests = [
            ms.Request("hit", tokens=[*A, 1]), ms.Request("below", tokens=[*C, 1]), ms.Request("kept", resume=s.kept),
            ms.Request("turn", tokens=[*CHAT, 4], session=s.chat), ms.Request("long", length=40 * PAGE),
            ms.Request("too long", length=40 * PAGE),
        ]  # fmt: skip
        for request in requests:
            s.note(request.tokens or [])

        def admit() -> None:
            with suppress(ms.OutOfPages):
                mem.admit(requests)

        return admit

    def short_of_slots(prompt: list[int], states: int) -> Callable[[], Call]:
        """Returns a call that admits a prompt while slots are so short that the row takes over its cached state.

        Args:
            prompt: the prompt, whose state is cached.
            states: number of cached states that are not evicted.
        """

        def short() -> Call:
            s.settled()
            s.note([*prompt, 1])
            mem.end([s.first, s.second, s.talker])
            mem.sessions.close(s.chat)
            assert mem.prefix is not None
            if not states:
                mem.prefix.clear()  # does not save states: a saved state would evict the prompt from host memory
            while mem.prefix.states > states:
                mem.prefix.evict_states(1)
            mem.submit()
            short_by = mem._parts.admission.per_request - states
            s.by_id = torch.cat([s.by_id, mem.pool.claim(mem.free_slots - short_by)])
            return lambda: mem.admit([ms.Request("short", tokens=[*prompt, 1])])

        return short

    def poll() -> Call:
        s.work_in_threads()
        return mem.poll

    def fresh(make: Callable[[], Call]) -> Callable[[], Call]:
        def settled() -> Call:
            s.settled()
            return make()

        return settled

    def in_gap(make: Callable[[], Call]) -> Callable[[], Call]:
        def planned() -> Call:
            s.gap()
            return make()

        return planned

    def admit(*requests: ms.Request) -> Callable[[], Call]:
        for request in requests:
            s.note(request.tokens or [], request.salt)
        return lambda: lambda: mem.admit(requests)

    def text(*rows: ms.Row) -> list[list[int]]:
        s._note_rows(rows)
        return [list(s.text[row]) for row in rows]

    def asleep() -> Call:
        mem.device.sleep()
        return mem.device.wake

    rows = [s.first, s.second]
    return {
        "admit zeros": admit(ms.Request("zeros", length=3 * PAGE)),
        "admit a cached prompt": admit(ms.Request("hit", tokens=[*A, 1, 2])),
        "admit from host memory": admit(ms.Request("below", tokens=[*C, 1]), ms.Request("too", tokens=[*C, 2])),
        "admit a turn": admit(ms.Request("turn", tokens=[*CHAT, 4], session=s.chat)),
        "admit another turn": admit(ms.Request("other", tokens=[7, 7, 7], session=s.chat)),
        "admit a snapshot": admit(ms.Request("resume", resume=s.kept)),
        "admit with evictions": many,
        "admit without room": without_room,
        "admit to the slot of a cached state": short_of_slots(A, 1),
        "admit to the slot of a loaded state": short_of_slots(C, 0),
        "fork": fresh(lambda: lambda: mem.fork(s.second, ["x", "y"])),
        "reorder": fresh(lambda: lambda: mem.reorder([s.second, s.idle], [0, 0, 0])),
        "arrived": lambda: lambda: mem.device.arrived([s.empty_row], [PAGE]),
        "read_slots": lambda: lambda: mem.device.read_slots([s.first, s.kept] if s.kept else [s.first]),
        "shortfall": lambda: lambda: mem.shortfall(rows, 1),
        "extend": extend,
        "snapshot_at": lambda: lambda: mem.snapshot_at(s.empty_row, [4 * PAGE, 9 * PAGE]),
        "plan": plan,
        "plan after a settle": fresh(plan),
        "launch in a plan": fresh(launch),
        "settle": lambda: lambda: mem.settle(s.steps[0]),
        "settle and end": settle_and_end,
        "accept": accept,
        "accept late": accept_late,
        "cancel": in_gap(lambda: lambda: mem.cancel(s.steps[-1])),
        "cancel and publish": in_gap(lambda: lambda: mem.cancel(s.steps[-1], keep="cache", tokens=text(*rows))),
        "end": fresh(lambda: lambda: mem.end(rows, keep="cache", tokens=text(*rows))),
        "end in the gap": in_gap(lambda: lambda: mem.end(rows, keep="cache", tokens=text(*rows))),
        "end with handles": lambda: lambda: mem.end(rows, keep="handle"),
        "end a turn": fresh(lambda: lambda: mem.end([s.talker], keep="cache", tokens=text(s.talker))),
        "end without states": lambda: lambda: mem.end([s.first, s.talker]),
        "end without states in the gap": in_gap(lambda: lambda: mem.end(rows)),
        "end and keep handles": fresh(lambda: lambda: mem.end([s.second, s.idle], keep="handle")),
        "publish": fresh(lambda: lambda: mem.publish(rows, keep="cache", tokens=text(*rows))),
        "publish in the gap": in_gap(lambda: lambda: mem.publish(rows, keep="cache", tokens=text(*rows))),
        "publish without tokens": fresh(lambda: lambda: mem.publish(rows)),
        "drop": lambda: lambda: mem.drop([s.kept]),
        "match": lambda: lambda: mem.match([*A, 1], session=s.chat),
        "prefetch": lambda: lambda: mem.prefetch([*whole(30, 3), 1]),
        "poll": poll,
        "ready": lambda: lambda: mem.tiers and mem.tiers.ready(s.fetched),
        "cancel a prefetch": lambda: lambda: mem.tiers and mem.tiers.cancel(s.fetched),
        "open_session": lambda: lambda: mem.sessions.open("third"),
        "sessions": lambda: mem.sessions.infos,
        "admit where an idle session makes way": idle_session,
        "fork_session": lambda: lambda: mem.sessions.fork(s.chat, "twin"),
        "close_session": lambda: lambda: mem.sessions.close(s.chat),
        "submit": lambda: lambda: mem.submit(s.steps[-1]),
        "submit after the gap": in_gap(lambda: lambda: mem.submit()),
        "sleep": fresh(lambda: mem.device.sleep),
        "wake": fresh(asleep),
        "scrub_null": lambda: mem.device.scrub_null,
        "check": lambda: mem.device.check,
        "audit": lambda: mem.audit,
        "inspect": lambda: mem.inspect,
        "stats": lambda: mem.stats,
        "claim by id": lambda: lambda: mem.pool.claim(3),
        "release by id": lambda: lambda: mem.pool.release(s.by_id),
        "clear the cache": fresh(lambda: lambda: mem.prefix and mem.prefix.clear()),
        "clear host memory": fresh(lambda: lambda: mem.tiers and mem.tiers.clear()),
        "recover nothing": lambda: lambda: mem.recover(keep=False),
        "recover": lambda: lambda: mem.recover(s.by_id),
        "info": lambda: lambda: mem.info(s.first),
    }

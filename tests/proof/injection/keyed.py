"""Builds a manager of an engine that keeps its KV, in the middle of its work, and lists the calls that take keys.

A key has the tokens of its block, in bytes. So the checks of servers read the tokens of a state from its path.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from memstate.tokens import encode
from tests.support.endings import finish
from tests.support.serving import EVERY, PAGE, Server
from tests.support.tiered import whole

A, B, C = whole(1, 6), whole(2, 5), whole(3, 4)


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """Returns the keys of the whole blocks of a text."""
    return [encode(tokens[at : at + PAGE]) for at in range(0, len(tokens) // PAGE * PAGE, PAGE)]


class Keyed(Server):
    """A manager with two rows, a step in flight, and cached prompts, of which the engine has forgotten one."""

    below, caches = SimpleNamespace(prefetcher=None), ()

    def __init__(self) -> None:
        self.in_gap = False
        prefix = ms.Prefix(Lru(), LruPages(), keyed=True)
        super().__init__(
            Backend("reference"), slots=16, rows=6, pages=0, prefix=prefix, overlap=True, journal=8, whole=True,
        )  # fmt: skip
        for prompt in (A, B, C):
            self.turn(prompt)
        self.mem.forget(keys_of(C))
        self.first, self.second = self.start([*A, 5, 6, 7]), self.start([*whole(4, 3), 1], reach=0)
        self.run([self.first, self.second], publish=False)
        self.steps = [self.step([self.first, self.second], most=EVERY)]
        self.by_id = self.mem.pool.claim(1)

    def start(self, tokens: Sequence[int], **more: Any) -> ms.Row:
        (row,) = self.mem.admit([asked(tokens, **more)])
        self.text[row] = list(tokens)
        return row

    def publish(self, rows: Sequence[ms.Row]) -> list[ms.Snapshot | None]:
        return self.mem.publish(rows, keep="cache", keys=self.keys(rows))

    def end(self, rows: Sequence[ms.Row]) -> None:
        self.mem.end(rows, keep="cache", keys=self.keys(rows))

    def keys(self, rows: Sequence[ms.Row], less: int = 0) -> list[list[bytes]]:
        """Returns for each row the keys of the blocks that it has filled, except the last `less` keys."""
        return [keys_of(self.text[row][: self.mem.info(row).length - less * PAGE]) for row in rows]

    def look(self, idle: bool = False) -> None:
        super().look(idle)
        named = [node for nodes in self.cache.by_key.values() for node in nodes]
        assert set(named) == set(self.cache.stated()) and len(named) == self.cache.states

    def settled(self) -> None:
        while self.steps:
            self.mem.settle(self.steps.pop(0))

    def work_in_threads(self) -> None:
        """Does nothing: there are no threads."""

    def land(self) -> None:
        """Launches the forward of the step that is planned but has no forward yet."""
        rows = [self.first, self.second]
        pairs = zip(rows, self.steps[-1].before.tolist(), strict=True)
        self._forward(self.steps[-1], [self.text[row][n : n + 1] for row, n in pairs])
        self.mem.submit(self.steps[-1])

    def finish(self, serve: bool = True) -> None:
        """Looks at every byte that is left; then everything must be free."""
        for step in list(self.mem._parts.stepping._log.unsettled):
            self.mem.settle(step)
        self.mem.pool.release(self.mem.audit().leaked)
        for prompt in ([*A, 1], [*B, 2], C) if serve else ():
            self.turn(prompt)
        finish(self)

    def calls(self) -> dict[str, Callable[[], Callable[[], Any]]]:
        """Returns the calls by name; each function prepares this scene for a call, and returns the call."""
        mem, rows = self.mem, [self.first, self.second]

        def settled(call: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
            return lambda: self.settled() or call  # type: ignore[func-returns-value]

        def short_of_slots() -> Callable[[], Any]:
            self.settled()
            self.by_id = torch.cat([self.by_id, mem.pool.claim(mem.free_slots)])
            return lambda: mem.admit([asked([*B, 2])])

        def cancel() -> Callable[[], Any]:
            self.settled()
            self.in_gap = True
            self.steps.append(mem.plan(rows, 1))
            keys = [keys_of(self.text[row][:-1]) for row in rows]
            return lambda: mem.cancel(self.steps[-1], keep="cache", keys=keys)

        return {
            "admit": lambda: lambda: mem.admit([asked([*A, 1]), asked(whole(9))]),
            "admit within a reach": lambda: lambda: mem.admit([asked([*A, 1], reach=4 * PAGE)]),
            "admit where a forgotten state makes way": short_of_slots,
            "admit a forgotten prompt": lambda: lambda: mem.admit([asked([*C, 1])]),
            "match": lambda: lambda: mem.match(keys=keys_of(A), length=len(A) + 1, reach=PAGE),
            "forget": lambda: lambda: mem.forget([*keys_of(A), *keys_of(B)]),
            "publish": settled(lambda: self.publish(rows)),
            "publish with fewer keys": settled(lambda: mem.publish(rows, "cache", keys=self.keys(rows, less=1))),
            "end": settled(lambda: self.end(rows)),
            "cancel": cancel,
        }


def asked(tokens: Sequence[int], **more: Any) -> ms.Request:
    """Returns a request for a prompt. more: other arguments of `Request`."""
    return ms.Request(f"of {len(tokens)}", length=len(tokens), keys=keys_of(tokens), **more)

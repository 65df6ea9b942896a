"""A server over a manager with a prefix cache: prompts in chunks, tokens chosen from the states' bytes, KV in pages.

What a step reads and writes must be exactly what the tokens of its rows say.
"""

from collections.abc import Callable, Sequence

import numpy as np

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside, owners
from tests.support.build import build
from tests.support.checked import STALE, Checked, prefix_of
from tests.support.endings import made
from tests.support.loops import InPlacePlanes
from tests.support.planes import LAYOUT, Planes, fold

PAGE, EVERY = 4, 8
TRACKING: dict[str, Callable[[int], ms.Tracking]] = {
    "none": ms.NoTracking,
    "ping-pong": ms.PingPong,
    "lazy": ms.LazyPingPong,
    "redirect": ms.Redirect,
}


def chosen(value: int) -> int:
    """The token that a state of this value goes on with."""
    return (value >> 40) % 50


def written(prompt: Sequence[int], goal: int) -> list[int]:
    """A prompt and what follows, without any manager."""
    text = list(prompt)
    for _ in range(goal):
        text.append(chosen(fold(tuple(text))))
    return text


class Server(Checked):
    """Rows with their texts; the last token of a text has not been folded yet."""

    def __init__(
        self, backend: Backend, name: str = "redirect", *, prefix: ms.Prefix | bool = True, every: int = EVERY,
        page: int = PAGE, slots: int = 16, rows: int = 4, pages: int = 60, in_place: bool = False,
        layout: ms.StateLayout = LAYOUT, **settings: object,
    ) -> None:  # fmt: skip
        self.mem = build(
            layout,
            slots=slots,
            max_requests=rows,
            tracking=TRACKING[name](every),
            device=backend.device,
            backend=backend.name,
            max_batch=rows + 2,
            pages=pages,
            page_size=page,
            pages_per_row=40 if pages else 0,
            prefix=ms.Prefix() if prefix is True else prefix or None,
            in_place=in_place,
            **settings,  # type: ignore[arg-type]
        )
        self.planes = InPlacePlanes(self.mem) if in_place else Planes(self.mem)
        self.page, self.kv = page, np.full((pages + 1, page), STALE, np.int64)
        self.text: dict[ms.Row, list[int]] = {}
        if self.mem.prefix is not None:
            made(self)

    def admit(self, *requests: ms.Request) -> list[ms.Row]:
        rows = list(self.mem.admit(requests))
        for row, request in zip(rows, requests, strict=True):
            self.text[row] = list(request.tokens)  # type: ignore[arg-type]
            assert self.mem.info(row).length < len(self.text[row]), "a request computes its last token in any case"
        return rows

    def start(self, tokens: Sequence[int], **more: object) -> ms.Row:
        """Admits one prompt."""
        return self.admit(ms.Request(f"of {len(tokens)}", tokens=tokens, **more))[0]  # type: ignore[arg-type]

    def step(self, rows: Sequence[ms.Row | None], most: int = 64, run: bool = True) -> ms.Step:
        """Plans a chunk or a token for each row and runs the forward; nothing is settled."""
        lengths = [self.mem.info(row).length if row else 0 for row in rows]
        ends = [
            min(self.mem.info(row).next_boundary, len(self.text[row]), length + most) if row else 0
            for row, length in zip(rows, lengths, strict=True)
        ]
        return self.step_to(rows, ends, run)

    def step_to(self, rows: Sequence[ms.Row | None], ends: Sequence[int], run: bool = True) -> ms.Step:
        """Plans a chunk up to a length for each row, beyond boundaries too, and runs the forward."""
        lengths = [self.mem.info(row).length if row else 0 for row in rows]
        self.mem.extend([row for row in rows if row], [end for row, end in zip(rows, ends, strict=True) if row])
        step = self.mem.plan(rows, [end - length for end, length in zip(ends, lengths, strict=True)])
        if run:
            spans = zip(rows, lengths, ends, strict=True)
            self._forward(step, [self.text[row][a:b] if row else [] for row, a, b in spans])
            self.mem.submit(step)
        return step

    def _forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> None:
        mem = self.mem
        fed = [tokens if number else [] for tokens, number in zip(fed, step.numbers, strict=True)]
        self.planes.forward(step, [tuple(tokens) for tokens in fed])
        by_number = {row.index: row for row in mem.rows}
        write, table, pages = step.write.tolist(), mem.device.page_table.tolist(), owners.kv_pages(mem)
        for i, number in enumerate(step.numbers.tolist()):
            if not number:
                continue
            text, before, after = self.text[by_number[number]], int(step.before[i]), int(step.after[i])
            for at in range(before, after) if pages.pages else ():
                page = table[number][at // self.page]
                assert pages.holders[page] == 1, "a page that others share is written"
                self.kv[page, at % self.page] = text[at]
            assert not self.planes.wrong({write[i]: tuple(text[:after])}), f"row {number} at {after}"
            if pages.pages:
                assert self.kv[table[number]].reshape(-1)[:after].tolist() == text[:after]
            if after == len(text):
                text.append(chosen(int(mem.planes["long"][0, write[i], 0])))

    def run(self, rows: Sequence[ms.Row | None], most: int = 64, publish: bool = True) -> None:
        """One step, settled, and published to the cache."""
        self.mem.settle(self.step(rows, most))
        if publish:
            self.publish([row for row in rows if row])

    def run_to(self, rows: Sequence[ms.Row | None], ends: Sequence[int]) -> None:
        """One step up to these lengths, settled, and published to the cache."""
        self.mem.settle(self.step_to(rows, ends))
        self.publish([row for row in rows if row])

    def prefill(self, row: ms.Row, most: int = 64, publish: bool = True) -> None:
        """Everything of a prompt but what decoding adds."""
        prompt = len(self.text[row])
        while self.mem.info(row).length < prompt:
            self.run([row], most, publish)

    def publish(self, rows: Sequence[ms.Row]) -> list[ms.Snapshot | None]:
        if self.mem.prefix is None:
            return [None] * len(rows)
        return self.mem.publish(rows, keep="cache", tokens=[self.text[row] for row in rows])

    def end(self, rows: Sequence[ms.Row]) -> None:
        """Releases rows into the cache, as far as they are real."""
        self.mem.end(
            rows,
            keep="cache" if self.mem.prefix else None,
            tokens=[self.text[row] for row in rows] if self.mem.prefix else None,
        )

    def turn(self, tokens: Sequence[int], goal: int = 1, most: int = 64, publish: bool = True, **more: object) -> int:
        """A request from its admission to its end; returns the length it started with."""
        row = self.start(tokens, **more)
        start = self.mem.info(row).length
        while len(self.text[row]) < len(tokens) + goal:
            self.run([row], most, publish)
        assert self.text[row] == written(tokens, goal)
        self.end([row])
        return start

    def states(self, salt: object = None) -> dict[int, ms.Snapshot]:
        """Cached states of a salt by length: for trees of one path."""
        found = [node.snapshot for at, node in self.cache.tree.walk() if at == salt and node.snapshot]
        assert len({snap.length for snap in found}) == len(found)
        return {snap.length: snap for snap in found}

    def states_by_prefix(self) -> dict[tuple[int, ...], ms.Snapshot]:
        """Cached states by the tokens that they stand for."""
        return {tuple(prefix_of(node)): node.snapshot for _, node in self.cache.tree.walk() if node.snapshot}

    @property
    def cache(self) -> "ms.prefix.PrefixCache":
        assert self.mem.prefix is not None
        return self.mem.prefix

    def slot(self, register: int) -> int:
        """The slot on the device in a register, after submitting what is recorded."""
        self.mem.submit()
        return int(inside.registers(self.mem).table.slots[register])

"""Runs a test server with a prefix cache, chunked prompts and KV pages, whose answers follow from the bytes of states.

It checks that each step reads and writes exactly the states and KV of its rows' tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside, owners
from tests.support.build import build
from tests.support.checked import STALE, Checked
from tests.support.planes import LAYOUT, InPlacePlanes, Planes, fold

PAGE, EVERY = 4, 8
TRACKING: dict[str, Callable[[int], ms.Tracking]] = {
    "none": ms.NoTracking,
    "ping-pong": ms.PingPong,
    "lazy": ms.LazyPingPong,
    "redirect": ms.Redirect,
}


def chosen(value: int) -> int:
    """Returns the token that the model says after a state with this value."""
    return (value >> 40) % 50


def written(prompt: Sequence[int], goal: int) -> list[int]:
    """Returns a prompt and the next `goal` tokens that the model says, computed without a manager."""
    text = list(prompt)
    for _ in range(goal):
        text.append(chosen(fold(tuple(text))))
    return text


class Server(Checked):
    """A manager, its rows and their texts. The last token of a text is the next to compute; no state contains it."""

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

    def admit(self, *requests: ms.Request) -> list[ms.Row]:
        rows = list(self.mem.admit(requests))
        for row, request in zip(rows, requests, strict=True):
            self.text[row] = list(request.tokens)  # type: ignore[arg-type]
            assert self.mem.info(row).length < len(self.text[row]), "a request computes its last token in any case"
        return rows

    def start(self, tokens: Sequence[int], **more: object) -> ms.Row:
        """Admits one prompt, and returns its row."""
        return self.admit(ms.Request(f"of {len(tokens)}", tokens=tokens, **more))[0]  # type: ignore[arg-type]

    def step(self, rows: Sequence[ms.Row | None], most: int = 64, run: bool = True) -> ms.Step:
        """Plans at most `most` tokens per row, up to its next boundary, and runs the forward. Does not settle."""
        lengths = [self.mem.info(row).length if row else 0 for row in rows]
        ends = [
            min(self.mem.info(row).next_boundary, len(self.text[row]), length + most) if row else 0
            for row, length in zip(rows, lengths, strict=True)
        ]
        return self.step_to(rows, ends, run)

    def step_to(self, rows: Sequence[ms.Row | None], ends: Sequence[int], run: bool = True) -> ms.Step:
        """Plans each row up to a length, even beyond a boundary, and runs the forward. Does not settle."""
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
        """Runs and settles one step, and publishes to the cache."""
        self.mem.settle(self.step(rows, most))
        if publish:
            self.publish([row for row in rows if row])

    def prefill(self, row: ms.Row, most: int = 64, publish: bool = True) -> None:
        """Runs steps until the state of a row contains its whole prompt."""
        prompt = len(self.text[row])
        while self.mem.info(row).length < prompt:
            self.run([row], most, publish)

    def publish(self, rows: Sequence[ms.Row]) -> list[ms.Snapshot | None]:
        if self.mem.prefix is None:
            return [None] * len(rows)
        return self.mem.publish(rows, keep="cache", tokens=[self.text[row] for row in rows])

    def end(self, rows: Sequence[ms.Row]) -> None:
        """Ends rows, and leaves their states and pages in the cache."""
        self.mem.end(
            rows,
            keep="cache" if self.mem.prefix else None,
            tokens=[self.text[row] for row in rows] if self.mem.prefix else None,
        )

    def turn(self, tokens: Sequence[int], goal: int = 1, most: int = 64, publish: bool = True, **more: object) -> int:
        """Runs a request from admission to end. Returns the length that it started from."""
        row = self.start(tokens, **more)
        start = self.mem.info(row).length
        while len(self.text[row]) < len(tokens) + goal:
            self.run([row], most, publish)
        assert self.text[row] == written(tokens, goal)
        self.end([row])
        return start

    def states(self, salt: object = None) -> dict[int, ms.Snapshot]:
        """Returns length -> cached state of a salt. The salt's tree must be a single path."""
        snapshots = [node.snapshot for at, node in self.cache.tree.walk() if at == salt and node.snapshot]
        assert len({snap.length for snap in snapshots}) == len(snapshots)
        return {snap.length: snap for snap in snapshots}

    @property
    def cache(self) -> "ms.prefix.PrefixCache":
        assert self.mem.prefix is not None
        return self.mem.prefix

    def slot(self, register: int) -> int:
        """Submits, and returns the slot in a register on the device."""
        self.mem.submit()
        return int(inside.registers(self.mem).table.slots[register])

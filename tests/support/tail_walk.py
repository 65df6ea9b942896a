"""Runs a loop with drafts on one layer of a gated delta rule, and compares it with plain decode.

The inputs of all tokens of a few texts are drawn in advance, so the state after n tokens of a text is known. A wrong
draft is a token of another text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import StepMarks
from tests.support.decode_case import same_bits
from tests.support.trees import Tree, drawn_behind, nodes_of, parents_of

HEADS, SIZE, TOKENS, WRONG = 2, 8, 90, 3
STRATEGIES = {
    "none": ms.NoTracking(),
    "ping-pong": ms.PingPong(every=8),
    "lazy": ms.LazyPingPong(every=8),
    "redirect": ms.Redirect(every=8),
}


def layout(tail: int) -> ms.StateLayout:
    ring, bf16 = 3 * tail - 1, torch.bfloat16
    rows = [ms.Plane("ssm_k", (ring, 1, SIZE), bf16), ms.Plane("ssm_v", (ring, HEADS, SIZE), bf16)]
    rows += [ms.Plane(name, (ring, HEADS), torch.float32) for name in ("ssm_gate", "ssm_beta")]
    planes = [ms.Plane("ssm", (HEADS, SIZE, SIZE), torch.float32)]
    return ms.StateLayout(planes, layers=1, rows=ms.StateLayout(rows, layers=1))


class Model:
    """The inputs of each text, and the states and outputs of plain decode after each of its tokens."""

    def __init__(self, backend: Backend, generator: torch.Generator, texts: int) -> None:
        self.backend, shape = backend, (texts, TOKENS)
        normal = [torch.randn((*shape, *of), generator=generator) for of in ((1, SIZE), (1, SIZE), (HEADS, SIZE))]
        self.inputs = {name: x.bfloat16() for name, x in zip("qkv", normal, strict=True)}
        self.inputs["decay"] = torch.randn((*shape, HEADS), generator=generator)
        self.inputs["beta"] = torch.randn((*shape, HEADS), generator=generator)
        self.inputs = {name: x.to(backend.device) for name, x in self.inputs.items()}
        self.weights = {
            "a_log": torch.randn(HEADS, generator=generator).to(backend.device), "sigmoid": True, "normalize": True,
        }  # fmt: skip
        # Each token has a mark, so one launch stores the state after every token.
        count = texts * TOKENS
        pool = torch.zeros(count + 1 + texts, HEADS, SIZE, SIZE, device=backend.device)
        columns = torch.arange(count).div(TOKENS, rounding_mode="floor"), torch.arange(count) % TOKENS + 1
        ints = [torch.tensor([count]), *columns, torch.arange(1, count + 1)]
        marks = StepMarks(*(column.to(backend.device, torch.int32) for column in ints))
        nothing = torch.zeros(texts, dtype=torch.int32, device=backend.device)
        ends = (count + 1 + torch.arange(texts)).to(nothing)
        where = {"read": nothing, "write": ends, "snapshot": nothing, "tokens": nothing + TOKENS}
        self.outputs = backend.gated_delta_step(**self.inputs, **self.weights, **where, state=pool, marks=marks)
        self.states = pool[1 : count + 1].unflatten(0, (texts, TOKENS))

    def forward(
        self, mem: ms.StateManager, step: ms.Step, texts: list[list[tuple[int, int]]], trees: Sequence[Tree] = ()
    ) -> Tensor:  # fmt: skip
        """Runs a step. texts: for each entry, (text, place in the text) of its tokens. trees: drafts of each entry."""
        width = max(1, *map(len, texts))
        x = {}
        for name, stream in self.inputs.items():
            x[name] = stream.new_full((len(texts), width, *stream.shape[2:]), torch.nan)
            for entry, tokens in enumerate(texts):
                for t, (text, at) in enumerate(tokens):
                    x[name][entry, t] = stream[text, at]
        alone = mem.forward.in_place  # an in-place kernel knows only the slot that it writes
        return self.backend.gated_delta_step(
            **x,
            **self.weights,
            state=mem.planes["ssm"][0],
            read=step.write if alone else step.read,
            write=step.write,
            snapshot=torch.zeros_like(step.write) if alone else step.snapshot,
            tokens=step.tokens,
            tail=mem.planes.tail("ssm", 0),
            cursor=step.cursor,
            parents=parents_of(trees, self.backend.device) if trees else None,
            marks=step.marks,
        )


class Walk:
    """Makes random calls with drafts, and checks outputs and snapshots against plain decode."""

    def __init__(self, mem: ms.StateManager, model: Model, generator: torch.Generator, tail: int) -> None:
        self.mem, self.model, self.generator, self.tail, self.overlap = mem, model, generator, tail, mem.overlap
        self.rows: dict[ms.Row, tuple[int, int]] = {}  # row -> (number of its text, its length)
        self.kept: list[tuple[ms.Snapshot, int]] = []
        self.names = 0
        self.flight: Any = None  # with overlap, the arguments of `settle` for the last step

    def draw(self, most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=self.generator))

    def step(self) -> None:
        entries: list[Any] = [row for row in self.rows if self.draw(4)]
        entries = [entries[i] for i in torch.randperm(len(entries), generator=self.generator)]
        if self.draw(2) == 0:
            entries.insert(self.draw(len(entries)), None)
        tokens, drafts, accepted, texts = [], [], [], []
        trees: list[Tree] = []
        for row in entries:
            text, length = self.rows.get(row, (0, 0))
            n = self.draw(self.tail - 1) + 1 if length or self.draw(1) else self.draw(30) + 1
            if self.draw(7) == 0:
                n = 0  # the step only folds pending tokens
            of = self.draw(n) if n <= self.tail and self.draw(3) else 0
            trees.append(drawn_behind(n - of, of, self.generator, branches=bool(self.draw(1))))
            path = trees[-1].path
            tokens.append(n)
            drafts.append(of)
            accepted.append(len(path) if row is not None else 0)
            at = {node: length + number for number, node in enumerate(path)}
            texts.append([(text, at[t]) if t in at else (WRONG, length + t) for t in range(n)])
        starts = [self.rows.get(row, (0, 0)) for row in entries]
        step = self.mem.plan(entries, tokens, drafts=drafts, defer=self.draw(3) // 2 * self.draw(2 * self.tail))
        assert step.lengths.tolist() == [length for _, length in starts]
        if self.flight is None:
            assert step.before.tolist() == step.lengths.tolist()
        branches = any(tree.parents != [*range(-1, len(tree.parents) - 1)] for tree in trees)
        out = self.model.forward(self.mem, step, texts, trees if branches else ()) if entries else None
        written = bool(self.draw(1)) or self.overlap or branches
        if written:
            step.accepted.copy_(torch.tensor(accepted, dtype=torch.int32))
        if branches:
            self.mem.device.keep_path(nodes_of([tree.path for tree in trees], self.mem.planes.device))
        for entry, row in enumerate(entries):
            text, length = starts[entry]
            for t, node in enumerate(trees[entry].path[: accepted[entry]]):
                assert out is not None and same_bits(out[entry, node], self.model.outputs[text, length + t])
            if row is not None:
                self.rows[row] = text, length + accepted[entry]
        flight = step, entries, accepted, any(drafts), written, [length for _, length in starts]
        flight, self.flight = (self.flight, flight) if self.overlap else (flight, None)
        if self.overlap and self.draw(5) == 0:
            self.check()
        if flight is not None:
            self.settle(*flight)

    def settle(
        self, step: ms.Step, entries: list[Any], accepted: list[int], guessed: bool, written: bool, starts: list[int]
    ) -> None:
        """Settles a step. Some of its rows end with it. With overlap, the next step was planned with these rows too."""
        over = [row in self.rows and self.draw(30) == 0 for row in entries]
        if guessed or self.draw(1):
            self.mem.accept(step, accepted, finished=over, written=written)
        else:
            self.mem.settle(step, over)
        assert step.before.tolist() == starts
        assert step.after.tolist() == [a + b for a, b in zip(starts, accepted, strict=True)]
        if self.flight is None:
            for row in entries:
                assert row not in self.rows or row in over or self.mem.info(row).length == self.rows[row][1]
        for row, ended in zip(entries, over, strict=True):
            if ended:
                at = dict(zip(self.flight[1], self.flight[5], strict=True)) if self.flight else {}
                length = at.get(row, self.rows[row][1])  # the length before the dead step
                # The request may have ended a few tokens earlier.
                self.rows[row] = self.rows[row][0], length - self.draw(min(length, self.draw(3)))
                self.end([row])

    def end(self, rows: list[ms.Row]) -> None:
        keep = self.draw(1)
        lengths = [self.rows[row][1] for row in rows]
        where: Any = {"keep": "handle", "lengths": lengths} if keep else {}
        for row, state in zip(rows, self.mem.end(rows, **where), strict=True):
            text, length = self.rows.pop(row)
            if state is not None:
                self.keep(state, text, length)

    def keep(self, state: ms.Snapshot | None, text: int, length: int) -> None:
        if state is not None:
            assert state.length <= length
            self.kept.append((state, text))

    def check(self) -> None:
        """Checks that each kept snapshot has the bits of plain decode at its length."""
        self.mem.submit(*([self.flight[0]] if self.flight is not None else []))
        for state, text in self.kept:
            (slot,) = self.mem.device.read_slots([state]).wait().tolist()
            assert same_bits(self.mem.planes["ssm"][0, slot], self.model.states[text, state.length - 1]), state
        self.mem.audit().raise_if_leaking()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            choice = self.draw(7)
            if self.flight is not None and (choice == 3 or self.draw(1)):  # only settled rows can be forked
                flight, self.flight = self.flight, None
                self.settle(*flight)
            if len(self.rows) < 4 and choice < 3:
                again = self.kept and self.draw(1)
                state, text = self.kept[self.draw(len(self.kept) - 1)] if again else (None, self.draw(WRONG - 1))
                try:
                    (row,) = self.mem.admit([ms.Request(self.names, resume=state)])
                except (ms.OutOfSlots, ms.OutOfRows):
                    self.drop()
                    continue
                self.names += 1
                self.rows[row] = text, state.length if state else 0
            elif choice == 3 and self.rows:
                row = [*self.rows][self.draw(len(self.rows) - 1)]
                try:
                    fork = self.mem.fork(row, [self.names])
                except (ms.OutOfSlots, ms.OutOfRows):
                    self.drop()
                    continue
                self.names += 1
                self.rows[fork.rows[0]] = self.rows[row]
            elif choice == 4 and self.rows:
                self.end([[*self.rows][self.draw(len(self.rows) - 1)]])
            elif choice == 5 and self.rows:
                rows = [*self.rows]
                for row, state in zip(rows, self.mem.publish(rows, keep="handle"), strict=True):
                    self.keep(state, *self.rows[row])
            elif choice == 6:
                self.drop()
            if all(length < TOKENS - 35 for _, length in self.rows.values()):
                self.step()
            else:
                self.end([row for row, (_, length) in self.rows.items() if length >= TOKENS - 35])
            if self.draw(5) == 0:
                self.check()

    def drop(self) -> None:
        if self.kept:
            state, _ = self.kept.pop(self.draw(len(self.kept) - 1))
            self.mem.drop([state])

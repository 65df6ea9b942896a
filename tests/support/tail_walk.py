"""Runs a loop with drafts on one layer of a gated delta rule, and compares it with plain decode.

The inputs of all tokens of a few texts are drawn in advance, so the state after n tokens of a text is known. A wrong
draft is a token of another text.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Cursor, StepMarks
from tests.support.decode_case import same_bits
from tests.support.trees import Tree, drawn_behind, nodes_of, parents_of

HEADS, SIZE, TOKENS, WRONG = 2, 16, 120, 3
STRATEGIES = {
    "none": ms.NoTracking(),
    "ping-pong": ms.PingPong(every=8),
    "lazy": ms.LazyPingPong(every=8),
    "redirect": ms.Redirect(every=8),
}


def layout(tail: int, dtype: torch.dtype = torch.float32) -> ms.StateLayout:
    ring, bf16 = 3 * tail - 1, torch.bfloat16
    rows = [ms.Plane("ssm_k", (ring, 1, SIZE), bf16), ms.Plane("ssm_v", (ring, HEADS, SIZE), bf16)]
    rows += [ms.Plane(name, (ring, HEADS), torch.float32) for name in ("ssm_gate", "ssm_beta")]
    planes = [ms.Plane("ssm", (HEADS, SIZE, SIZE), dtype)]
    if not dtype.is_floating_point:
        planes.append(ms.Plane("ssm_scale", (HEADS, SIZE), torch.float32))
    return ms.StateLayout(planes, layers=1, rows=ms.StateLayout(rows, layers=1))


class Model:
    """The inputs of each text, and the states and outputs of plain decode after each of its tokens.

    An int8 state is rounded by chance.
    """

    def __init__(
        self, backend: Backend, generator: torch.Generator, texts: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.backend, self.dtype, shape = backend, dtype, (texts, TOKENS)
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
        planes = ms.Planes(layout(1, dtype), count + texts, backend, rows=1)
        columns = torch.arange(count).div(TOKENS, rounding_mode="floor"), torch.arange(count) % TOKENS + 1
        ints = [torch.tensor([count]), *columns, torch.arange(1, count + 1)]
        marks = StepMarks(*(column.to(backend.device, torch.int32) for column in ints))
        nothing = torch.zeros(texts, dtype=torch.int32, device=backend.device)
        ends = (count + 1 + torch.arange(texts)).to(nothing)
        where = {"read": nothing, "write": ends, "snapshot": nothing, "tokens": nothing + TOKENS}
        # Rows without memory, so that a state of fewer bits is rounded after each token, as in plain decode.
        cursor = Cursor(nothing, nothing, nothing, nothing + TOKENS)
        self.outputs = backend.gated_delta_step(
            **self.inputs, **self.weights, **where, **self.states_of(planes, cursor), marks=marks
        )
        self.states = {name: plane[0, 1 : count + 1].unflatten(0, (texts, TOKENS)) for name, plane in planes.items()}

    def states_of(self, planes: ms.Planes, cursor: Cursor) -> dict[str, Any]:
        """Returns the arguments of a step that say where the states and the tails are."""
        arguments = {"state": planes["ssm"][0], "tail": planes.tail("ssm", 0), "cursor": cursor}
        if not self.dtype.is_floating_point:
            arguments["scales"] = planes["ssm_scale"][0]
        return arguments | self.draws(cursor.label)

    def draws(self, lengths: Tensor) -> dict[str, Any]:
        """Returns the arguments of a step that rounds by chance."""
        return {"seed": 5, "layer": 3, "lengths": lengths} if self.dtype == torch.int8 else {}

    def same(self, planes: ms.Planes, slot: int, text: int, length: int) -> bool:
        """Returns whether a slot has the bytes of plain decode."""
        return all(same_bits(planes[name][0, slot], states[text, length - 1]) for name, states in self.states.items())

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
            **self.states_of(mem.planes, step.cursor),
            read=step.write if alone else step.read,
            write=step.write,
            snapshot=torch.zeros_like(step.write) if alone else step.snapshot,
            tokens=step.tokens,
            parents=parents_of(trees, self.backend.device) if trees else None,
            marks=step.marks,
        )


class Walk:
    """Makes random steps with drafts, and checks outputs and snapshots against plain decode.

    Random programs draw all other calls between such steps, on bytes that they make themselves.
    """

    def __init__(self, mem: ms.StateManager, model: Model, generator: torch.Generator, tail: int) -> None:
        self.mem, self.model, self.generator, self.tail = mem, model, generator, tail
        self.rows: dict[ms.Row, tuple[int, int]] = {}  # row -> (number of its text, its length)
        self.kept: list[tuple[ms.Snapshot, int]] = []
        self.flights: list[tuple[ms.Step, list[int], bool, bool]] = []  # arguments of `settle`
        self.names = count()

    def draw(self, most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=self.generator))

    def step(self) -> None:
        """Runs a step, and settles it or, with overlap, the one before."""
        order = torch.randperm(len(self.rows) + 1, generator=self.generator)
        entries = [[*self.rows, None][i] for i in order]
        starts = [self.rows.get(row, (0, 0)) for row in entries]  # type: ignore[arg-type]
        tokens, drafts, texts, trees = [], [], [], []
        for text, length in starts:
            n = self.draw(self.tail - 1) + 1 if length or self.draw(1) else self.draw(30) + 1
            n *= self.draw(7) > 0  # a step of 0 tokens only folds pending tokens
            of = self.draw(n) if n <= self.tail and self.draw(3) else 0
            trees.append(drawn_behind(n - of, of, self.generator, branches=bool(self.draw(1))))
            tokens.append(n)
            drafts.append(of)
            at = {node: length + number for number, node in enumerate(trees[-1].path)}
            texts.append([(text, at[t]) if t in at else (WRONG, length + t) for t in range(n)])
        step = self.mem.plan(entries, tokens, drafts=drafts, defer=self.draw(3) // 2 * self.draw(2 * self.tail))
        assert step.lengths.tolist() == [length for _, length in starts]
        branches = any(tree.parents != [*range(-1, len(tree.parents) - 1)] for tree in trees)
        out = self.model.forward(self.mem, step, texts, trees if branches else ())
        accepted = [len(tree.path) if row else 0 for row, tree in zip(entries, trees, strict=True)]
        if written := bool(self.draw(1)) or self.mem.overlap or branches:
            step.accepted.copy_(torch.tensor(accepted, dtype=torch.int32))
        if branches:
            self.mem.device.keep_path(nodes_of([tree.path for tree in trees], self.mem.planes.device))
        for entry, (row, (text, length)) in enumerate(zip(entries, starts, strict=True)):
            for t, node in enumerate(trees[entry].path if row else ()):
                assert same_bits(out[entry, node], self.model.outputs[text, length + t])
            if row:
                self.rows[row] = text, length + accepted[entry]
        self.flights.append((step, accepted, any(drafts), written))
        self.settle(leave=self.mem.overlap)

    def settle(self, leave: int = 0) -> None:
        """Settles all steps but the newest `leave` ones."""
        while len(self.flights) > leave:
            step, accepted, guessed, written = self.flights.pop(0)
            if guessed or self.draw(1):
                self.mem.accept(step, accepted, written=written)
            else:
                self.mem.settle(step)
            assert (step.after - step.before).tolist() == accepted

    def keep(self, rows: list[ms.Row], states: Sequence[ms.Snapshot | None]) -> None:
        """Notes handles, checks that each has the bits of plain decode at its length, and drops all but the last 3."""
        self.mem.submit(*(flight[0] for flight in self.flights))
        for row, state in zip(rows, states, strict=True):
            if state is not None:
                text, length = self.rows[row]
                assert state.length <= length
                self.kept.append((state, text))
        for state, text in self.kept:
            (slot,) = self.mem.device.read_slots([state]).wait().tolist()
            assert self.model.same(self.mem.planes, slot, text, state.length), state
        self.mem.audit().raise_if_leaking()
        self.mem.drop([state for state, _ in self.kept[:-3]])
        self.kept = self.kept[-3:]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.rows) < 3:
                state, text = self.kept[-1] if self.kept and self.draw(1) else (None, self.draw(WRONG - 1))
                (row,) = self.mem.admit([ms.Request(next(self.names), resume=state)])
                self.rows[row] = text, state.length if state else 0
            self.step()
            if self.draw(2):
                continue
            self.settle()
            rows = [row for row, (_, length) in self.rows.items() if length >= TOKENS - 35 or not self.draw(5)]
            self.keep(rows, self.mem.end(rows, keep="handle"))
            for row in rows:
                del self.rows[row]
            self.keep(rows := [*self.rows], self.mem.publish(rows, keep="handle"))
            if rows and len(rows) < 3:
                (fork,) = self.mem.fork(rows[0], [next(self.names)]).rows
                self.rows[fork] = self.rows[rows[0]]

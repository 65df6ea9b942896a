"""Rows with tails: whatever is guessed, accepted, kept and forked, a state has the bits of plain decode at its length.

The model is one layer of a gated delta rule. Token n of a text has inputs that its text alone decides, so the state
behind n tokens of a text is known; a guess is a token of another text.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import DeltaTail, Marks
from tests.support.build import on
from tests.support.decode_case import same_bits

HEADS, SIZE, TOKENS, WRONG = 2, 8, 90, 3
STRATEGIES = {
    "none": ms.NoTracking(),
    "ping-pong": ms.PingPong(every=8),
    "lazy": ms.LazyPingPong(every=8),
    "redirect": ms.Redirect(every=8),
}


def layout(tail: int) -> ms.StateLayout:
    ring, bf16 = 3 * tail - 1, torch.bfloat16
    rows = [ms.Plane("k", (ring, 1, SIZE), bf16), ms.Plane("v", (ring, HEADS, SIZE), bf16)]
    rows += [ms.Plane(name, (ring, HEADS), torch.float32) for name in ("gate", "beta")]
    planes = [ms.Plane("ssm", (HEADS, SIZE, SIZE), torch.float32)]
    return ms.StateLayout(planes, layers=1, rows=ms.StateLayout(rows, layers=1))


class Model:
    """Texts by number, and the states and outputs of plain decode behind each of their tokens."""

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
        # Every token has a mark, and so every state a slot.
        count = texts * TOKENS
        pool = torch.zeros(count + 1 + texts, HEADS, SIZE, SIZE, device=backend.device)
        columns = torch.arange(count).div(TOKENS, rounding_mode="floor"), torch.arange(count) % TOKENS + 1
        ints = [torch.tensor([count]), *columns, torch.arange(1, count + 1)]
        marks = Marks(*(column.to(backend.device, torch.int32) for column in ints))
        nothing = torch.zeros(texts, dtype=torch.int32, device=backend.device)
        ends = (count + 1 + torch.arange(texts)).to(nothing)
        where = {"read": nothing, "write": ends, "snapshot": nothing, "tokens": nothing + TOKENS}
        self.outputs = backend.gated_delta_step(**self.inputs, **self.weights, **where, state=pool, marks=marks)
        self.states = pool[1 : count + 1].unflatten(0, (texts, TOKENS))

    def forward(self, mem: ms.StateManager, step: ms.Step, texts: list[list[tuple[int, int]]]) -> Tensor:
        """texts: for each token of each entry its text and its place there."""
        width = max(1, *map(len, texts))
        x = {}
        for name, stream in self.inputs.items():
            x[name] = stream.new_full((len(texts), width, *stream.shape[2:]), torch.nan)
            for entry, tokens in enumerate(texts):
                for t, (text, at) in enumerate(tokens):
                    x[name][entry, t] = stream[text, at]
        rings = {name: plane[0] for name, plane in mem.planes.rows.items()} if mem.planes.rows is not None else {}
        return self.backend.gated_delta_step(
            **x,
            **self.weights,
            state=mem.planes["ssm"][0],
            read=step.read,
            write=step.write,
            snapshot=step.snapshot,
            tokens=step.tokens,
            tail=DeltaTail(**rings),
            cursor=step.cursor,
            marks=step.marks,
        )


class Walk:
    """A loop that guesses tokens, with random calls in between; it knows the text of each row and what is in it."""

    def __init__(self, mem: ms.StateManager, model: Model, generator: torch.Generator, tail: int) -> None:
        self.mem, self.model, self.generator, self.tail, self.overlap = mem, model, generator, tail, mem.overlap
        self.rows: dict[ms.Row, tuple[int, int]] = {}  # its text and its length
        self.kept: list[tuple[ms.Snapshot, int]] = []
        self.names = 0
        self.flight: Any = None  # the step that is not settled, with overlap

    def draw(self, most: int) -> int:
        return int(torch.randint(0, most + 1, (1,), generator=self.generator))

    def step(self) -> None:
        entries: list[Any] = [row for row in self.rows if self.draw(4)]
        entries = [entries[i] for i in torch.randperm(len(entries), generator=self.generator)]
        if self.draw(2) == 0:
            entries.insert(self.draw(len(entries)), None)
        tokens, drafts, accepted, texts = [], [], [], []
        for row in entries:
            text, length = self.rows.get(row, (0, 0))
            n = self.draw(self.tail - 1) + 1 if length or self.draw(1) else self.draw(30) + 1
            if self.draw(7) == 0:
                n = 0  # folds what is pending
            of = self.draw(n) if n <= self.tail and self.draw(3) else 0
            right = n - of + self.draw(of)
            tokens.append(n)
            drafts.append(of)
            accepted.append(right if row is not None else 0)
            texts.append([(text if t < right else WRONG, length + t) for t in range(n)])
        starts = [self.rows.get(row, (0, 0)) for row in entries]
        step = self.mem.plan(entries, tokens, drafts=drafts)
        assert step.lengths.tolist() == [length for _, length in starts]
        if self.flight is None:
            assert step.before.tolist() == step.lengths.tolist()
        out = self.model.forward(self.mem, step, texts) if entries else None
        written = bool(self.draw(1)) or self.overlap
        if written:
            step.accepted.copy_(torch.tensor(accepted, dtype=torch.int32))
        for entry, row in enumerate(entries):
            text, length = starts[entry]
            for t in range(accepted[entry]):
                assert out is not None and same_bits(out[entry, t], self.model.outputs[text, length + t])
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
        """Tells what came of a step; some of its rows have ended then, and are in the next one as well."""
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
                self.rows[row] = self.rows[row][0], at.get(row, self.rows[row][1])  # without what a dead step adds
                self.end([row])

    def end(self, rows: list[ms.Row]) -> None:
        keep = self.draw(1)
        for row, state in zip(rows, self.mem.end(rows, **({"keep": "handle"} if keep else {})), strict=True):
            text, length = self.rows.pop(row)
            if state is not None:
                assert length - state.length < 3 * self.tail  # the live one at least
                self.keep(state, text, length)

    def keep(self, state: ms.Snapshot | None, text: int, length: int) -> None:
        if state is not None:
            assert state.length <= length
            self.kept.append((state, text))

    def check(self) -> None:
        """Every state that is kept has the bits of plain decode at its length."""
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


@pytest.fixture
def model(backend: Backend, generator: torch.Generator) -> Model:
    return Model(backend, generator, WRONG + 1)


@pytest.mark.sample
@pytest.mark.parametrize("tail", [1, 3, 4])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T2_states_are_those_of_plain_decode(
    backend: Backend, generator: torch.Generator, model: Model, strategy: str, tail: int, overlap: bool
) -> None:
    settings = {
        "slots": 14,
        "max_requests": 5,
        "max_batch": 6,
        "tracking": STRATEGIES[strategy],
        "overlap": False,
        "tail": tail,
    }
    mem = on(backend, layout(tail), **settings)
    for planes in (mem.planes, mem.planes.rows):
        assert planes is not None
        for plane in planes.values():
            plane.fill_(torch.nan)
    mem.device.scrub_null()
    Walk(mem, model, generator, tail).run(60 if backend.name == "reference" else 12)


@pytest.mark.parametrize("tail", [1, 4])
@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:])
def test_T3_a_boundary_among_accepted_tokens_is_kept(
    backend: Backend, generator: torch.Generator, strategy: str, tail: int
) -> None:
    """Whatever is accepted on the way, the newest boundary is there as soon as the step behind it has stored it."""
    mem = on(backend, layout(tail), slots=6, max_requests=1, tracking=STRATEGIES[strategy], overlap=False, tail=tail)
    (row,) = mem.admit([ms.Request("a")])
    for n in (5, 1):
        mem.settle(mem.plan([row], n))
    length, found = 6, set[int]()
    while length < 100:
        step = mem.plan([row], tail, drafts=tail)
        labels = step.label
        assert labels is not None and labels[0] + step.cursor.pending[0] == length
        accepted = int(torch.randint(0, tail + 1, (1,), generator=generator))
        mem.accept(step, [accepted])
        length += accepted
        (state,) = mem.publish([row], keep="handle")
        if state is not None:
            found.add(state.length)
            mem.drop([state])
    assert found >= set(range(8, 88, 8)) and all(at % 8 == 0 for at in found)


def test_T4_refuses_what_no_step_with_drafts_can_be(backend: Backend) -> None:
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.Redirect(every=8), overlap=False, tail=4)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    with pytest.raises(ms.InvalidArgument, match=r"have \[5\] tokens with drafts: a step keeps at most 4"):
        mem.plan(rows, [5, 5], drafts=[0, 1])
    with pytest.raises(ms.InvalidArgument, match=r"drafts \[4, 3\] of \[3, 3\] tokens"):
        mem.plan(rows, 3, drafts=[4, 3])
    step = mem.plan(rows, 3, drafts=[1, 3])
    for accepted, why in (([1, 0], r"accepted\[0\]=1: expected 2 to 3"), ([2, 4], r"accepted\[1\]=4: expected 0 to 3")):
        with pytest.raises(ms.InvalidArgument, match=why):
            mem.accept(step, accepted)
    with pytest.raises(ms.InvalidArgument, match=r"speculative: accept\(step, accepted\) settles it"):
        mem.settle(step)
    with pytest.raises(ms.InvalidArgument, match="written=1: expected True or False"):
        mem.accept(step, [2, 0], written=1)  # type: ignore[arg-type]
    mem.accept(step, [2, 0])
    with pytest.raises(ms.StaleHandle):
        mem.accept(step, [2, 0])
    assert [mem.info(row).length for row in rows] == [2, 0] == [mem.info(row).confirmed for row in rows]


def test_T5_refuses_settings_that_have_no_tails(backend: Backend) -> None:
    settings = {"slots": 4, "max_requests": 1, "tracking": ms.NoTracking()}
    plain = ms.StateLayout(layout(4).planes, layers=1)
    partly = ms.StateLayout((replace(layout(4).planes[0], rewritten_each_step=False),), layers=1, rows=layout(4).rows)
    for of, why in ((plain, "the layout has no rings"), (partly, "rows with tails need a state without levels")):
        with pytest.raises(ms.ConfigurationError, match=why):
            on(backend, of, **settings, tail=4)
    rings = [replace(plane, fill=None) for plane in layout(4).rows.planes]  # type: ignore[union-attr]
    with pytest.raises(ms.ConfigurationError, match=r"tail=5 with rings .* of fewer than 14 tokens"):
        on(backend, replace(layout(4), rows=ms.StateLayout(rings, layers=1)), **settings, tail=5)
    for given in ({"speculation": True}, {"in_place": True}):
        with pytest.raises(ms.ConfigurationError, match="tails take the place of windows"):
            ms.Forward(tail=4, **given)
    with pytest.raises(ms.ConfigurationError, match="tail=-1: expected a whole number of tokens from 0"):
        ms.Forward(tail=-1)
    with pytest.raises(ms.InvalidArgument, match="drafts= needs rows with tails"):
        mem = on(backend, plain, **settings)
        mem.plan(mem.admit([ms.Request("a")]), 2, drafts=1)
    with pytest.raises(ms.InvalidArgument, match=r"its rows have no tail; build the manager with Forward\(tail=\)"):
        _ = mem.plan(mem.admit([]), []).cursor


def test_T7_a_row_whose_length_is_not_told_yet_waits_for_it(backend: Backend) -> None:
    """Between the plan of a step and the accept of the one before: what is refused, what is counted, what is freed."""
    mem = on(backend, layout(4), slots=6, max_requests=3, tracking=ms.Redirect(every=4), overlap=True, tail=4)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows, 3))
    first = mem.plan(rows, 4, drafts=[3, 0])
    first.accepted.copy_(torch.tensor([4, 4], dtype=torch.int32))
    free = mem.free_slots
    second = mem.plan(rows, [2, 1], drafts=[1, 0])
    assert mem.free_slots == free and second.lengths.tolist() == [7, 7] and mem.info(rows[0]).length == 4
    for call in (
        lambda: mem.end(rows[:1]), lambda: mem.publish(rows[:1], keep="handle"), lambda: mem.cancel(second),
    ):  # fmt: skip
        with pytest.raises(ms.InvalidArgument, match="planned again before step 1 was accepted"):
            call()
    with pytest.raises(ms.InvalidArgument, match="write it there before that plan, and say written=True"):
        mem.accept(first, [4, 4])
    mem.audit().raise_if_leaking()
    (other,) = mem.admit([ms.Request("c")])
    mem.accept(first, [4, 4], written=True)
    assert [mem.info(row).length for row in rows] == [8, 8] and second.before.tolist() == [7, 7]
    mem.audit().raise_if_leaking()
    mem.accept(second, [1, 1])
    mem.end([*rows, other])
    mem.audit().raise_if_leaking()
    assert mem.free_slots == 6


@pytest.mark.parametrize("overlap", [False, True])
def test_T8_a_row_that_reads_no_token_folds_its_tail(backend: Backend, overlap: bool) -> None:
    """A turn that ends amid its accepted tokens leaves the state of its last one, whatever boundary lies among them."""
    mem = on(backend, layout(4), slots=6, max_requests=3, tracking=ms.Redirect(every=8), overlap=overlap, tail=4)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan([a, b], [5, 3]))
    mem.accept(mem.plan([a, b], [4, 1], drafts=[3, 0]), [4, 1])
    assert [mem.info(row).length for row in (a, b)] == [9, 4]
    step = mem.plan([a, None, b], [0, 0, 1])
    assert step.tokens.tolist() == [0, 0, 1] and step.cursor.pending.tolist() == [4, 0, 0]
    assert step.cursor.store.tolist() == [4, 0, 1] and step.lengths.tolist() == [9, 0, 4]
    mem.settle(step)
    states = mem.end([a, b], keep="handle")
    assert [state.length for state in states if state is not None] == [9, 5]
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("accepted", [0, 4])
@pytest.mark.parametrize("others", [0, 2])
def test_T9_a_late_step_holds_slots_back_and_returns_them(backend: Backend, accepted: int, others: int) -> None:
    """The row stands at a boundary: whether it is kept depends on the tokens that the host does not know yet.

    Requests that come in between take what the reserve leaves to them; the device has chosen before.
    """
    mem = on(backend, layout(4), slots=4, max_requests=4, tracking=ms.Redirect(every=4), reserve=2, tail=4)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 4))
    first = mem.plan([row], 4, drafts=4)
    first.accepted.fill_(accepted)
    mem.plan([row], 4, drafts=4)
    assert mem.free_slots == 2  # of three
    mem.admit([ms.Request(i) for i in range(others)])
    mem.accept(first, [accepted], written=True)
    assert mem.free_slots == 3 - others - (accepted > 0) and mem.stats().snapshots == (accepted > 0)
    mem.audit().raise_if_leaking()


def test_T9_a_request_finds_nothing_of_the_one_before_it(backend: Backend) -> None:
    """A row ends with tokens that are pending, not told, or counted by the device alone."""
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.NoTracking(), overlap=True, tail=4)
    (other,) = mem.admit([ms.Request("other")])
    for told in ("accepted", "not told", "dead"):
        (row,) = mem.admit([ms.Request(told)])
        step = mem.plan([row, other], [4, 1], drafts=[4, 0])
        step.accepted.fill_(1)
        step.accepted[0] = 3
        if told == "not told":
            mem.end([row])
        mem.accept(step, [3, 1], written=True, finished=[told == "dead", False])
        step = mem.plan([row if told == "accepted" else None, other], 1)
        assert step.lengths[0] == 3 * (told == "accepted")
        mem.settle(step)
        if told != "not told":
            mem.end([row])
        (row,) = mem.admit([ms.Request(f"after {told}")])
        step = mem.plan([row], 2)
        assert step.lengths.tolist() == [0] == step.cursor.pending.tolist()
        mem.settle(step)
        mem.end([row])
    mem.audit().raise_if_leaking()


def test_T7_a_step_behind_a_cancelled_one_is_counted_already(backend: Backend) -> None:
    """The plan of the cancelled step has counted what `step.accepted` said, and has put its own vectors there."""
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.NoTracking(), overlap=True, tail=4)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    first = mem.plan([a], 4, drafts=3)
    mem.cancel(mem.plan([b], 1))
    with pytest.raises(ms.InvalidArgument, match="the next step was planned, so the device has counted"):
        mem.accept(first, [4])
    mem.accept(first, [1])
    step = mem.plan([a], 1)
    assert step.before.tolist() == [1] == step.lengths.tolist()


@pytest.mark.parametrize("empty", [False, True])
def test_T4_refuses_windows_of_rows_with_tails(backend: Backend, empty: bool) -> None:
    mem = on(backend, layout(4), slots=4, max_requests=1, tracking=ms.NoTracking(), overlap=False, tail=4)
    (row,) = mem.admit([ms.Request("a")])
    step = mem.plan([row], 4, drafts=4)
    states = torch.zeros((1, 1, 4, HEADS, SIZE, SIZE), device=backend.device)
    with pytest.raises(ms.InvalidArgument, match="windows= for rows with tails, which have none"):
        mem.accept(step, [2], {} if empty else {"ssm": states})
    mem.accept(step, [2])
    assert mem.info(row).length == 2


def test_T4_a_row_that_has_ended_needs_no_accepted_tokens(backend: Backend) -> None:
    """An engine that aborts a request between verify and accept has no tokens of it."""
    mem = on(backend, layout(4), slots=4, max_requests=2, tracking=ms.NoTracking(), overlap=False, tail=4)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    step = mem.plan([a, b], [4, 2], drafts=[3, 1])
    mem.end([a])
    with pytest.raises(ms.InvalidArgument, match=r"accepted\[0\]=5: expected 0 to 4"):
        mem.accept(step, [5, 1])
    mem.accept(step, [0, 1])
    assert mem.info(b).length == 1
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("accepted", [0, 4])
def test_T9_a_late_step_and_a_count_that_is_read_from_the_device(backend: Backend, accepted: int) -> None:
    """The count has what the device has claimed for the step, before the host knows how much that is."""
    mem = on(backend, layout(4), slots=6, max_requests=1, tracking=ms.Redirect(every=4), overlap=True, tail=4)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 4))
    first = mem.plan([row], 4, drafts=4)
    first.accepted.fill_(accepted)
    mem.plan([row], 4, drafts=4)
    mem.device.check()
    mem.accept(first, [accepted], written=True)
    assert mem.free_slots == 5 - (accepted > 0)
    mem.audit().raise_if_leaking()


@pytest.mark.sample(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T2_debug_mode_knows_what_a_step_with_drafts_stores(
    backend: Backend, generator: torch.Generator, model: Model, strategy: str, overlap: bool
) -> None:
    settings = {"slots": 14, "max_requests": 5, "max_batch": 6, "tracking": STRATEGIES[strategy], "tail": 3}
    mem = on(backend, layout(3), **settings, overlap=overlap, debug=True)
    assert mem.planes.rows is not None
    for plane in mem.planes.rows.values():
        plane.fill_(torch.nan)
    Walk(mem, model, generator, 3).run(40 if backend.name == "reference" else 8)


@pytest.mark.parametrize("late", [False, True])
def test_T2_debug_mode_sees_a_fold_that_is_not_stored(backend: Backend, late: bool) -> None:
    """The row turns at a boundary, and its pending tokens go to the new slot; also where the host is told later."""
    settings = {"slots": 6, "max_requests": 1, "tracking": ms.Redirect(every=4), "tail": 4}
    mem = on(backend, layout(4), **settings, overlap=late, debug=True)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 4))
    first = mem.plan([row], 4, drafts=4)
    first.accepted.fill_(2)
    if not late:
        mem.accept(first, [2])
    second = mem.plan([row], 4, drafts=4)
    if late:
        mem.accept(first, [2], written=True)
    with pytest.raises(ms.ForwardFault, match="`write`"):
        mem.submit(second)


@pytest.mark.parametrize(("tokens", "drafts"), [(4, 4), (0, 0)])
@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:])
def test_T9_a_state_that_the_forward_must_copy_is_not_there_before_it(
    backend: Backend, strategy: str, tokens: int, drafts: int
) -> None:
    """The first step of a row stores the state that it reads from elsewhere, with no token more."""
    settings = {"slots": 8, "max_requests": 2, "tracking": STRATEGIES[strategy], "tail": 4, "direct_hits": True}
    mem = on(backend, layout(4), **settings, overlap=False)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 5))
    (state,) = mem.end([row], keep="handle")
    assert state is not None
    (row,) = mem.admit([ms.Request("b", resume=state)])
    assert mem.cancel(mem.plan([row], tokens, drafts=drafts), keep="handle") == [None]
    (row,) = mem.admit([ms.Request("c", resume=state)])
    step = mem.plan([row], tokens, drafts=drafts)
    (copy,) = mem.end([row], keep="handle")
    assert copy is not None and copy.length == 5
    with pytest.raises(ms.InvalidArgument, match="was handed out since its plan"):
        mem.cancel(step)
    mem.accept(step, [0])
    mem.drop([state, copy])
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("grid", [None, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T2_a_state_at_a_mark_has_its_length(
    backend: Backend, generator: torch.Generator, model: Model, strategy: str, grid: int | None
) -> None:
    """Where a step ends at a mark and its tokens stay in the tail, no state stands there."""
    settings = {"slots": 12, "max_requests": 1, "tracking": STRATEGIES[strategy], "tail": 4, "overlap": False}
    for marks in ([6], [5, 6], [4, 6, 7]):
        mem = on(backend, layout(4), **settings, grid=grid)
        walk = Walk(mem, model, generator, 4)
        (row,) = mem.admit([ms.Request("a", snapshot_at=marks)])
        length = 0
        for tokens, drafts in ((4, 0), (4, 2), (2, 1), (1, 0)):
            step = mem.plan([row], tokens, drafts=drafts)
            model.forward(mem, step, [[(0, length + t) for t in range(tokens)]])
            mem.accept(step, [tokens - drafts])
            length += tokens - drafts
            walk.keep(*mem.publish([row], keep="handle"), 0, length)
            walk.check()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T2_guesses_of_a_row_count_in_a_packed_batch(backend: Backend, strategy: str) -> None:
    """A grid that counts from the start of the packed batch: the chunk behind them begins at its token 4, not 1."""
    settings = {"slots": 12, "max_requests": 2, "tracking": STRATEGIES[strategy], "tail": 4, "overlap": False}
    mem = on(backend, layout(4), **settings, grid=4, packed=True)
    a, b = mem.admit([ms.Request("a"), ms.Request("b", snapshot_at=[8])])
    step = mem.plan([a, b], [4, 10], drafts=[3, 0])
    assert step.marked == 1 and step.marks.entry[0] == 1 and step.marks.offset[0] == 8


def kept_at(mem: ms.StateManager, length: int) -> ms.Snapshot:
    """A state of so many tokens."""
    (row,) = mem.admit([ms.Request("first")])
    mem.settle(mem.plan([row], length))
    (state,) = mem.end([row], keep="handle")
    assert state is not None and state.length == length
    return state


def test_T10_a_state_that_its_step_has_still_to_copy_is_not_there_without_it(backend: Backend) -> None:
    """The first step behind a snapshot, without a token in the state: it stores under the same length."""
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.Redirect(every=8), overlap=False, tail=4)
    state = kept_at(mem, 5)
    rows = mem.admit([ms.Request("a", resume=state)])
    step = mem.plan(rows, 3, drafts=3)
    assert step.read.tolist() != step.write.tolist() and step.cursor.store.tolist() == [0]
    assert mem.cancel(step, keep="handle") == [None]
    rows = mem.admit([ms.Request("b", resume=state)])
    step = mem.plan(rows, 3, drafts=3)
    (kept,) = mem.end(rows, keep="handle")
    assert kept is not None and kept.length == 5
    with pytest.raises(ms.InvalidArgument, match="was handed out since its plan"):
        mem.cancel(step)


def test_T11_no_state_arrives_in_a_row_with_tokens_in_its_tail(backend: Backend) -> None:
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.NoTracking(), overlap=False, tail=4)
    rows = mem.admit([ms.Request("a")])
    for accepted in (0, 2):
        mem.accept(mem.plan(rows, 3, drafts=3), [accepted])
    with pytest.raises(ms.InvalidArgument, match="has folded no token"):
        mem.device.arrived(rows, [5])


@pytest.mark.parametrize(("grid", "packed", "kept"), [(None, False, 5), (1, False, 7), (3, True, 6)])
def test_T12_the_end_of_a_step_that_goes_to_the_tail_is_no_mark(
    backend: Backend, grid: int | None, packed: bool, kept: int
) -> None:
    """Its state is in no slot, so one before it is kept. Packed, tokens of other rows count, rejected ones too."""
    mem = on(
        backend, layout(4), slots=9, max_requests=2, tracking=ms.Redirect(every=64), overlap=False, tail=4, grid=grid,
        packed=packed,
    )  # fmt: skip
    rows = mem.admit([ms.Request("a"), ms.Request("b", snapshot_at=[8])])
    mem.settle(mem.plan(rows, 5))
    step = mem.plan(rows, [2, 4], drafts=[2, 1])
    assert step.marked == (grid is not None) and step.after[1] == 8
    mem.accept(step, [0, 4])
    mem.settle(mem.plan(rows, 1))
    states = [state.length for state in mem.publish(rows, keep="handle") if state]
    assert states == [kept]
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("column", ["pending", "newest"])
def test_T13_an_audit_finds_tails_that_host_and_device_count_otherwise(backend: Backend, column: str) -> None:
    """Before and behind each call of a step, and where a row has ended."""
    settings = {"slots": 6, "max_requests": 2, "max_batch": 3, "tracking": ms.NoTracking(), "overlap": False}
    mem = on(backend, layout(4), **settings, tail=4)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for accepted in ([2, 3], [1, 1]):
        step = mem.plan([rows[1], None, rows[0]], 3, drafts=[2, 0, 3])
        mem.audit().raise_if_leaking()
        mem.accept(step, [accepted[1], 0, accepted[0]])
        mem.audit().raise_if_leaking()
    cells = getattr(mem._parts.registers.table, column)
    cells[rows[0].index] += 1
    (told,) = mem.audit().miscounts
    assert told.startswith(f"row {rows[0].index}: ") and mem.inspect().faults == [told]
    mem.end(rows[:1])
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:])
def test_T9_slots_that_are_missing_are_known_before_a_late_step(backend: Backend, strategy: str, accepted: int) -> None:
    """The row has a snapshot, and stands a token before the next boundary, at it, or behind it: nobody knows."""
    settings = {"slots": 5, "max_requests": 1, "tracking": STRATEGIES[strategy], "tail": 4, "overlap": True}
    mem = on(backend, layout(4), **settings)
    (row,) = mem.admit([ms.Request("a")])
    for n in (8, 7):
        mem.settle(mem.plan([row], n))
    mem.pool.claim(mem.free_slots)
    first = mem.plan([row], 4, drafts=4)
    first.accepted.fill_(accepted)
    missing = mem.shortfall([row], 4)
    mem.plan([row], 4, drafts=4)
    mem.accept(first, [accepted], written=True)
    assert mem.stats().degraded <= missing

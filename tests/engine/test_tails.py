"""Rows with tails: for any drafts, accepted tokens, kept states and forks, a state has the bits of plain decode."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.script import ALL, COPIED, Play, script
from tests.support.build import on
from tests.support.decode_case import same_bits
from tests.support.sampling import PROOF
from tests.support.tail_walk import STRATEGIES, WRONG, Model, Walk, layout

CHUNK = 80  # number of tokens between two comparisons
TOKENS = 100_000 if PROOF else 800
PLAIN = ms.StateLayout(layout(4).planes, layers=1)  # without rings: the caller keeps the drafts
TAILS = {"tail": 4, "page_size": 1, "tails": (False, True), "pages": 0, "pages_per_row": 0}
WAYS = {"strategy": ALL, "overlap": (False, True)}


@script(strategy=ALL, **TAILS, forward=({}, {"in_place": True}, {"overlap": True}), seed=(1, 2, 3))
def test_T2_T15_states_are_those_of_plain_decode_after_any_drafts(play: Play) -> None:
    """Without rings, the caller keeps the drafts itself: their steps store nothing, and steps of 0 tokens do."""
    chance, kept = Random(play.seed), []
    rows = play.admit(None, None, None)
    play.step(rows, [5, 9, 1])
    for _ in range(10):
        play.step(rows, 4, 4, accepted=[chance.randrange(5) for _ in rows])
        play.land()
        for _ in range(chance.randrange(3)):
            play.step(rows, 0)
        play.land()
        kept += play.publish(*rows, handles=True)
        play.drop(*kept[:-3])
        kept = kept[-3:]
    play.end(*rows, how="publish")
    play.reached("snapshots" if play.settings.strategy != "none" else "zeroed")


@script(**WAYS, **TAILS)
def test_T2_a_fork_has_the_pending_tokens_of_its_row(play: Play) -> None:
    (row,) = play.admit(None)
    play.step([row], 3)
    play.step([row], 4, 3, accepted=[3])
    play.land()
    (other,) = play.fork(row, "b")
    play.step([row, other], 2, [1, 2], accepted=[2, 0])
    play.step([other, row], [0, 1])
    play.land()
    play.end(row, other, how="publish")
    play.reached("snapshots" if play.settings.strategy != "none" else "zeroed")


@script(
    strategy=("ping-pong", "lazy", "redirect", COPIED),
    tail=9,
    tails=True,
    every=8,
    tokens=(2, 8),
    accepted=(1, 4, 6, 8, 9),
)
def test_T3_B33_a_boundary_that_accepted_tokens_cross_is_kept(play: Play) -> None:
    """Accepted tokens that stay below a boundary, or start on it, add no snapshot."""
    (row,) = play.admit(None)
    play.step([row], play.tokens)
    play.step([row], 9, 8, accepted=[play.accepted])
    while play.mem.info(row).pending:
        play.step([row], 0)
    play.publish(row, handles=True)
    for n in (3, 0, 9, 9, 5):
        play.step([row], 9, 9, accepted=[n])
        play.publish(row, handles=True)
    play.end(row, how="publish")
    play.reached("snapshots")


@script(**WAYS, tail=(1, 2, 4), tails=True, defer=(1, 3, 2))
def test_T16_a_deferred_step_stores_a_state_now_and_then(play: Play) -> None:
    (row,) = play.admit(None)
    for _ in range(9):
        play.step([row], defer=min(play.defer, 2 * play.settings.tail))
    for defer in (2, 0, 2, 1, 2):  # the batch stays the same
        play.step([row], defer=defer)
    play.land()
    play.step([row], 0, defer=2)  # a step of 0 tokens defers nothing
    play.land()
    play.end(row, how="publish")
    play.reached("snapshots" if play.settings.strategy != "none" else "zeroed")


@script(
    **WAYS,
    **TAILS,
    marks=((5,), (6,), (5, 6), (4, 6, 7)),
    forward=({}, {"grid": 1}, {"grid": 3, "packed": True}),
)
def test_T2_T10_T12_a_state_at_a_mark_has_its_length(play: Play) -> None:
    """If a step ends at a mark but its tokens stay in the tail, an earlier state is kept."""
    a, b = play.admit(None, None, snapshot_at=play.marks)
    play.step([a, b], [4, 5])
    play.step([a, b], [4, 2], [3, 2], accepted=[2, 0])
    play.step([b, a], [4, 2], [1, 1], accepted=[3, 2])
    play.step([a, b], 1)
    play.land()
    play.publish(a, b, handles=True)
    play.cancel(play.step([a, b], 2, 2, run=False), how="publish")


@script(strategy=ALL, overlap=True, **TAILS, last=(0, 1))
def test_T10_an_open_mark_goes_before_a_late_step_folds(play: Play) -> None:
    """The state stands at 13, and the device folds more tokens before the host knows how many."""
    (row,) = play.admit(None, snapshot_at=[16])
    play.step([row], 13)
    play.step([row], 2, 2, accepted=[2])
    play.step([row], 1, 1, accepted=[play.last])
    play.step([row], 2)
    play.land()
    play.publish(row, handles=True)
    if play.last and play.settings.strategy in ("ping-pong", "lazy"):
        play.reached("published")


@script(strategy=(*ALL, COPIED), **TAILS, late=({}, {"overlap": True}), first=(4, 0))
def test_T9_T10_a_state_that_its_step_has_still_to_copy_is_not_there_without_it(play: Play) -> None:
    """The first step of a resumed row copies the state to the row's slot, and adds no token."""
    (row,) = play.admit(None)
    play.step([row], 5)
    play.land()
    (snap,) = play.end(row, how="publish")
    (row,) = play.admit(None, resume=snap)
    play.cancel(play.step([row], play.first, play.first, run=False), how="publish")
    (row,) = play.admit(None, resume=snap)
    flight = play.step([row], play.first, play.first, accepted=[0], run=False)
    play.end(row, how="publish", land=False)
    play.cancel(flight)
    play.launch(flight)
    play.land()
    play.may_raise("InvalidArgument")


@script(strategy="redirect", every=8, **TAILS, late=({}, {"overlap": True}))
def test_T10_a_state_that_a_mark_has_taken_is_still_to_copy(play: Play) -> None:
    """The next plan gives the row's slot to the mark at the end of the chunk. The planned step reads it."""
    row, other = play.admit(None, None, snapshot_at=[5])
    play.step([row], 5)
    play.land()
    if play.settings.overlap:
        play.step([other], 2, 2, accepted=[0])
    flight = play.step([other, row], 2, 2, run=False)
    while len(play.machine.flights) > 1:
        play.settle(written=True)
    play.cancel(flight, how="publish")


@script(strategy=ALL, overlap=True, **TAILS, accepted=(0, 2, 4))
def test_T7_a_row_whose_length_is_not_told_yet_waits_for_it(play: Play) -> None:
    """Between a plan and the accept of the step before: which calls are refused, what is counted and what is freed."""
    a, b = play.admit(None, None)
    play.step([a, b], 3)
    play.land()
    play.step([a, b], 4, [4, 0], accepted=[play.accepted, 4])
    flight = play.step([a, b], [2, 1], [1, 0], run=False)
    play.end(a, how="release", land=False)
    play.publish(a, handles=True)
    play.cancel(flight)
    play.reached("InvalidArgument")
    (c,) = play.admit(None)
    play.settle()
    play.launch(flight)
    play.land()
    play.end(a, b, c, how="publish")


@script(
    strategy="redirect",
    overlap=True,
    slots=(3, 4, 5),
    reserve=(0, 2),
    tail=4,
    tails=(False, True),
    accepted=(0, 1, 4),
    others=(0, 1, 2),
    asked=(False, True),
)
def test_T9_a_late_step_holds_slots_back_and_returns_them(play: Play) -> None:
    """Whether the state at the boundary is kept depends on accepted tokens that the host does not know yet."""
    (row,) = play.admit(None)
    play.step([row], 4)
    play.land()
    play.step([row], 4, 4, accepted=[play.accepted])
    flight = play.step([row], 4, 4, accepted=[0], run=False)
    if play.asked:
        play.check()
    play.picture()
    play.admit(*[None] * play.others)
    play.settle()
    play.launch(flight)
    play.audit()
    play.land()
    play.check()
    play.may_raise("OutOfSlots")


@script(strategy=ALL, overlap=(False, True), **TAILS, told=("accepted", "not told", "dead"))
def test_T9_a_request_finds_nothing_of_the_one_before_it(play: Play) -> None:
    """A row ends while tokens are pending, before the host is told how many, or while only the device has them."""
    row, other = play.admit(None, None)
    flight = play.step([row, other], [4, 1], [4, 0], accepted=[3, 1], run=False)
    play.launch(flight)
    if play.told == "not told":
        play.end(row, how="release", land=False)
    play.settle(ended=[row] if play.told == "dead" else [], written=True)
    play.step([row if play.told == "accepted" else None, other], 1)
    play.land()
    if play.told != "not told":
        play.end(row, how="release")
    (row,) = play.admit(None)
    play.step([row, other], 2)
    play.audit()
    play.land()


@script(strategy=ALL, overlap=True, **TAILS, drafts=(0, 3), ended=(False, True))
def test_T7_T13_an_accept_confirms_the_step_behind_it(play: Play) -> None:
    """Like a settle, unless the row has ended before. An audit then asks for nothing in its tail."""
    a, b = play.admit(None, None)
    play.step([a, b], 4, play.drafts, accepted=[2, 2] if play.drafts else None)
    play.step([a, b], 4, 3, accepted=[3, 1], ended=[a] if play.ended else [])
    play.audit()
    play.settle(written=True)
    play.audit()
    play.step([b], 1)
    play.land()
    play.end(a, b, how="publish")


@script(strategy=ALL, overlap=True, **TAILS)
def test_T7_a_step_behind_a_cancelled_one_is_counted_already(play: Play) -> None:
    """The plan of the cancelled step has already counted the numbers in `step.accepted`, and overwritten them."""
    a, b = play.admit(None, None)
    play.step([a, None], 4, [3, 0], accepted=[2, 0])
    play.cancel(play.step([b], 1, run=False))
    play.audit()
    play.settle(written=True)
    play.step([a], 1)
    play.land()


@script(**WAYS, **TAILS)
def test_T4_T8_a_row_that_reads_no_token_folds_its_tail(play: Play) -> None:
    """A turn that ends inside of accepted tokens leaves the states of its last token and of a boundary among them.

    An engine that aborts a request between verify and accept does not know its accepted tokens.
    """
    a, b = play.admit(None, None)
    play.step([a, b], [3, 1])
    play.step([a, b], [4, 1], [3, 0], accepted=[4, 1])
    play.step([a, None, b], [0, 0, 1])
    play.step([a], 0)
    play.land()
    play.publish(a, handles=True)
    flight = play.step([b, a], [4, 2], [3, 1], accepted=[1, 2], run=False)
    play.launch(flight)
    play.end(b, how="release", land=False)
    flight.accepted[0] = 0
    play.land()
    play.end(a, how="publish")
    play.reached("snapshots" if play.settings.strategy != "none" else "zeroed")


@pytest.fixture
def model(backend: Backend, generator: torch.Generator) -> Model:
    return Model(backend, generator, WRONG + 1)


def made(backend: Backend, tracking: ms.Tracking | None = None, **more: Any) -> ms.StateManager:
    """Returns a manager whose rows have tails of 4 tokens."""
    usual = {"layout": layout(4), "slots": 6, "max_requests": 2, "overlap": False, "tail": 4}
    return on(backend, tracking=tracking or ms.NoTracking(), **usual | more)


KERNELS: dict[str, dict[str, Any]] = {
    "1": {"tail": 1}, "3": {"tail": 3}, "4": {"tail": 4}, "debug": {"tail": 3, "debug": True},
    "in place": {"tail": 4, "in_place": True}, "in part": {"tail": 4}, "int8": {"tail": 4}, "int16": {"tail": 4},
}  # fmt: skip
DTYPES = {"int8": torch.int8, "int16": torch.int16}


@pytest.mark.sample
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T2_T14_states_are_those_of_plain_decode(
    backend: Backend, generator: torch.Generator, strategy: str, kernel: str, overlap: bool
) -> None:
    """memstate copies for kernels that update one slot, and for planes that a step writes only in part."""
    tail, in_part = KERNELS[kernel]["tail"], kernel == "in part"
    model = Model(backend, generator, WRONG + 1, DTYPES.get(kernel, torch.float32))
    given = layout(tail, model.dtype)
    planes = [replace(plane, rewritten_each_step=not in_part) for plane in given.planes]
    settings = {"slots": 14, "max_requests": 5, "max_batch": 6, "tracking": STRATEGIES[strategy], "overlap": overlap}
    mem = on(backend, replace(given, planes=planes), **settings | KERNELS[kernel])
    assert mem.planes.rows is not None
    for planes in (mem.planes, mem.planes.rows) if kernel in "134" else (mem.planes.rows,):
        for plane in planes.values():
            plane.fill_(torch.nan)
    mem.device.scrub_null()
    Walk(mem, model, generator, tail).run(60 if backend.name == "reference" and kernel not in DTYPES else 12)


@pytest.mark.sample
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "redirect"])
def test_T15_windows_that_begin_at_the_state_are_committed_once(
    backend: Backend, generator: torch.Generator, model: Model, strategy: str
) -> None:
    """One launch replays all plans of 0 tokens: it advances a row's slot, and stores a boundary's state elsewhere."""
    settings = {"slots": 17, "max_requests": 3, "tracking": STRATEGIES[strategy], "overlap": False}
    mem = on(backend, ms.StateLayout(layout(4).planes, layers=1), **settings, forward=ms.Forward(tail=4))
    rows, kept, plane = mem.admit([ms.Request(text) for text in range(3)]), 0, mem.planes["ssm"][0]

    def known(text: int, length: int) -> torch.Tensor:
        return model.states["ssm"][text, length - 1]

    def commit(slots: Tensor, accept: Tensor, tracked: Tensor, steps: Tensor, before: list[int]) -> None:
        """Replays a window as FlashInfer does: the first token of the window follows the state in the slot."""
        for text, slot in enumerate(slots.tolist()):
            assert same_bits(plane[slot], known(text, before[text]))
            if tracked[text] > 0 and 0 <= steps[text] < accept[text]:
                plane[tracked[text]] = known(text, before[text] + int(steps[text]) + 1)
            plane[slot] = known(text, before[text] + int(accept[text]))

    step = mem.plan(rows, [5, 9, 1])
    for vector in (step.write, step.snapshot):
        for text, slot in enumerate(vector.tolist()):
            plane[slot] = known(text, [5, 9, 1][text]) if slot else plane[slot]
    mem.settle(step)
    for _ in range(12):
        before = [mem.info(row).length for row in rows]
        mem.accept(mem.plan(rows, 4, drafts=4), torch.randint(1, 5, (3,), generator=generator).tolist())
        slots, accept, tracked, steps = (torch.zeros(3, dtype=torch.int32, device=plane.device) for _ in range(4))
        while any(mem.info(row).pending for row in rows):
            step = mem.plan(rows, 0)
            assert not slots.any() or torch.equal(slots, step.write)
            slots, store = step.write.clone(), step.cursor.store.clamp(min=0)
            accept, here = accept + store, (store > 0) & (step.snapshot > 0)
            tracked, steps = torch.where(here, step.snapshot, tracked), torch.where(here, accept - 1, steps)
            mem.settle(step)
        commit(slots, accept, tracked, steps, before)
        states = mem.publish(rows, keep="handle")
        for text, state in enumerate(states):
            if state is not None:
                assert same_bits(plane[mem.device.read_slots([state]).wait()[0]], known(text, state.length))
        mem.drop(states)
        kept += sum(state is not None for state in states)
    assert (kept > 3) == (strategy != "none")


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ([[0, 2]], "nodes of 1 entries, step 1 has 2"),
        ([[0, 2], [-1, -1]], r"nodes \[0, 2\] of entry 0, .* 4 tokens, 3 of them accepted: expected as many"),
        ([[0, 3, 2], [-1, -1, -1]], r"nodes \[0, 3, 2\] of entry 0"),
        ([[-1, -1, -1], [0, 4, -1]], r"nodes \[0, 4, -1\] of entry 1"),
    ],
    ids=["a row", "short", "descending", "of no token"],
)
def test_T19_nodes_that_are_no_path_are_named(backend: Backend, nodes: list[list[int]], told: str) -> None:
    """Only debug mode finds the last three cases, since it reads the device. No state moves."""
    mem = made(backend, debug=True)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows, 3))
    step = mem.plan(rows, 4, drafts=3)
    step.accepted.copy_(torch.tensor([3, 2]))
    before = [plane.clone() for plane in mem.planes.rows.values()]  # type: ignore[union-attr]
    with pytest.raises(ms.InvalidArgument, match=rf"^keep_path: {told}"):
        mem.device.keep_path(torch.tensor(nodes, dtype=torch.int32))
    assert all(map(same_bits, before, mem.planes.rows.values()))  # type: ignore[union-attr]
    with pytest.raises(ms.InvalidArgument, match=r"^keep_path: nodes: expected on"):
        mem.device.keep_path(torch.zeros(2, 3, dtype=torch.int32, device="meta"))
    mem.device.keep_path(torch.tensor([[0, 1, 3], [0, 3, 0]], dtype=torch.int32))


@pytest.mark.parametrize("late", [False, True])
def test_T17_debug_mode_compares_what_was_written_with_what_accept_gets(backend: Backend, late: bool) -> None:
    """Rows that end are compared, too: `accept` gets the number of all accepted tokens of such a row, and `end` leaves
    out the tokens behind the end of the answer.
    """
    mem = made(backend, ms.PingPong(every=4), layout=PLAIN, overlap=True, debug=True)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows, 2))
    step = mem.plan(rows, 4, drafts=3)
    step.accepted.copy_(torch.tensor([3, 1]))
    if late:
        mem.plan(rows, 4, drafts=3)
    with pytest.raises(ms.InvalidArgument, match=r"accepted \[2, 1\] of step 1, and `step.accepted` has \[3, 1\]"):
        mem.accept(step, [2, 1], [True, False], written=True)
    mem.accept(step, [3, 1], [True, False], written=True)
    (state,) = mem.end(rows[:1], keep="handle", lengths=[4])
    assert state is None or state.length <= 4


@pytest.mark.parametrize("between", ["other rows", "a cancelled step", "nothing"])
def test_T17_whatever_is_planned_before_the_accept(backend: Backend, between: str) -> None:
    """The next plan overwrites `accepted` on the device. Before that, it refuses impossible numbers from a sampler."""
    mem = made(backend, layout=PLAIN, overlap=True, debug=True)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    step = mem.plan([a], 4, drafts=3)
    for rubbish in (0, -5, 10**6):
        step.accepted.fill_(rubbish)
        with pytest.raises(ms.InvalidArgument, match=r"has \[.*\] on the device: expected \[1\] to \[4\]"):
            mem.plan([b], 1)
    step.accepted.fill_(3)
    if between != "nothing":
        other = mem.plan([b], 1)
        if between == "a cancelled step":
            mem.cancel(other)
        with pytest.raises(ms.InvalidArgument, match=r"say written=True and give the same numbers|so the device has"):
            mem.accept(step, [2])
    for given in ([2], [1]):
        with pytest.raises(ms.InvalidArgument, match=r"`step.accepted` has \[3\] on the device"):
            mem.accept(step, given, written=True)
    mem.accept(step, [3], written=True)
    mem.audit().raise_if_leaking()
    with pytest.raises(ms.InvalidArgument, match=r"have \[5\] tokens with drafts"):
        mem.shortfall([a], 5, drafts=1)


def test_T4_refuses_what_no_step_with_drafts_can_be(backend: Backend) -> None:
    mem = made(backend, ms.Redirect(every=8))
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for defer in (9, -1, "2", True, 1.0):
        with pytest.raises(ms.InvalidArgument, match=f"defer={defer!r}: expected a whole number of tokens from 0 to 8"):
            mem.plan([None], defer=defer)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match=r"have \[5\] tokens with drafts: a step keeps at most 4"):
        mem.plan(rows, [5, 5], drafts=[0, 1])
    with pytest.raises(ms.InvalidArgument, match=r"drafts \[4, 3\] of \[3, 3\] tokens"):
        mem.plan(rows, 3, drafts=[4, 3])
    step = mem.plan(rows, 3, drafts=[1, 3])
    for accepted, why in (([1, 0], r"accepted\[0\]=1: expected 2 to 3"), ([2, 4], r"accepted\[1\]=4: expected 0 to 3")):
        with pytest.raises(ms.InvalidArgument, match=why):
            mem.accept(step, accepted)
    with pytest.raises(ms.InvalidArgument, match=r"has drafts: accept\(step, accepted\) settles it"):
        mem.settle(step)
    with pytest.raises(ms.InvalidArgument, match="written=1: expected True or False"):
        mem.accept(step, [2, 0], written=1)  # type: ignore[arg-type]
    mem.accept(step, [2, 0])
    with pytest.raises(ms.StaleHandle):
        mem.accept(step, [2, 0])
    assert [mem.info(row).length for row in rows] == [2, 0] == [mem.info(row).confirmed for row in rows]


def test_T7_refuses_what_a_late_step_forbids(backend: Backend) -> None:
    mem = made(backend, ms.Redirect(every=4), overlap=True)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows, 3))
    first = mem.plan(rows, 4, drafts=[3, 0])
    first.accepted.fill_(4)
    second = mem.plan(rows, [2, 1], drafts=[1, 0])
    for call in (
        lambda: mem.end(rows[:1]), lambda: mem.publish(rows[:1], keep="handle"), lambda: mem.cancel(second),
    ):  # fmt: skip
        with pytest.raises(ms.InvalidArgument, match="planned again before step 1 was accepted"):
            call()
    with pytest.raises(ms.InvalidArgument, match="write it there before that plan, and say written=True"):
        mem.accept(first, [4, 4])
    mem.accept(first, [4, 4], written=True)


def test_T5_refuses_settings_that_have_no_tails(backend: Backend) -> None:
    rings = [replace(plane, fill=None) for plane in layout(4).rows.planes]  # type: ignore[union-attr]
    with pytest.raises(ms.ConfigurationError, match=r"tail=5 with rings .* of fewer than 14 tokens"):
        made(backend, layout=replace(layout(4), rows=ms.StateLayout(rings, layers=1)), tail=5)
    with pytest.raises(ms.ConfigurationError, match="tail=-1: expected a whole number of tokens from 0"):
        ms.Forward(tail=-1)
    mem = made(backend, layout=PLAIN, tail=0, overlap=True)
    rows = mem.admit([ms.Request("a")])
    with pytest.raises(ms.InvalidArgument, match="drafts= and defer= need rows with tails"):
        mem.plan(rows, 2, drafts=1)
    with pytest.raises(ms.InvalidArgument, match="accept needs steps with drafts"):
        mem.accept(mem.plan(rows, 2), [2])
    with pytest.raises(ms.InvalidArgument, match=r"its rows have no tail; build the manager with Forward\(tail=\)"):
        _ = mem.plan(mem.admit([]), []).cursor


@pytest.mark.parametrize("late", [False, True])
def test_T2_debug_mode_sees_a_fold_that_is_not_stored(backend: Backend, late: bool) -> None:
    """At a boundary, pending tokens are folded into the row's new slot, even if the host learns their number later."""
    mem = made(backend, ms.Redirect(every=4), overlap=late, debug=True)
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


def test_T11_no_state_arrives_in_a_row_with_tokens_in_its_tail(backend: Backend) -> None:
    mem = made(backend)
    rows = mem.admit([ms.Request("a")])
    for accepted in (0, 2):
        mem.accept(mem.plan(rows, 3, drafts=3), [accepted])
    with pytest.raises(ms.InvalidArgument, match="has folded no token"):
        mem.device.arrived(rows, [5])


@pytest.mark.parametrize("column", ["pending", "newest"])
def test_T13_an_audit_finds_tails_that_host_and_device_count_otherwise(backend: Backend, column: str) -> None:
    """Audits run before and after each call of a step, and where a row has ended."""
    mem = made(backend, max_batch=3)
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
    """The row has a snapshot.

    The host does not know the row's length: it is below the next boundary, at this boundary or behind it.
    """
    mem = made(backend, STRATEGIES[strategy], slots=5, max_requests=1, overlap=True)
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


def test_T2_a_long_text_has_the_states_of_plain_decode(generator: torch.Generator) -> None:
    backend, chance = Backend("reference"), Random(int(torch.randint(0, 2**31, (1,), generator=generator)))
    tracking = ms.Redirect(every=64)
    mem = on(backend, layout(4), slots=4, max_requests=1, tracking=tracking, overlap=False, tail=4)
    (row,) = mem.admit([ms.Request("long")])
    plain = torch.zeros(2, *mem.planes["ssm"].shape[2:])  # slot 1 has the state of plain decode
    one = torch.ones(1, dtype=torch.int32)
    snapshots = 0
    for _ in range(TOKENS // CHUNK):
        model = Model(backend, generator, 2)
        where = {"read": one, "write": one, "snapshot": 0 * one, "tokens": CHUNK * one}
        text = {name: x[:1, :CHUNK] for name, x in model.inputs.items()}
        backend.gated_delta_step(**text, **model.weights, **where, state=plain)
        at = 0
        while at < CHUNK:
            drafts = min(3, CHUNK - at - 1)
            right = chance.randint(0, drafts)
            step = mem.plan([row], 1 + drafts, drafts=drafts, defer=chance.choice((0, 0, 4, 8)))
            model.forward(mem, step, [[(0 if t <= right else 1, at + t) for t in range(1 + drafts)]])
            mem.accept(step, [1 + right])
            at += 1 + right
        while mem.info(row).pending:
            step = mem.plan([row], 0)
            model.forward(mem, step, [[]])
            mem.settle(step)
        slot = int(mem.device.live_slots[row.index])
        assert same_bits(mem.planes["ssm"][0, slot], plain[1]), mem.info(row)
        snapshots = mem.stats().snapshots
    assert mem.info(row).length == TOKENS // CHUNK * CHUNK and snapshots >= TOKENS // 64 - 1
    mem.end([row])
    mem.audit().raise_if_leaking()

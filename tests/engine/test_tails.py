"""Rows with tails: for any drafts, accepted tokens, kept states and forks, a state has the bits of plain decode."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.decode_case import same_bits
from tests.support.tail_walk import STRATEGIES, WRONG, Model, Walk, layout


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
        "overlap": overlap,
        "tail": tail,
    }
    mem = on(backend, layout(tail), **settings)
    for planes in (mem.planes, mem.planes.rows):
        assert planes is not None
        for plane in planes.values():
            plane.fill_(torch.nan)
    mem.device.scrub_null()
    Walk(mem, model, generator, tail).run(60 if backend.name == "reference" else 12)


@pytest.mark.sample
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T15_other_kernels_keep_the_drafts_themselves(
    backend: Backend, generator: torch.Generator, model: Model, strategy: str, in_place: bool
) -> None:
    """Rows need no rings: a step of drafts alone stores nothing, and steps of 0 tokens store what was accepted.

    The caller keeps the state after each draft in a slot of the pool, and copies one of these slots.
    """
    settings = {"slots": 17, "max_requests": 3, "tracking": STRATEGIES[strategy], "overlap": False}
    plain, forward = ms.StateLayout(layout(4).planes, layers=1), ms.Forward(tail=4, in_place=in_place)
    mem = on(backend, plain, **settings, forward=forward)
    rows, kept = mem.admit([ms.Request(text) for text in range(3)]), list[tuple[int, ms.Snapshot]]()
    plane, chosen = mem.planes["ssm"][0], mem.pool.claim(3)

    def commit(step: ms.Step) -> None:
        """Advances the states of `read` into `write`, and into `snapshot` where memstate does not copy it."""
        for text, n in enumerate(step.cursor.store.tolist()):
            if n > 0:
                old, new = known(text, int(step.cursor.label[text])), known(text, int(step.cursor.label[text]) + n)
                assert same_bits(plane[(step.write if in_place else step.read)[text].long()], old)
                plane[chosen[text]] = new
        for vector in (step.write,) if in_place else (step.write, step.snapshot):
            mem.planes.copy(torch.where(step.cursor.store > 0, vector, 0), chosen.int())
        mem.settle(step)

    def known(text: int, length: int) -> torch.Tensor:
        return model.states[text, length - 1] if length else torch.zeros_like(model.states[text, 0])

    commit(mem.plan(rows, [5, 9, 1]))
    for _ in range(12):
        verified = mem.plan(rows, 4, drafts=4)
        assert verified.cursor.store.tolist() == [-1, -1, -1]
        mem.accept(verified, torch.randint(0, 5, (3,), generator=generator).tolist())
        while any(mem.info(row).pending for row in rows):
            commit(mem.plan(rows, 0))
        kept += [(text, state) for text, state in enumerate(mem.publish(rows, keep="handle")) if state is not None]
        if len(kept) > 3:
            mem.drop([state for _, state in kept[:-3]])
            kept = kept[-3:]
    kept += [(text, state) for text, state in enumerate(mem.end(rows, keep="handle")) if state is not None]
    slots = mem.device.read_slots([state for _, state in kept]).wait().tolist()
    assert len(kept) > 3 * (strategy != "none")
    for (text, state), slot in zip(kept, slots, strict=True):
        assert same_bits(plane[slot], known(text, state.length))
    mem.pool.release(chosen)
    mem.audit().raise_if_leaking()


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
        return model.states[text, length - 1]

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


def test_T2_a_fork_has_the_pending_tokens_of_its_row(backend: Backend) -> None:
    mem = on(backend, layout(4), slots=8, max_requests=3, tracking=ms.NoTracking(), overlap=False, tail=4)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 3))
    mem.accept(mem.plan([row], 4, drafts=3), [3])
    (other,) = mem.fork(row, ["b"]).rows
    assert [mem.info(each).pending for each in (row, other)] == [3, 3]
    assert mem.plan([row, other]).cursor.pending.tolist() == [3, 3]


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
    mem = on(backend, layout(4), slots=8, max_requests=2, tracking=ms.NoTracking(), overlap=False, tail=4, debug=True)
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
def test_T10_a_state_that_a_mark_has_taken_is_still_to_copy(backend: Backend, late: bool) -> None:
    """The next plan gives the row's slot to the mark at the end of the chunk. The planned step reads it."""
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.Redirect(every=8), overlap=late, tail=4)
    row, other = mem.admit([ms.Request("a", snapshot_at=[5]), ms.Request("b")])
    mem.settle(mem.plan([row], 5))
    first = mem.plan([other], 2, drafts=2) if late else None
    step = mem.plan([other, row], 2, drafts=2)
    assert step.cursor.store.tolist() == [-1, 0] and step.read[1] != step.write[1]
    if first is not None:
        mem.accept(first, [0], written=True)
    assert mem.cancel(step, keep="handle") == [None, None]
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("late", [False, True])
def test_T17_debug_mode_compares_what_was_written_with_what_accept_gets(backend: Backend, late: bool) -> None:
    """Rows that end are compared, too: `accept` gets the number of all accepted tokens of such a row, and `end` leaves
    out the tokens behind the end of the answer.
    """
    settings = {"slots": 6, "max_requests": 2, "tracking": ms.PingPong(every=4), "overlap": True, "tail": 4}
    mem = on(backend, ms.StateLayout(layout(4).planes, layers=1), **settings, debug=True)
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


def test_T16_each_step_says_what_it_defers(backend: Backend) -> None:
    """The batch stays the same, so only `defer` changes from step to step."""
    mem = on(backend, layout(4), slots=2, max_requests=1, tracking=ms.NoTracking(), overlap=False, tail=4)
    (row,) = mem.admit([ms.Request("a")])
    for defer, store in ((3, -1), (0, 2), (2, -1), (8, -1), (3, 3)):
        step = mem.plan([row], defer=defer)
        assert step.cursor.store.tolist() == [store]
        mem.settle(step)


@pytest.mark.parametrize("between", ["other rows", "a cancelled step", "nothing"])
def test_T17_whatever_is_planned_before_the_accept(backend: Backend, between: str) -> None:
    """The next plan overwrites `accepted` on the device. Before that, it refuses impossible numbers from a sampler."""
    settings = {"slots": 6, "max_requests": 2, "tracking": ms.NoTracking(), "overlap": True, "tail": 4}
    mem = on(backend, ms.StateLayout(layout(4).planes, layers=1), **settings, debug=True)
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


def test_T10_an_open_mark_goes_before_a_late_step_folds(backend: Backend) -> None:
    """The state stands at 13, and the device folds more tokens before the host knows how many."""
    settings = {"slots": 6, "max_requests": 2, "tracking": ms.NoTracking(), "overlap": True, "tail": 4}
    mem = on(backend, layout(4), **settings)
    (row,) = mem.admit([ms.Request("a", snapshot_at=[16])])
    mem.settle(mem.plan([row], 13))
    first = mem.plan([row], 2, drafts=2)
    first.accepted.fill_(2)
    second = mem.plan([row], 1, drafts=1)
    second.accepted.fill_(0)
    mem.accept(first, [2], written=True)
    mem.accept(second, [0], written=True)
    mem.settle(mem.plan([row], 2))
    mem.publish([row], keep="handle")
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("overlap", [False, True])
def test_T16_a_deferred_step_stores_a_state_now_and_then(
    backend: Backend, generator: torch.Generator, model: Model, strategy: str, overlap: bool
) -> None:
    """A state is stored after every third token and, except under NoTracking, at boundaries: every eighth token."""
    mem = on(backend, layout(2), slots=6, max_requests=1, tracking=STRATEGIES[strategy], overlap=overlap, tail=2)
    for defer in (5, -1, "2", True, 1.0):
        with pytest.raises(ms.InvalidArgument, match=f"defer={defer!r}: expected a whole number of tokens from 0 to 4"):
            mem.plan([None], defer=defer)  # type: ignore[arg-type]
    (row,) = mem.admit([ms.Request("a")])
    steps, stored = list[ms.Step](), list[int]()
    for n in range(20):
        step = mem.plan([row], defer=3)
        stored += [int(step.cursor.label) + int(step.cursor.store)] * (int(step.cursor.store) >= 0)
        out = model.forward(mem, step, [[(0, n)]])
        assert step.lengths.tolist() == [n] and same_bits(out[0, 0], model.outputs[0, n])
        steps.append(step)
        if len(steps) > overlap:
            mem.settle(steps.pop(0))
    assert stored == ([3, 6, 9, 12, 15, 18] if strategy == "none" else [3, 6, 8, 11, 14, 16, 19])
    for step in steps:
        mem.settle(step)
    assert (mem.info(row).length, mem.info(row).pending) == (20, 20 - stored[-1])
    step = mem.plan([row], 0, defer=3)  # a plan of 0 tokens defers nothing
    model.forward(mem, step, [[]])
    mem.settle(step)
    (state,) = mem.end([row], keep="handle")
    assert state is not None and state.length == 20
    (slot,) = mem.device.read_slots([state]).wait().tolist()
    assert same_bits(mem.planes["ssm"][0, slot], model.states[0, 19])


@pytest.mark.parametrize(("before", "accepted", "kept"), [(250, 8, 256), (250, 4, None), (250, 6, 256), (256, 1, 256)])
@pytest.mark.parametrize("strategy", [ms.PingPong(256), ms.LazyPingPong(256), ms.Redirect(256)], ids=repr)
def test_B33_a_boundary_that_accepted_tokens_cross_is_kept(
    backend: Backend, strategy: ms.Tracking, before: int, accepted: int, kept: int | None
) -> None:
    """Accepted tokens that stay below a boundary, or start on it, add no snapshot."""
    mem = on(backend, layout(9), slots=4, max_requests=1, tracking=strategy, overlap=False, tail=9)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], before))
    mem.accept(mem.plan([row], 9, drafts=8), [accepted])
    while mem.info(row).pending:
        mem.settle(mem.plan([row], 0))
    mem.settle(mem.plan([row], 1))
    (state,) = mem.publish([row], keep="handle")
    assert (state and state.length, mem.stats().snapshots) == (kept, kept is not None)


@pytest.mark.sample
@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_T14_states_that_memstate_copies_are_those_of_plain_decode(
    backend: Backend, generator: torch.Generator, model: Model, strategy: str, overlap: bool, partly: bool
) -> None:
    """memstate copies for kernels that update one slot, and for planes that a step writes only in part."""
    forward = ms.Forward(tail=4, in_place=not partly)
    planes = [replace(plane, rewritten_each_step=not partly) for plane in layout(4).planes]
    settings = {"slots": 14, "max_requests": 5, "max_batch": 6, "tracking": STRATEGIES[strategy]}
    mem = on(backend, replace(layout(4), planes=planes), **settings, overlap=overlap, forward=forward)
    Walk(mem, model, generator, 4).run(60 if backend.name == "reference" else 12)


@pytest.mark.parametrize("tail", [1, 4])
@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:])
def test_T3_a_boundary_among_accepted_tokens_is_kept(
    backend: Backend, generator: torch.Generator, strategy: str, tail: int
) -> None:
    """Whatever is accepted, the state of the newest boundary can be published once the next step has run."""
    mem = on(backend, layout(tail), slots=6, max_requests=1, tracking=STRATEGIES[strategy], overlap=False, tail=tail)
    (row,) = mem.admit([ms.Request("a")])
    for n in (5, 1):
        mem.settle(mem.plan([row], n))
    length, lengths = 6, set[int]()
    while length < 100:
        step = mem.plan([row], tail, drafts=tail)
        labels = step.label
        assert labels is not None and labels[0] + step.cursor.pending[0] == length
        accepted = int(torch.randint(0, tail + 1, (1,), generator=generator))
        mem.accept(step, [accepted])
        length += accepted
        (state,) = mem.publish([row], keep="handle")
        if state is not None:
            lengths.add(state.length)
            mem.drop([state])
    assert lengths >= set(range(8, 88, 8)) and all(at % 8 == 0 for at in lengths)


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
    with pytest.raises(ms.InvalidArgument, match=r"has drafts: accept\(step, accepted\) settles it"):
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
    rings = [replace(plane, fill=None) for plane in layout(4).rows.planes]  # type: ignore[union-attr]
    with pytest.raises(ms.ConfigurationError, match=r"tail=5 with rings .* of fewer than 14 tokens"):
        on(backend, replace(layout(4), rows=ms.StateLayout(rings, layers=1)), **settings, tail=5)
    with pytest.raises(ms.ConfigurationError, match="tail=-1: expected a whole number of tokens from 0"):
        ms.Forward(tail=-1)
    mem = on(backend, plain, **settings)
    rows = mem.admit([ms.Request("a")])
    with pytest.raises(ms.InvalidArgument, match="drafts= and defer= need rows with tails"):
        mem.plan(rows, 2, drafts=1)
    with pytest.raises(ms.InvalidArgument, match="accept needs steps with drafts"):
        mem.accept(mem.plan(rows, 2), [2])
    with pytest.raises(ms.InvalidArgument, match=r"its rows have no tail; build the manager with Forward\(tail=\)"):
        _ = mem.plan(mem.admit([]), []).cursor


def test_T7_a_row_whose_length_is_not_told_yet_waits_for_it(backend: Backend) -> None:
    """Between a plan and the accept of the step before: which calls are refused, what is counted and what is freed."""
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
    """A turn that ends in the middle of accepted tokens leaves two states: that of its last token, and that of a
    boundary among the accepted tokens.
    """
    mem = on(backend, layout(4), slots=6, max_requests=3, tracking=ms.Redirect(every=8), overlap=overlap, tail=4)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan([a, b], [5, 3]))
    mem.accept(mem.plan([a, b], [4, 1], drafts=[3, 0]), [4, 1])
    assert [mem.info(row).length for row in (a, b)] == [9, 4]
    step = mem.plan([a, None, b], [0, 0, 1])
    assert step.tokens.tolist() == [0, 0, 1] and step.cursor.pending.tolist() == [4, 0, 0]
    assert step.cursor.store.tolist() == [3, 0, 1] and step.lengths.tolist() == [9, 0, 4]
    assert [mem.info(row).pending for row in (a, b)] == [1, 0]
    mem.settle(step)
    step = mem.plan([a], 0)
    assert (step.label.tolist(), step.cursor.store.tolist(), mem.info(a).pending) == ([8], [1], 0)
    mem.settle(step)
    states = [*mem.publish([a], keep="handle"), *mem.end([a, b], keep="handle")]
    assert [state.length for state in states if state is not None] == [8, 9, 5]
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("accepted", [0, 4])
@pytest.mark.parametrize("others", [0, 2])
def test_T9_a_late_step_holds_slots_back_and_returns_them(backend: Backend, accepted: int, others: int) -> None:
    """The row stands at a boundary. Whether its state is kept depends on accepted tokens that the host does not know
    yet.

    Requests that are admitted before the accept get only slots beyond the reserve. The device has chosen earlier.
    """
    mem = on(backend, layout(4), slots=4, max_requests=4, tracking=ms.Redirect(every=4), reserve=2, tail=4)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 4))
    first = mem.plan([row], 4, drafts=4)
    first.accepted.fill_(accepted)
    mem.plan([row], 4, drafts=4)
    assert mem.free_slots == 2  # one of 3 slots is held back
    mem.admit([ms.Request(i) for i in range(others)])
    mem.accept(first, [accepted], written=True)
    assert mem.free_slots == 3 - others - (accepted > 0) and mem.stats().snapshots == (accepted > 0)
    mem.audit().raise_if_leaking()


def test_T9_a_request_finds_nothing_of_the_one_before_it(backend: Backend) -> None:
    """A row ends while tokens are pending, before the host is told how many were accepted, or while only the device has
    counted them. A new request in its place finds none of these tokens.
    """
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
    """The plan of the cancelled step has already counted the numbers in `step.accepted`, and overwritten them."""
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.NoTracking(), overlap=True, tail=4)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    first = mem.plan([a, None], 4, drafts=3)
    mem.cancel(mem.plan([b], 1))
    mem.audit().raise_if_leaking()
    with pytest.raises(ms.InvalidArgument, match="the next step was planned, so the device has counted"):
        mem.accept(first, [4, 0])
    mem.accept(first, [1, 0])
    mem.audit().raise_if_leaking()
    step = mem.plan([a], 1)
    assert step.before.tolist() == [1] == step.lengths.tolist()


@pytest.mark.parametrize("drafts", [0, 3])
def test_T7_an_accept_confirms_the_step_behind_it(backend: Backend, drafts: int) -> None:
    """Like a settle, an accept confirms the certain tokens of the next step, unless the row has ended before."""
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.NoTracking(), overlap=True, tail=4)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    first = mem.plan(rows, 4, drafts=drafts)
    first.accepted.fill_(n := 2 if drafts else 4)
    mem.plan(rows, 1)
    mem.accept(first, [n, n], finished=[True, False], written=True)
    assert [mem.info(row).confirmed for row in rows] == [n, n + 1]
    (state,) = mem.end(rows[1:], keep="handle")
    assert state is not None and state.length == n + 1


def test_T4_a_row_that_has_ended_needs_no_accepted_tokens(backend: Backend) -> None:
    """An engine that aborts a request between verify and accept does not know its accepted tokens."""
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
    """The device's count of free slots includes its claims for the step; the host does not know their number yet."""
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
    """At a boundary, pending tokens are folded into the row's new slot, even if the host learns their number later."""
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
    """The first step of a resumed row copies the snapshot's state to the row's slot, and adds no token."""
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
    """If a step ends at a mark but its tokens stay in the tail, no state is kept at this mark."""
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
    """The grid counts from the start of the packed batch: b's chunk begins at token 4, behind the drafts of a."""
    settings = {"slots": 12, "max_requests": 2, "tracking": STRATEGIES[strategy], "tail": 4, "overlap": False}
    mem = on(backend, layout(4), **settings, grid=4, packed=True)
    a, b = mem.admit([ms.Request("a"), ms.Request("b", snapshot_at=[8])])
    step = mem.plan([a, b], [4, 10], drafts=[3, 0])
    assert step.marked == 1 and step.marks.entry[0] == 1 and step.marks.offset[0] == 8


def kept_at(mem: ms.StateManager, length: int) -> ms.Snapshot:
    """Returns a snapshot of this length."""
    (row,) = mem.admit([ms.Request("first")])
    mem.settle(mem.plan([row], length))
    (state,) = mem.end([row], keep="handle")
    assert state is not None and state.length == length
    return state


def test_T10_a_state_that_its_step_has_still_to_copy_is_not_there_without_it(backend: Backend) -> None:
    """The first step after a snapshot folds no token, so it stores the state under the same length."""
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
    """No slot holds the state at the end of the step, so an earlier state is kept.

    In a packed batch, the grid counts the tokens of all rows.
    """
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
    """Audits run before and after each call of a step, and where a row has ended."""
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


def test_T13_an_audit_asks_for_nothing_in_the_tail_of_a_row_that_has_ended(backend: Backend) -> None:
    """The row ended in the step before. Only the device counts tokens that the next step has put in its tail."""
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.NoTracking(), overlap=True, tail=4)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    first = mem.plan([a, b], 1)
    second = mem.plan([a, b], 4, drafts=3)
    second.accepted.fill_(3)
    mem.settle(first, [True, False])
    mem.audit().raise_if_leaking()
    mem.accept(second, [0, 3], written=True)
    mem.audit().raise_if_leaking()
    mem.settle(mem.plan([b], 1))
    mem.audit().raise_if_leaking()
    (state,) = mem.end([a], keep="handle")
    assert state is not None and state.length == 1


def test_T8_a_picture_names_the_registers_of_a_late_step(backend: Backend) -> None:
    """The picture also names the lane that only the device knows of."""
    mem = on(backend, layout(4), slots=6, max_requests=2, tracking=ms.Redirect(every=4), overlap=True, tail=4)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 4))
    first = mem.plan([row], 4, drafts=4)
    first.accepted.fill_(1)
    mem.plan([row], 4, drafts=4)
    assert [*mem.inspect().names.values()] == ["row 1 (request 'a') live", "row 1 (request 'a') lane 0"]


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("strategy", list(STRATEGIES)[1:])
def test_T9_slots_that_are_missing_are_known_before_a_late_step(backend: Backend, strategy: str, accepted: int) -> None:
    """The row has a snapshot.

    The host does not know the row's length: it is below the next boundary, at this boundary or behind it.
    """
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

"""Tests spans of owners against a model and real managers, colours of kinds, and the timeline, a bar for each span."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

import memstate as ms
from memstate import viz
from memstate.prefix.policies import Lru
from memstate.requests import holdings
from memstate.sheet import SLOT_KINDS
from memstate.slots.journal import Change
from memstate.viz import OwnerSpan, kinds
from memstate.viz.owners import group_of
from memstate.viz.tracks import bounds, sorted_lines
from tests.support.build import build
from tests.support.refusals import refusals
from tests.support.scene import busy

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), 1)
A, B = "row 1 (request 'a')", "row 2 (request 'b')"


def change(serial: int, submit: int, what: str, register: int, kind: str, owner: str, label: int = 0, **more: Any):
    return Change(serial, submit, what, register, kind, owner, label, **more)


CLAIM = change(1, 1, "claim", 3, "live", f"{A} live")
MOVE = change(2, 2, "move", 12, "mark", "row 1 (every of 4 tokens)", 4, source=3, source_owner=f"{A} live")
AGAIN = change(3, 2, "claim", 3, "live", f"{A} live")
PLAN = change(4, 2, "plan", 4, "lane", f"{A} lane 0", 8)
CACHED = change(5, 3, "move", 13, "cached", "cached prefix of 8 tokens in register 13", 8, source=4,
                source_owner=f"{A} lane 0")  # fmt: skip
GONE = change(6, 4, "release", 12, "cached", "cached prefix of 4 tokens in register 12", 4)
END = change(7, 5, "release", 3, "live", f"{A} live", 9)
STORY = [CLAIM, MOVE, AGAIN, PLAN, CACHED, GONE, END]


def test_spans_of_a_story_by_hand() -> None:
    assert viz.holdings_over(STORY) == [
        OwnerSpan(3, "live", f"{A} live", A, 4, 1, 2, "claim", "move", target=12, serials=(1, 2)),
        OwnerSpan(12, "cached", GONE.owner, "prefix cache", 4, 2, 4, "move", "release", source=3,
             serials=(2, 6)),
        OwnerSpan(3, "live", f"{A} live", A, 9, 2, 5, "claim", "release", serials=(3, 7)),
        OwnerSpan(4, "lane", f"{A} lane 0", A, 8, 2, 3, "plan", "move", target=13, serials=(4, 5)),
        OwnerSpan(13, "cached", CACHED.owner, "prefix cache", 8, 3, None, "move", source=4,
             serials=(5, 5)),
    ]  # fmt: skip
    assert viz.holdings_over([asdict(each) for each in STORY]) == viz.holdings_over(STORY)
    assert viz.holdings_over([]) == []


def test_a_journal_that_begins_in_the_middle_has_spans_without_a_begin() -> None:
    assert viz.holdings_over([END]) == [OwnerSpan(3, "live", f"{A} live", A, 9, None, 5, "", "release", serials=(7, 7))]
    source, target = viz.holdings_over([CACHED])
    assert (source.register, source.kind, source.group, source.begin, source.end) == (4, "lane", A, None, 3)
    assert (target.register, target.begin, target.end, source.target, target.source) == (13, 3, None, 13, 4)
    ended, _ = viz.holdings_over([replace(PLAN, label=0), PLAN])  # one plan empties the register, the next one fills it
    assert (ended.begin, ended.end, ended.emptied) == (None, 2, "plan")


def test_a_register_that_is_filled_twice_was_emptied_unseen() -> None:
    """`reset` empties registers without a change in the journal."""
    first, second = viz.holdings_over([CLAIM, replace(CLAIM, serial=2, submit=6, owner=f"{B} live")])
    assert (first.begin, first.end, first.emptied, second.begin, second.end) == (1, 6, "", 6, None)


@pytest.mark.parametrize(
    ("kind", "owner", "group"),
    [
        ("live", f"{A} live", A),
        ("lane", f"{A} lane 1", A),
        ("live", "row 1 (request ') live\\n') live", "row 1 (request ') live\\n')"),
        ("mark", "row 1 (prompt of 8 tokens)", "the request there"),
        ("mark", "row 2 (prompt of 8 tokens)", "row 2"),
        ("session", "session 'x (3 tokens)' (9 tokens)", "session 'x (3 tokens)'"),
        ("cached", "cached prefix of 8 tokens in register 13", "prefix cache"),
        ("snapshot", "snapshot 14 of 8 tokens", "snapshots"),
        ("snapshot", "holder 14 (given up)", "snapshots"),
        ("unknown", "register 14", "unknown"),
        ("later", "something", "something"),
    ],
)
def test_groups_of_owners(kind: str, owner: str, group: str) -> None:
    assert group_of(kind, owner, {"row 1": "the request there"}) == group


def test_a_name_that_says_nothing_does_not_replace_one() -> None:
    (span,) = viz.holdings_over([replace(CACHED, what="claim", source=0), replace(
        END, register=13, kind="snapshot", owner="holder 13 (given up)")])  # fmt: skip
    assert (span.kind, span.owner, span.end) == ("cached", CACHED.owner, 5)


test_what_is_no_list_of_changes_is_refused = refusals(
    ms.InvalidArgument,
    *((wrong, r"expected `mem\.journal\.changes`") for wrong in (7, "ab", [1], [{"serial": 1}], {"serial": 1}, None)),
    call=viz.holdings_over,
)


@st.composite
def journals(draw: st.DrawFn) -> list[tuple[Change, dict[int, int]]]:
    """Draws random changes of eight registers, each with the state after it: register -> serial of its fill."""
    held: dict[int, int] = {}
    story, submit = [], 1
    for serial in range(1, draw(st.integers(1, 25)) + 1):
        submit += draw(st.integers(0, 2))
        empty, full = sorted(set(range(3, 11)) - held.keys()), sorted(held)
        what = draw(st.sampled_from(["claim", "plan", "accept"] * bool(empty) + ["release"] * bool(full)
                                    + ["move"] * bool(full and empty)))  # fmt: skip
        register, source = draw(st.sampled_from(full if what == "release" else empty)), 0
        if what == "move":
            held.pop(source := draw(st.sampled_from(full)))
        if what == "release":
            held.pop(register)
        else:
            held[register] = serial
        name = f"row {register} (request '{register}') live"
        noted = change(serial, submit, what, register, "live", name, serial, source=source,
                       source_owner=f"row {source} (request '{source}') live" * bool(source))  # fmt: skip
        story.append((noted, dict(held)))
    return story


@given(journals(), st.integers(0, 24))
def test_spans_agree_with_a_model_wherever_the_journal_begins(story: Any, cut: int) -> None:
    cut = min(cut, len(story) - 1)
    known, before = story[cut:], story[cut - 1][1] if cut else {}
    spans = viz.holdings_over([each for each, _ in known])
    touched = {register for each, _ in known for register in (each.register, each.source)}
    for at, (noted, held) in enumerate(known):
        open_now = {
            span.register: span.serials[0]
            for span in spans
            if (span.begin is None or span.serials[0] <= noted.serial)
            and (span.end is None or span.serials[1] > noted.serial)
        }
        expected = {register: serial for register, serial in held.items() if register in touched}
        later = {each.register for each, _ in known[at + 1 :]} | {each.source for each, _ in known[at + 1 :]}
        old = {register for register in expected if expected[register] <= cut}
        assert open_now.keys() == expected.keys() and old <= later | before.keys()
        assert all(open_now[register] == expected[register] for register in expected.keys() - old)
    for span in spans:
        assert span.begin is None or span.end is None or span.begin <= span.end
        assert (span.begin is None) == (span.filled == "")


def served(journal: int, tracking: ms.Tracking, seed: int) -> Iterator[ms.StateManager]:
    """Yields the manager after each call of a loop with prompts, a cache, sessions, forks, snapshots and aborts."""
    rng = random.Random(seed)
    mem = build(
        LAYOUT, slots=24, max_requests=3, snapshots=16, page_size=4, journal=journal, tracking=tracking,
        prefix=ms.Prefix(states=Lru()), backend="reference",
    )  # fmt: skip
    session = mem.sessions.open("chat")
    for turn in range(8):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        rows = mem.admit([ms.Request(f"r{turn}", tokens=prompt, session=session if turn % 3 == 1 else None)])
        yield mem
        while (length := mem.info(rows[0]).length) < len(prompt):
            mem.settle(mem.plan(rows, [min(mem.info(rows[0]).next_boundary, len(prompt)) - length]))
        for _ in range(rng.randrange(6)):
            mem.extend(rows, [mem.info(rows[0]).length + 1])
            mem.settle(mem.plan(rows, 1))
            yield mem
        mem.end(rows) if turn % 4 == 3 else mem.end(rows, keep="cache", lengths=[len(prompt)], tokens=[prompt])
        yield mem
    mem.sessions.close(session)
    yield mem


TRACKINGS = [ms.Redirect(4), ms.PingPong(4), ms.LazyPingPong(4)]


@pytest.mark.parametrize("tracking", TRACKINGS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("journal", [1, 5, 1000])
def test_spans_of_a_running_manager_end_where_its_registers_are(tracking: ms.Tracking, journal: int) -> None:
    for mem in served(journal, tracking, seed=journal):
        before = mem.stats()
        owners, spans = mem._reports.owners(), viz.holdings_over(mem.journal.changes)
        held = {span.register: span for span in spans if span.end is None}
        assert held.keys() <= owners.keys() and mem.stats() == before
        assert journal < 1000 or held.keys() == owners.keys()
        seen = mem.inspect()
        now = {span.register: (span.kind, span.owner) for span in viz.holdings_over(seen) if span.end is None}
        assert now == owners
        shown = {part.kind: part.size for part in mem.sheet().bars[0].parts}
        assert shown == Counter(kind for kind, _ in viz.holdings(seen))
        rows = {f"row {row['row']} (request {row['id']!r})" for row in seen.rows}
        assert {span.group for span in viz.holdings_over(seen) if span.end is None} <= {
            *rows, "prefix cache", "snapshots", "session 'chat'",
        }  # fmt: skip


def test_a_plan_is_noted_with_the_packet_that_goes_with_it() -> None:
    """One packet admits a row and carries the batch of a plan; in this plan another row takes a snapshot."""
    mem = build(LAYOUT, slots=8, max_requests=3, journal=20, tracking=ms.Redirect(4), backend="reference")
    (a,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([a], [4]))
    (b,) = mem.admit([ms.Request("b")])
    mem.plan([a, b])
    assert [(each.what, each.submit) for each in mem.journal.changes] == [("claim", 1), ("claim", 2), ("plan", 2)]


def test_spans_end_with_a_reset() -> None:
    *_, mem = served(1000, ms.Redirect(4), seed=1)
    mem.recover(keep=False)
    assert {span.end is None for span in viz.holdings_over(mem.journal.changes)} == {True, False}
    spans = viz.holdings_over(mem.inspect())
    assert all(span.end is not None for span in spans) and any(span.emptied == "" for span in spans)


# Kinds


def test_every_kind_of_an_inspection_and_of_holdings_has_a_colour() -> None:
    owners = {*holdings.KINDS, "live", "lane", "unknown"} - {"leaving"}  # a leaving register is drawn as a snapshot
    named = {*owners, "free", "by id", "leaked", "contested"}
    assert set(kinds.KINDS) == named == set(SLOT_KINDS) and all(kinds.kind(name).name == name for name in named)
    assert kinds.kind("group").name == "by id" and kinds.kind("later").name == "unknown"


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of two colours, as WCAG 2 defines it."""
    low, high = sorted(float(linear(each) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (high + 0.05) / (low + 0.05)


CAPACITY = ("planes", "tables", "KV pages", "staging of tiers")  # parts of the bar in the sheet of a capacity


def test_text_and_cells_can_be_read() -> None:
    for kind in (*kinds.KINDS.values(), *map(kinds.kind, CAPACITY)):
        assert contrast(kind.ink, kind.colour) >= 4.5, kind
        if kind.name != "free":
            assert min(contrast(kind.colour, page) for page in ("#ffffff", "#161616")) >= 1.5, kind


def test_short_names_keep_what_tells_them_apart() -> None:
    assert [kinds.short(name, 6) for name in ("a", "@4096", "requests", "conversation-17")] == [
        "a", "@4096", "..ests", "..n-17",
    ]  # fmt: skip
    assert kinds.short("x" * 1_000_000, 5) == "..xxx"


# -- the timeline ---------------------------------------------------------------------------------


DOLLARS = "row 2 (request '$b$')"
DRAWN = [
    Change(4, 2, "release", 9, "snapshot", "snapshot 9 of 4 tokens", 4),  # its claim came before the journal began
    Change(5, 2, "claim", 3, "live", f"{A} live", 0),
    Change(6, 6, "move", 12, "cached", "cached prefix of 8 tokens in register 12", 8, 3, f"{A} live"),
    Change(7, 6, "claim", 6, "live", f"{DOLLARS} live", 0),
    Change(8, 10, "release", 6, "live", f"{DOLLARS} live", 123_456),
]


def test_bars_and_edges_of_a_story_by_hand() -> None:
    (axes,) = viz.timeline(DRAWN).axes
    first, last = bounds(viz.holdings_over(DRAWN))
    assert first == 2 - 0.5 and last == 10 + 0.5  # one span began before the journal, and one goes on after it
    bars = {round(bar.get_y() + 0.36): (bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches}
    assert bars == {0: (2, 6), 1: (6, 10), 2: (first, 2), 3: (6, last)}
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        f"{A}   3", r"row 2 (request '\$b\$')   6", "snapshots   9", "prefix cache   12",
    ]  # fmt: skip
    assert [text.get_text() for text in axes.texts] == ["4", "8", "8", "123,456"]
    upright = [line for line in axes.lines if len(set(line.get_xdata())) == 1]
    edges = sorted((float(line.get_xdata()[0]), round(float(sum(line.get_ydata())) / 2)) for line in upright
                   if abs(line.get_ydata()[1] - line.get_ydata()[0]) < 1)  # fmt: skip
    assert edges == [(2, 0), (2, 2), (6, 0), (6, 1), (6, 3), (10, 1)]  # an open end has no edge
    joined = [line for line in upright if list(line.get_ydata()) == [0, 3]]
    assert len(joined) == 1 and joined[0].get_xdata()[0] == 6  # the move from register 3 to 12


@pytest.mark.parametrize("journal", [100, 12])
def test_the_timeline_of_a_running_manager_has_every_span(journal: int) -> None:
    mem, _kept = busy(journal=journal)
    for source in (mem.journal.changes, mem.inspect()):
        before, spans = mem.stats(), viz.holdings_over(source)
        drawn = viz.timeline(source)
        (axes,) = drawn.axes
        assert mem.stats() == before and len(axes.patches) == len(spans) > 5
        place = {line: at for at, line in enumerate(sorted_lines(spans))}
        first, last = bounds(spans)
        for span, bar in zip(spans, axes.patches, strict=True):
            assert to_hex(bar.get_facecolor()) == kinds.kind(span.kind).colour
            assert round(bar.get_y() + 0.36) == place[span.group, span.register]
            assert bar.get_x() == pytest.approx(first if span.begin is None else span.begin)
            end = last if span.end is None else span.end
            assert bar.get_x() + bar.get_width() == pytest.approx(end, abs=0.0041 * (last - first))
        assert [text.get_text() for text in drawn.legends[0].get_texts()] == [
            kind for kind in kinds.KINDS if kind in {span.kind for span in spans}
        ]


test_what_cannot_be_drawn_is_refused = refusals(
    ms.InvalidArgument,
    ([], "timeline: no changes to draw: no slot had an owner yet, or the manager has no journal"),
    ([Change(at, 1, "claim", at, "live", "x", 0) for at in range(1, 202)], "timeline: 201 registers of 201 spans"),
    ("ab", "expected `mem.journal.changes`"),
    call=viz.timeline,
)


def test_a_span_of_one_packet_is_seen() -> None:
    (axes,) = viz.timeline([*DRAWN, Change(9, 100, "claim", 3, "live", f"{A} live", 0),
                            Change(10, 100, "release", 3, "live", f"{A} live", 0)]).axes  # fmt: skip
    assert all(bar.get_width() > 0 for bar in axes.patches)
    assert bounds([OwnerSpan(3, "live", "x", "x", 0, 5, 5)]) == (5, 5.5)


@pytest.mark.parametrize("packets", [1, 2, 3])
def test_packets_are_whole_numbers_where_there_are_few(packets: int) -> None:
    few = [Change(at, at, "claim", at + 2, "live", f"row {at} (request {at}) live", 0) for at in range(1, packets + 1)]
    drawn = viz.timeline(few)
    (axes,) = drawn.axes
    low, high = axes.get_xlim()
    seen = [at for at in axes.get_xticks() if low <= at <= high]
    assert seen == list(range(1, packets + 1))

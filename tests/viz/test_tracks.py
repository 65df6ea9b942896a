"""Tests the timeline: each span has its bar at the right place, and there is no other bar."""

from typing import Any

import pytest
from matplotlib.colors import to_hex

import memstate as ms
from memstate import viz
from memstate.slots.journal import Change
from memstate.viz import OwnerSpan, kinds
from memstate.viz.tracks import bounds, sorted_lines
from tests.support.scene import busy

A, B = "row 1 (request 'a')", "row 2 (request '$b$')"
STORY = [
    Change(4, 2, "release", 9, "snapshot", "snapshot 9 of 4 tokens", 4),  # its claim came before the journal began
    Change(5, 2, "claim", 3, "live", f"{A} live", 0),
    Change(6, 6, "move", 12, "cached", "cached prefix of 8 tokens in register 12", 8, 3, f"{A} live"),
    Change(7, 6, "claim", 6, "live", f"{B} live", 0),
    Change(8, 10, "release", 6, "live", f"{B} live", 123_456),
]


def test_bars_and_edges_of_a_story_by_hand() -> None:
    (axes,) = viz.timeline(STORY).axes
    first, last = bounds(viz.holdings_over(STORY))
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "timeline: no changes to draw: no slot had an owner yet, or the manager has no journal"),
        ([Change(at, 1, "claim", at, "live", "x", 0) for at in range(1, 202)], "timeline: 201 registers of 201 spans"),
        ("ab", "expected `mem.journal.changes`"),
    ],
    ids=["none", "many", "text"],
)
def test_bad_input_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ms.InvalidArgument, match=message):
        viz.timeline(changes)


def test_a_span_of_one_packet_is_seen() -> None:
    (axes,) = viz.timeline([*STORY, Change(9, 100, "claim", 3, "live", f"{A} live", 0),
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

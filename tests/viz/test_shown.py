"""Tests the pages and texts of objects in notebooks and terminals: figures, sizes, hostile names, no device waits."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from rich.console import Console

import memstate as ms
from memstate import viz
from memstate.prefix.policies import Lru
from memstate.sheet import Bar, BarPart, Sheet, SheetSection, Table, section
from memstate.slots.inspect import Inspection
from memstate.viz import kinds
from memstate.viz.text import widths
from tests.support.build import build
from tests.support.scene import LAYOUT, PROMPT, busy, faulty

ROOT = Path(__file__).parents[2]
MOST = 20_000  # characters of a page
TAGS = {"div", "style", "strong", "ul", "li", "i", "span", "details", "summary", "table", "tr", "th", "td"}
# methods of tensors that wait for a GPU
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "nonzero", "to", "__iter__")
HOSTILE = "<script>alert('x')</script>\"&\x00\x1b[31m\ud800\u202e]]>--\n"


def shown(mem: ms.StateManager) -> dict[str, Any]:
    """Returns class name -> an object that has a page and can be shown without a wait for the device."""
    stats = mem.stats()
    return {
        "StateManager": mem, "Planes": mem.planes, "StateLayout": mem.layout, "PrefixCache": mem.prefix,
        "TierManager": mem.tiers, "Stats": stats, "PrefixStats": stats.prefix,
        "TierStats": stats.tiers, "PrefetchStats": ms.stats.PrefetchStats(started=3, flaws={"cut": 2}),
        "ChaosStats": ms.stats.ChaosStats(polls=1),
    }  # fmt: skip


def words(each: Any) -> list[str]:
    """Returns the texts of an object's page without its style; checks that the page is safe and well-formed."""
    page = each._repr_html_()
    root = ElementTree.fromstring(page)
    tags = {node.tag for node in root.iter()}
    assert tags <= TAGS
    assert not any(name.startswith("on") or name in ("src", "href") for node in root.iter() for name in node.attrib)
    assert "url(" not in page and len(page) < MOST
    kept = TAGS - {"style", "i", "span"}
    return [text for node in root.iter() if node.tag in kept and (text := "".join(node.itertext()))]


def printed(each: Any, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(each)
    return out.getvalue()


def moments() -> Iterator[tuple[str, ms.StateManager]]:
    """Yields (situation, manager) for every situation in which a manager can be shown."""
    mem, _kept = busy()
    yield "running", mem
    (row,) = mem.admit([ms.Request("open")])
    step = mem.plan([row], 1)
    yield "planned", mem
    mem.settle(step)
    mem.device.sleep()
    yield "asleep", mem
    mem.device.wake()
    mem.close()
    yield "closed", mem
    mem._parts.guard.call = "admit"  # an exception inside of `admit` leaves the guard in this state
    yield "broken", mem


def test_showing_launches_nothing_and_waits_for_nothing() -> None:
    for name, mem in moments():
        objects = shown(mem)
        before, launches = mem.stats(), dict(mem.backend.counts.launches)
        with pytest.MonkeyPatch.context() as patch:
            for what in READS:
                patch.setattr(torch.Tensor, what, None)
            for each in objects.values():
                assert "\n" not in repr(each) and len(words(each)) > 0 and printed(each)
        assert mem.stats() == before and dict(mem.backend.counts.launches) == launches, name


def test_a_page_of_what_waited_before_does_not_wait_again() -> None:
    mem, _kept = busy()
    objects = (mem.inspect(), mem.audit(), mem.match(PROMPT), ms.capacity("qwen3_next", "40GiB", context="32k"))
    before = mem.stats()
    for each in objects:
        assert words(each) and printed(each) and "\n" not in repr(each)
    assert mem.stats() == before


@pytest.mark.parametrize(
    ("name", "part"),
    [("asleep", "The states sleep: their memory is released."), ("broken", "admit was interrupted: call recover()")],
)
def test_a_manager_says_that_it_sleeps_or_is_broken(name: str, part: str) -> None:
    for now, mem in moments():
        assert any(part in text for text in words(mem)) == (now == name)
        assert (part in " ".join(printed(mem).split())) == (now == name)


def test_tiers_say_that_they_are_closed() -> None:
    mem, _kept = busy()
    closed = "Closed: nothing is loaded or saved any more."
    assert closed not in words(mem.tiers)
    mem.close()
    assert closed in words(mem.tiers)


def legend(each: Any) -> dict[str, str]:
    """Returns name -> text of all parts of an object's bars."""
    return {part.name: part.text for bar in each.sheet().bars for part in bar.parts}


def test_a_manager_shows_slots_bytes_tokens_and_records() -> None:
    mem, _kept = busy()
    titles = [bar.title for bar in mem.sheet().bars]
    whole = mem.planes.nbytes + sum(part.size for part in mem.sheet().bars[1].parts if part.kind == "tables")
    assert titles[0] == f"24 slots of {LAYOUT.bytes_per_slot} B" and titles[2].endswith("prompt tokens of 4 requests")
    slots, memory, prompts, records = mem.sheet().bars
    assert sum(part.size for part in slots.parts) == 24 and sum(part.size for part in memory.parts) == whole
    assert {part.name: part.size for part in slots.parts} == {
        "live": 2, "lane": 3, "mark": 4, "snapshot": 1, "cached": 2, "session": 2, "free": 10,
    }  # fmt: skip
    assert [part.name for part in memory.parts] == ["used", "free", "padding", "null slot", "tables"]
    assert memory.parts[2].size == 24 * (LAYOUT.bytes_per_slot - LAYOUT.payload_bytes_per_slot)
    stats = mem.stats().prefix
    assert sum(part.size for part in prompts.parts) == stats.prompt_tokens
    assert [part.text for part in records.parts] == ["4"]
    rows = {row[1]: row for row in mem.sheet().sections[0].rows}
    assert rows["conversation-17"][2] == "16" and set(rows) == {"conversation-17", "b"}
    text = " ".join(words(mem))
    assert "conversation-17" in text and "session-17" in text and "mark 4" in text and "padding" in text


def test_other_objects_show_their_figures() -> None:
    mem, _kept = busy()
    match = mem.match(PROMPT[:14])
    assert legend(match) == {
        name: f"{count} tokens"
        for name, count in {"by state": match.length, **{k.replace("_", " "): n for k, n in match.lost.items()}}.items()
        if count
    }
    planes = mem.planes.sheet().bars[0]
    assert sum(part.size for part in planes.parts) == mem.planes.nbytes
    assert [part.name for part in planes.parts] == ["conv", "ssm", "padding", "null slot"]
    assert [row[:2] for row in mem.layout.sheet().sections[0].rows] == [
        ("conv", "[3, 5] bfloat16"), ("ssm", "[2, 8] float32"),
    ]  # fmt: skip
    assert legend(mem.layout) == {"conv": "30 B", "ssm": "64 B", "padding": "2 B"}
    nodes = mem.prefix.sheet().sections[0]
    assert nodes.rows[0][1] == "0 .. 4" and len(nodes.rows) + nodes.more == mem.stats().prefix.nodes
    plan = ms.capacity("qwen3_next", "40GiB", context="32k", concurrency=16)
    assert sum(part.size for part in plan.sheet().bars[0].parts) == plan.best.nbytes
    assert plan.recommendation[:200] in " ".join(words(plan))
    assert "cut" in " ".join(words(ms.stats.PrefetchStats(flaws={"cut": 2})))


def test_faults_are_shown_first_in_red_and_named() -> None:
    mem, _kept = busy()
    clean = mem.audit()
    assert 'ms-bad"' not in clean._repr_html_() and "clean" in repr(clean)
    with faulty(mem):
        report, seen = mem.audit(), mem.inspect()
    counted = report.sheet().bars[0]
    assert counted.title == "24 slots, 1 of them counted more than once" and sum(p.size for p in counted.parts) == 25
    assert [part.size for part in counted.parts if part.kind in ("leaked", "unknown", "by id")] == [2, 2, 1]
    for each in (report, seen):
        assert "\n" not in repr(each) and "faults: 4" in repr(each)
        page = each._repr_html_()
        assert page.index('<ul class="ms-bad">') < page.index('ms-bar"')
        assert [fault in words(each) for fault in report.faults] == [True] * 4
        out = io.StringIO()
        Console(file=out, width=200, force_terminal=True, color_system="standard").print(each)
        assert f"\x1b[1;31m  {report.faults[0]}" in out.getvalue()


def test_every_kind_of_owner_is_drawn_from_a_real_manager() -> None:
    """The picture and the page of an inspection have a colour, a legend entry and a name for each kind of owner."""
    mem, _kept = busy()
    with faulty(mem):
        seen = mem.inspect()
    assert {kind for kind, _ in viz.holdings(seen)} == set(kinds.KINDS)
    drawn = viz.occupancy([seen])
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == list(kinds.KINDS)
    drawn.canvas.draw()
    box, page = drawn.legends[0].get_window_extent(), drawn.bbox
    assert box.x0 >= page.x0 and box.x1 <= page.x1  # the picture does not cut the legend
    (axes,) = drawn.axes
    cells = {round(bar.get_y() + 0.5): bar for bar in axes.patches}
    for slot, (kind, _) in enumerate(viz.holdings(seen), 1):
        assert (kind == "free") == (slot not in cells)
        if kind != "free":
            assert to_hex(cells[slot].get_facecolor()) == kinds.kind(kind).colour
            assert bool(cells[slot].get_hatch()) == kinds.kind(kind).faulty
    names = {text.get_text() for text in axes.texts}
    assert {"conversation-17", "b", "@4", "@8"} <= names
    assert set(legend(seen)) == set(kinds.KINDS)
    assert all(any(text.startswith(f"{kind} ") for text in words(seen)) for kind in kinds.KINDS)
    text = printed(seen)
    assert all(f"{kind} " in text for kind in kinds.KINDS)


def test_names_are_cut_to_the_width_of_a_cell() -> None:
    mem, _kept = busy(name="a-rather-long-name-of-")
    one, many = viz.occupancy([mem.inspect()]), viz.occupancy([mem.inspect()] * 40)
    wide, narrow = ({text.get_text() for text in each.axes[0].texts} for each in (one, many))
    assert "..onversation-17" in wide and ".." in {name[:2] for name in narrow}
    assert max(map(len, narrow)) < max(map(len, wide)) and "@8" in narrow
    assert one.get_size_inches()[0] < many.get_size_inches()[0] <= 12


# Sizes


@cache
def huge() -> ms.StateManager:
    """Returns a manager with 200,000 slots, 10,000 nodes and 1,000 running requests with long names."""
    mem = build(
        LAYOUT, slots=200_000, max_requests=1000, page_size=4, tracking=ms.Redirect(4),
        prefix=ms.Prefix(states=Lru()), backend="reference", journal=50,
    )  # fmt: skip
    for turn in range(6):
        requests = [ms.Request("x" * 2000 + str(at), tokens=[turn, at, 0, 0, 1, 1, 1, 1, 1]) for at in range(1000)]
        rows = mem.admit(requests)
        mem.settle(mem.plan(rows, [4] * 1000))
        mem.settle(mem.plan(rows, [4] * 1000))
        if turn < 5:
            mem.end(rows, keep="cache", tokens=[[turn, at, 0, 0, 1, 1, 1, 1] for at in range(1000)])
    held.append(rows)
    return mem


held: list[ms.Rows] = []  # rows of huge(): a request ends with its handle


def test_pages_stay_small_whatever_the_size_of_the_object() -> None:
    mem = huge()
    stats = mem.stats()
    assert (stats.capacity, stats.rows_used) == (200_000, 1000)
    assert stats.prefix.nodes >= 10_000
    report = mem.audit()
    leaking = ms.slots.audit.AuditReport(200_000, 0, {}, leaked=list(range(1, 200_001)))
    for each in (mem, mem.prefix, mem.planes, stats, mem.inspect(), report, leaking):
        assert len(each._repr_html_()) < MOST and len(printed(each)) < MOST and len(repr(each)) < 1000
    text = " ".join(words(mem))
    assert "... and 990 more" in text and "... and 199,988 more" in " ".join(words(leaking))
    assert "... and 9,99" in " ".join(words(mem.prefix)) or stats.prefix.nodes > 10_009


def test_the_repr_of_an_inspection_is_one_short_line() -> None:
    empty = Inspection(1000, [0] * 1001, [False] + [True] * 1000, [0] * 30, [0] * 30, {}, {})
    assert repr(empty) == "Inspection(1000 of 1000 slots free, requests: 0, changes: 0, faults: 0)"


NARROW = """[document.documentElement.scrollWidth <= innerWidth, [...document.querySelectorAll("td")].map(cell => {
    const lines = document.createRange(); lines.selectNodeContents(cell); return lines.getClientRects().length})]"""


@pytest.mark.parametrize("width", [380, 876])
def test_a_wide_table_scrolls_and_no_word_is_torn(tab: Any, width: int) -> None:
    from memstate.viz import html

    mem, _kept = busy()
    wide = section("trials", [f"a_long_name_{at}" for at in range(20)], [["key=128,value=64", *range(1000, 1019)]])
    shown = [mem._repr_html_(), mem.layout._repr_html_(), html.render(Sheet("a sweep", sections=(wide,)))]
    tab.set_viewport_size({"width": width, "height": 800})
    tab.set_content("<!doctype html>" + "".join(shown).replace("<details>", "<details open>"))
    fits, lines = tab.evaluate(NARROW)
    assert fits and max(lines) == 1
    assert tab.evaluate("[...document.querySelectorAll('th')].at(-1).clientHeight") < 30


def test_the_planes_of_a_layout_are_not_folded_away() -> None:
    mem, _kept = busy()
    assert "<details>" in mem.planes._repr_html_() and "<details>" not in mem.layout._repr_html_()
    assert "plane" in words(mem.layout) and "[2, 8] float32" in printed(mem.layout)


def test_a_table_is_a_list_that_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    records = [{"name": "a", "slot_bytes": 2048, "part": 0.25}, {"name": HOSTILE, "part": None, "fits": True}]
    made = Table(records, "two records", {"part": "{:.0%}".format})
    assert made == records and made[0]["slot_bytes"] == 2048 and copy.deepcopy(made) == records
    assert repr(pickle.loads(pickle.dumps(made))) == str(made) == repr(made)
    lines = str(made).splitlines()
    assert lines[0] == "two records" and lines[1].split() == ["name", "slot", "bytes", "part", "fits"]
    assert lines[2].split() == ["a", "2,048", "25%"] and lines[-1].split()[-1] == "yes" and "\x1b" not in str(made)
    assert {"two records", "slot bytes", "2,048", "25%", "yes"} < set(words(made))
    assert printed(made).splitlines() == lines
    many = Table([{"at": at} for at in range(102)], "many")
    assert str(many).endswith("... and 2 more") and "... and 2 more" in words(many)
    assert str(Table([], "none")) == "none" and words(Table([], "none"))


def test_a_layout_lists_its_planes_in_a_table() -> None:
    mem, _kept = busy()
    assert {"conv", "(3, 5)", "bfloat16", "layer stride", "30"} < set(words(mem.layout.table()))
    assert "slots=24" in str(mem.layout.table(24)) and "bfloat16" in printed(mem.layout.table())


# Texts and sizes of the caller


def test_hostile_names_are_text() -> None:
    mem, _kept = busy(name=HOSTILE)
    layout = ms.StateLayout((ms.Plane(HOSTILE, (3,), torch.float32),), 1)
    with faulty(mem):
        seen, report = mem.inspect(), mem.audit()
    for each in (mem, mem.prefix, seen, report, layout):
        assert "<script>" in " ".join(words(each)) or each in (mem.prefix, report)
        assert "\x1b" not in printed(each) and "\x00" not in printed(each) and "\u202e" not in printed(each)


def test_long_names_are_cut() -> None:
    mem, _kept = busy(name='"' * 1_000_000)
    assert all(len(each._repr_html_()) < MOST for each in shown(mem).values())
    assert len(mem.inspect()._repr_html_()) < MOST


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=24))
def test_bars_of_text_are_to_scale(sizes: list[int]) -> None:
    cells = widths(sizes, 60)
    assert sum(cells) == 60 and min(cells) >= 1
    for size, count in zip(sizes, cells, strict=True):
        assert abs(count - 1 - (60 - len(sizes)) * size / sum(sizes)) <= 1


TEXTS = st.text(max_size=8)
SHEETS = st.builds(
    Sheet, TEXTS,
    st.lists(st.builds(Bar, TEXTS, st.lists(st.builds(
        BarPart, TEXTS, st.integers(1, 10**9), st.sampled_from([*kinds.KINDS, *kinds.OTHERS, "plane 7", "new"]), TEXTS,
    ), min_size=1, max_size=4).map(tuple)), max_size=2).map(tuple),
    st.lists(
        st.builds(SheetSection, TEXTS, st.just(("a", "b")), st.lists(st.tuples(TEXTS, TEXTS), max_size=2).map(tuple)),
        max_size=2,
    ).map(tuple),
    st.lists(TEXTS, max_size=2).map(tuple), st.lists(TEXTS, max_size=2).map(tuple),
)  # fmt: skip


@given(SHEETS)
def test_all_texts_of_a_sheet_are_on_its_page(made: Sheet) -> None:
    from memstate.sheet import visible
    from memstate.viz import html

    clean = Sheet(*(_map(visible, field) for field in made))  # `sheet` and `section` clean texts in this way
    everything = "".join(ElementTree.fromstring(html.render(clean)).itertext())
    cells = [cell for section in clean.sections for row in section.rows for cell in row]
    for text in (clean.title, *clean.faults, *clean.notes, *cells):
        assert text.replace("\r", "\n") in everything
    assert html.render(clean).count('title="') == sum(len(bar.parts) for bar in clean.bars)


def _map(change: Callable[[str], str], value: Any) -> Any:
    """Returns a value with every text in its nested tuples changed."""
    if isinstance(value, tuple):
        fields = [_map(change, each) for each in value]
        return type(value)(*fields) if hasattr(value, "_fields") else tuple(fields)
    return change(value) if isinstance(value, str) else value

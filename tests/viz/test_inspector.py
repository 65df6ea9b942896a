"""Tests the inspector's page: its data and safety as a text, and its behaviour in a browser."""

import json
import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import memstate as ms
from memstate.errors import InvalidArgument
from memstate.slots.inspect import Inspection
from memstate.viz.inspector import page
from memstate.viz.inspector.texts import packed, runs, steps, text
from tests.slots.test_inspect import busy
from tests.support.inspected import large, leaking, served

HOSTILE = [
    "</script><script>document.title = 'run'</script>", "<img src=x onerror=\"document.title = 'run'\">", "<!--", "]]>",
    "\" onload='x'", "{{ 7 * 7 }}", "{% raw %}", "a\0b", "\ud800", "\u202eabc\u202c", "\u2028\u2029", "${x}`",
    "__proto__",     "&lt;script&gt;", "\\u003cscript\\u003e", "x" * 1_000_000, "\u05d0\u05d1", "", " ",
]  # fmt: skip
INVISIBLE = re.compile("[\0-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


class Tags(HTMLParser):
    """Parses a page: `tags` are its elements with attributes, `raw` the texts of its scripts and styles."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, list[str]] = {"script": [], "style": []}
        self._in = ""
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in self.raw:
            self.raw[self._in][-1] += data


def data_of(content: str) -> dict[str, Any]:
    return json.loads(Tags(content).raw["script"][0])


def named(name: str) -> Inspection:
    """Returns an inspection in which `name` replaces every text that comes from outside."""
    seen = leaking()
    return replace(
        seen,
        names=dict.fromkeys(seen.names, name),
        tags=dict.fromkeys(seen.tags, name),
        rows=[{**row, "id": name} for row in seen.rows],
        sessions=[{**session, "id": name} for session in seen.sessions],
        prefix=[{**node, "salt": name} for node in seen.prefix],
        changes=[{**each, "owner": name, "source_owner": name} for each in seen.changes],
        layout={**seen.layout, "order": name,
                "planes": [{**plane, "name": name, "dtype": name} for plane in seen.layout["planes"]]},
        stats={**seen.stats, name: 1, "more": {name: {name: 2}}},
        faults=[name, name],
    )  # fmt: skip


# -- texts and columns -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shown"),
    [("request 'a'", "request 'a'"), ("\u05d0", "\u05d0"), ("a\0\n\u202e\ud800", r"a\x00\n\u202e\ud800"), ("", "")],
)
def test_what_is_invisible_is_shown_as_an_escape(name: str, shown: str) -> None:
    assert text(name) == shown


def test_a_long_name_keeps_begin_and_end() -> None:
    shown = text("a" * 500_000 + "b" * 500_000)
    assert shown == "a" * 100 + "\u2026" + "b" * 20 + " (1000000 characters)"
    assert text("c" * 120) == "c" * 120


def unrun(column: list[Any]) -> list[Any]:
    return [value for value, times in zip(column[::2], column[1::2], strict=True) for _ in range(times)]


def unpacked(packed: dict[str, list[Any]], known: list[tuple[int, ...]]) -> list[str]:
    numbers, names = iter(packed["numbers"]), []
    for form, mine in zip(unrun(packed["uses"]), known, strict=True):
        parts = packed["forms"][form]
        names.append("".join(
            part if at % 2 == 0 else str(next(numbers) if part < 0 else mine[part]) for at, part in enumerate(parts)
        ))  # fmt: skip
    return names


NUMBERED = st.lists(st.sampled_from(["7", "07", "1" * 16, " 7 ", "7.5", "-7", "a7", "\u0667", "x", " ", "12"])).map(
    "".join
)


@given(st.lists(st.tuples(st.text() | NUMBERED, st.tuples(st.integers(0, 20), st.integers(-3, 20)))))
def test_packed_names_read_back_the_same(given_names: list[tuple[str, tuple[int, int]]]) -> None:
    names, known = [name for name, _ in given_names], [numbers for _, numbers in given_names]
    assert unpacked(packed(names, known), known) == names


@given(st.lists(st.integers(0, 3)))
def test_runs_and_steps_read_back_the_same(values: list[int]) -> None:
    assert unrun(runs(values)) == values
    ascending = sorted(values)
    assert [sum(steps(ascending)[: at + 1]) for at in range(len(values))] == ascending


def test_the_page_has_the_owners_of_the_inspection() -> None:
    seen = leaking()
    data = data_of(page(seen))
    held = sorted(seen.names)
    known = [(register, seen.labels[register], register // 3) for register in held]
    assert unpacked(data["names"], known) == [seen.names[register] for register in held]
    assert data["slots"] == [seen.slots[register] for register in held]
    kinds = [data["kinds"][kind] for kind in unrun(data["owners"])]
    assert kinds == [seen.kinds[register] for register in held]
    assert len(unrun(data["map"])) == seen.capacity
    live = {row[1]: data["slots"][row[6][0]] for row in data["requests"]}
    assert live == {row["id"]: seen.slots[3 * row["row"]] for row in seen.rows}
    marks = [data["slots"][at] for row in data["requests"] for at in row[7]]
    assert len(marks) == list(seen.kinds.values()).count("mark") > 3
    assert [row[1] for row in data["origins"]] == ["row 1 (request 'fork') lane 0"]


# -- the text of the page --------------------------------------------------------------------------


def test_the_page_has_memory_of_rows() -> None:
    rows = ms.StateLayout((ms.Plane("tail", (5, 2), torch.int16),), layers=2)
    layout = ms.StateLayout((ms.Plane("conv", (4,), torch.float32),), layers=1, rows=rows)
    mem = ms.StateManager(layout, slots=4, max_requests=2, tracking=ms.Redirect(every=4))
    content = page(mem.inspect())
    told = "<bdi>conv</bdi>", "<bdi>rows.tail</bdi>", "<td>5 x 2</td>"
    assert [each for each in told if each not in content] == []


def test_sizes() -> None:
    assert len(page(busy()).encode()) < 80_000 and busy().capacity == 12
    assert len(page(large(100_000, requests=500, nodes=5_000)).encode()) < 5_000_000


def test_the_policy_allows_this_style_and_this_script_and_no_request() -> None:
    tags = Tags(page(served(), "a.json"))
    (policy,) = [attributes["content"] for tag, attributes in tags.tags if attributes.get("http-equiv")]
    hashes = [
        b64encode(sha256(raw.encode()).digest()).decode() for raw in (tags.raw["style"][0], tags.raw["script"][1])
    ]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    loading = {"src", "href", "srcset", "style", "action", "data", "onclick", "onload"}
    assert [each for each in tags.tags if loading & each[1].keys() or each[0] in ("link", "iframe", "object")] == []


def test_the_same_inspection_gives_the_same_page() -> None:
    assert page(served()) == page(replace(served()))


def test_what_is_no_inspection_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"page: \{'capacity': 3\}, expected what"):
        page({"capacity": 3})  # type: ignore[arg-type]


@cache
def plain_tags() -> list[str]:
    return [tag for tag, _ in Tags(page(named("plain"), "plain")).tags]


NAMES = st.lists(
    st.sampled_from([*HOSTILE[:-4], "</", "script", ">", "'", '"', "<", "&", "\r\n", "\x85"]) | st.text()
).map("".join)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES)
@example("".join(HOSTILE))
@example(HOSTILE[-4])
def test_no_name_changes_the_page(name: str) -> None:
    content = page(named(name), f"a{name}")
    assert not INVISIBLE.search(content)
    tags = Tags(content)
    assert [tag for tag, _ in tags.tags] == plain_tags()
    assert len(content.encode()) < 1_000_000
    data = json.loads(tags.raw["script"][0])
    assert [row[1] for row in data["requests"]] == [text(name)] * 3 and data["faults"] == [text(name)] * 2


# -- in a browser ----------------------------------------------------------------------------------


@contextmanager
def shown(tab: Any, folder: Path, inspection: Inspection, width: int = 1200, scheme: str = "light") -> Iterator[None]:
    """Shows the page in the browser; at the end, checks that it loaded nothing else and had no error."""
    path = folder / "page.html"
    path.write_text(page(inspection, "owners.json"), "utf-8")
    asked, wrong = [], []
    tab.emulate_media(media="screen", color_scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 800})
    listeners = {
        "request": lambda request: asked.append(request.url),
        "console": lambda message: wrong.append(message.text) if message.type == "error" else None,
        "pageerror": lambda error: wrong.append(str(error)),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    tab.goto(path.as_uri())
    tab.asked, tab.wrong = asked, wrong
    yield
    assert asked == [path.as_uri()] and wrong == []
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)


def search(tab: Any, query: str) -> str:
    tab.fill("#query", query)
    tab.press("#query", "Enter")
    return str(tab.inner_text("#hits"))


def column(tab: Any, selector: str) -> list[str]:
    return [entry.split("\n")[0] for entry in tab.locator(selector).all_inner_texts()]


def pixel(tab: Any, slot: int) -> list[int]:
    """Returns the colour of a slot on the map."""
    return tab.evaluate(
        """([at, count, columns]) => {
            const canvas = document.querySelector("canvas"), pen = canvas.getContext("2d");
            const w = canvas.width / columns, h = canvas.height / Math.ceil(count / columns);
            return [...pen.getImageData(((at % columns) + 0.5) * w, (Math.floor(at / columns) + 0.15) * h, 1, 1).data];
        }""",
        [slot - 1, 44, columns_of(tab)],
    )


def columns_of(tab: Any) -> int:
    """Returns the number of cells in a line of the map: how many slots the key for the next line moves on."""
    tab.focus("canvas")
    tab.keyboard.press("Home")
    tab.keyboard.press("ArrowDown")
    return int(tab.get_attribute("canvas", "aria-valuenow")) - 1


def test_search_finds_marks_filters_and_says_how_many(tab: Any, tmp_path: Path) -> None:
    seen = served()
    with shown(tab, tmp_path, seen):
        assert column(tab, "#requests td:first-child") == ["req-7", "req-8", "long-prompt"]
        bright = pixel(tab, 1)
        assert search(tab, "req-8").startswith("13 hits: 6 slots, 1 request, ")
        assert column(tab, "#requests td:first-child") == ["req-8"]
        assert column(tab, "#sessions tbody td") == ["No match."]
        slot = seen.slots[6]  # the live register of row 2
        assert f"slot {slot}" in str(tab.get_attribute("canvas", "aria-valuetext")) or "req-8" in str(
            tab.get_attribute("canvas", "aria-valuetext")
        )
        assert pixel(tab, 1) != bright
        assert search(tab, "SUPPORT").startswith("12 hits: 2 slots, 1 session, ")
        assert column(tab, "#sessions td:first-child") == ["support"]
        assert search(tab, f"slot {slot}").startswith("2 hits: 1 slot, 1 request")
        assert search(tab, "register 6").startswith("3 hits: 1 slot, 1 request, 1 span of")
        assert "1 salt" in search(tab, "tenant-a")
        assert search(tab, "nowhere") == "no hit"
        tab.press("#query", "Escape")
        assert tab.input_value("#query") == "" and tab.inner_text("#hits") == ""
        assert len(column(tab, "#requests td:first-child")) == 3 and pixel(tab, 1) == bright


def test_a_leak_is_found_by_its_name(tab: Any, tmp_path: Path) -> None:
    seen = leaking()
    leaked = int(seen.faults[0].split()[1])
    with shown(tab, tmp_path, seen):
        assert tab.inner_text("#faults h2") == "4 faults" and column(tab, "#faults li") == seen.faults
        assert "leaked 2" in column(tab, "#slots .legend button") and "contested 1" in column(
            tab, "#slots .legend button"
        )
        assert search(tab, "leaked") == "4 hits: 2 slots, 2 faults"
        assert column(tab, "#faults li") == seen.faults[:2]
        assert tab.get_attribute("canvas", "aria-valuetext") == f"slot {leaked} leaked"
        tab.click(f"text=leaked: slot {leaked}")
        assert tab.inner_text("#slots .detail").split() == ["slot", str(leaked), "leaked"]
        assert search(tab, f"slot {leaked}") == "2 hits: 1 slot, 1 fault"
    with shown(tab, tmp_path, served()):
        assert tab.locator("#faults").count() == 0 and search(tab, "leaked") == "no hit"


def test_a_part_in_which_nothing_matches_says_so(tab: Any, tmp_path: Path) -> None:
    with shown(tab, tmp_path, leaking()):
        search(tab, "leaked")
        assert tab.inner_text("#timeline .body") == "No match."
        search(tab, "support")
        assert column(tab, "#faults li") == ["No match."] and tab.locator("#timeline rect").count() > 0
    with shown(tab, tmp_path, replace(served(), changes=[])):
        assert tab.inner_text("#timeline .body").startswith("This inspection has no changes of owners.")
        search(tab, "nowhere")
        assert tab.inner_text("#timeline .body").startswith("This inspection has no changes of owners.")


def test_folds_open_by_hand_and_where_a_hit_is(tab: Any, tmp_path: Path) -> None:
    seen = served()
    deep = next(node for node in reversed(seen.prefix) if node["register"] and node["parent"] > 1)
    with shown(tab, tmp_path, seen):
        roots = tab.locator("#prefix .tree > li > details > summary")
        assert [each.split("\n")[0].replace(" ", "")[:5] for each in roots.all_inner_texts()] == ["nosal", "salt'"]
        closed = tab.locator("#prefix li").count()
        assert 4 < closed < len(seen.prefix)
        tab.locator("#prefix details:not([open]) > summary").first.press("Enter")
        tab.locator("#prefix details details details li").first.wait_for()
        assert tab.locator("#prefix li").count() > closed
        assert tab.locator("#prefix .hit").count() == 0
        assert "1 cached node" in search(tab, f"register {deep['register']}")
        assert tab.locator("#prefix .hit").is_visible()
        page_size = seen.layout["page_size"]
        assert f"{deep['start'] * page_size}..{deep['end'] * page_size}" in tab.inner_text("#prefix .hit")
        tab.press("#query", "Escape")
        assert tab.locator("#prefix .hit").count() == 0
        search(tab, "tenant")
        for fold in tab.locator("#prefix details:not([open]) > summary").all():
            fold.click()
        assert tab.locator("#prefix .ghost .tag").first.inner_text() == "ghost"


def test_the_legend_filters_the_map(tab: Any, tmp_path: Path) -> None:
    seen = served()
    with shown(tab, tmp_path, seen):
        slot = seen.slots[3]
        before, live = pixel(tab, slot), tab.locator("#slots .legend button", has_text="live")
        live.press("Space")
        assert live.get_attribute("aria-pressed") == "false" and pixel(tab, slot) != before
        assert tab.locator("#timeline .off").count() > 0
        live.click()
        assert live.get_attribute("aria-pressed") == "true" and pixel(tab, slot) == before
        assert tab.locator("#timeline .off").count() == 0


def test_keys(tab: Any, tmp_path: Path) -> None:
    seen = served()
    with shown(tab, tmp_path, seen):
        tab.keyboard.press("/")
        assert tab.evaluate("document.activeElement.id") == "query"
        tab.keyboard.type("a/b")
        assert tab.input_value("#query") == "a/b"
        tab.keyboard.press("Escape")
        assert tab.input_value("#query") == "" and tab.evaluate("document.activeElement.id") != "query"
        tab.focus("canvas")
        for key, slot in (("ArrowRight", 2), ("End", 44), ("ArrowRight", 44), ("ArrowDown", 44), ("ArrowLeft", 43),
                          ("Home", 1), ("ArrowUp", 1)):  # fmt: skip
            tab.keyboard.press(key)
            assert tab.get_attribute("canvas", "aria-valuenow") == str(slot), key
        assert str(tab.get_attribute("canvas", "aria-valuetext")).startswith("slot 1 ")
        tab.keyboard.press("Enter")
        register = seen.slots.index(1)
        assert tab.input_value("#query") == seen.names[register] and " 1 slot" in tab.inner_text("#hits")
        tab.focus("#query")
        reached = []
        for _ in range(12):
            tab.keyboard.press("Tab")
            reached.append(tab.evaluate("document.activeElement.tagName"))
        assert set(reached[: reached.index("CANVAS")]) == {"BUTTON"} and reached.index("CANVAS") > 4


def background(tab: Any) -> int:
    return sum(
        int(part) for part in re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    )


def test_dark_and_light(tab: Any, tmp_path: Path) -> None:
    for scheme, dark in (("light", False), ("dark", True)):
        with shown(tab, tmp_path, served(), scheme=scheme):
            free = served().free.index(True)
            first = pixel(tab, free)
            assert (background(tab) < 200) == dark
            tab.click("#theme")
            assert tab.inner_text("#theme") == "theme: light" and background(tab) > 600
            tab.click("#theme")
            assert tab.inner_text("#theme") == "theme: dark" and background(tab) < 200
            assert (pixel(tab, free) == first) == dark
            tab.emulate_media(media="print")
            assert background(tab) == 0 and not tab.is_visible("#query")  # the background is transparent


def test_no_width_makes_the_page_wider(tab: Any, tmp_path: Path) -> None:
    with shown(tab, tmp_path, leaking(), width=1600):
        assert tab.evaluate("document.documentElement.scrollWidth") == 1600
        tab.set_viewport_size({"width": 400, "height": 800})
        while tab.evaluate("document.querySelector('.lanes svg').clientWidth > 400"):
            tab.wait_for_timeout(20)  # the page draws the lanes again after the change
        assert tab.evaluate("document.documentElement.scrollWidth") == 400


def test_hostile_names_do_not_run(tab: Any, tmp_path: Path) -> None:
    name = "".join(HOSTILE)
    with shown(tab, tmp_path, named(name)):
        assert tab.title() == "owners.json - memstate inspection"
        assert tab.locator("img").count() == 0 and tab.locator("script").count() == 2
        assert tab.locator("#requests td:first-child bdi").all_text_contents() == [text(name)] * 3
        assert "3 requests" in search(tab, text(name)[:40])


def test_many_slots_and_nodes(tab: Any, tmp_path: Path) -> None:
    seen = large(20_000, requests=300, nodes=10_000)
    with shown(tab, tmp_path, seen):
        assert tab.locator("*").count() < 3_000
        last = max(range(len(seen.prefix)), key=lambda at: seen.prefix[at]["end"])
        assert "1 cached node" in search(tab, f"register {seen.prefix[last]['register']}")
        assert tab.locator("#prefix .hit").count() == 1
        assert search(tab, "cached").startswith("29,7") and tab.locator("*").count() < 15_000
        assert search(tab, "request-300-").startswith("2 hits: 1 slot, 1 request")


def test_a_tree_of_thousands_of_levels(tab: Any, tmp_path: Path) -> None:
    """Each of 3000 levels has a branch; browsers cannot nest so many folds."""
    seen, nodes = served(), []
    for level in range(3000):
        for leaf in (False, True):
            parent = 2 * level - 2 if level else -1
            nodes.append(
                {**seen.prefix[0], "parent": parent, "start": level, "end": level + 1, "register": 0, "ghost": leaf}
            )
    nodes[-1]["register"] = 3  # the live state of the first row
    with shown(tab, tmp_path, replace(seen, prefix=nodes)):
        assert tab.locator("*").count() < 3_000
        assert "1 cached node" in search(tab, "register 3")
        assert "11,996..12,000" in tab.inner_text("#prefix .hit") and tab.locator("#prefix .hit").is_visible()
        tab.click("text=back to the roots")
        assert "0..4" in tab.inner_text("#prefix .tree") and tab.locator("text=show from here").count() == 1

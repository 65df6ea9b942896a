"""Tests pictures of bitmaps, packets and steps: their arithmetic against device memory, and their parts.

`python -m tests.viz.test_stepwise` draws the picture of the guide anew.
"""

import re
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import memstate as ms
from memstate import viz
from memstate.kernels.levels import wrong_summary
from memstate.slots.commands import CommandBuffer
from memstate.slots.inspect import Inspection
from memstate.slots.packet import Packet
from memstate.slots.registers import RegisterFile
from tests.support.refusals import refusals

LAYOUT = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), 1)
EMPTY = Inspection(3, [0] * 4, [False, False, True, True], [], [], {}, {})
KINDS = (ms.NoTracking, ms.PingPong, ms.LazyPingPong, ms.Redirect)
GUIDE = Path(__file__).parents[2] / "docs" / "images" / "03_strategies.svg"
MOST_BYTES = 60_000


def manager(**given: Any) -> ms.StateManager:
    return ms.StateManager(LAYOUT, **({"slots": 8, "max_requests": 4, "backend": "reference"} | given))


def run(tracking: ms.Tracking, count: int = 6, slots: int = 8) -> list[viz.PlannedStep]:
    """Runs one request with overlap: each step is settled after the next plan; returns the planned steps."""
    mem, before, planned = manager(tracking=tracking, slots=slots), None, []
    rows = mem.admit([ms.Request("a")])
    for number in range(1, count + 1):
        step = mem.plan(rows)
        vectors = [vector.tolist() for vector in (step.read, step.write, step.snapshot)]
        planned.append(viz.PlannedStep(str(number), mem.inspect(), *vectors))
        if before is not None:
            mem.settle(before)
        before = step
    return planned


def upload(file: RegisterFile) -> CommandBuffer:
    """Returns a command buffer whose next plan has two rows and one change of each kind."""
    commands = CommandBuffer(file, max_batch=4)
    commands.claim([3, 6, 12])
    commands.submit()
    commands.move([15], [3])
    commands.release([6])
    commands.claim([9], zeroed=[9])
    commands.label([12], [7])
    commands.upload_step(
        (np.array([4, 5]), np.array([1, 3])), limit=2, marks=(np.array([1]), np.array([2]), np.array([12]))
    )
    return commands


def register_file() -> RegisterFile:
    return RegisterFile(ms.SlotAllocator(32, ms.Backend("reference")), rows=5, snapshots=4)


@pytest.mark.parametrize("slots", [3, 31, 32, 100, 2047, 2048, 70_000])
def test_free_words_are_those_of_the_device(slots: int) -> None:
    allocator = ms.SlotAllocator(slots, ms.Backend("reference"))
    allocator.release(allocator.claim(slots // 2 + 1)[1::3])
    free = allocator.free_slots().tolist()
    levels = viz.free_words(replace(EMPTY, capacity=slots, owners=[0] * (slots + 1), free=free))
    together = np.array([word for level in levels for word in level], np.uint32).view(np.int32)
    assert together.tolist() == allocator.bitmap.tolist() and wrong_summary(together) == []


def test_a_drawn_bitmap_has_a_bit_for_each_slot_and_each_word_of_a_level() -> None:
    mem = manager(slots=40, max_requests=33)
    rows = mem.admit([ms.Request(number) for number in range(33)])
    mem.end(rows[2:4])
    (axes,) = viz.bitmap(mem.inspect()).axes
    bars = {(round(bar.get_y() + 0.45), round(bar.get_x()), round(bar.get_width())) for bar in axes.patches}
    assert bars == {(0, 0, 3), (0, 3, 2), (0, 5, 27), (1, 0, 2), (1, 2, 7)}
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if text.isdigit()] == [str(slot) for slot in range(41)]
    assert [text for text in texts if not text.isdigit()] == ["0x00000018", "0x000001fc"]

    large = replace(EMPTY, capacity=2100, owners=[0] * 2101, free=[False] * 2100 + [True])
    above, below = viz.bitmap(large).axes
    assert above.get_title(loc="left") == "level 1: a bit for each word below, 3 words"
    assert below.get_title(loc="left") == "bitmap: a bit for each slot, 66 words"
    assert sum(round(bar.get_width()) for bar in above.patches) == 66
    assert sum(round(bar.get_width()) for bar in below.patches) == 2101


def test_sections_are_what_was_recorded() -> None:
    sections = viz.sections(upload(register_file()).step.tolist())
    assert {section.name: section.columns for section in sections} == {
        "batch": {"row": [4, 5], "tokens": [1, 3]},
        "marks": {"entry": [1], "offset": [2], "register": [12]},
        "moves": {"to": [15], "from": [3]},
        "releases": {"register": [6]},
        "claims": {"register": [9]},
        "writes": {"cell": [64 + 12], "value": [7]},
        "data": {"to": [9], "from": [-1]},
    }
    assert [section.start for section in sections] == [16, 24, 36, 44, 48, 52, 60] and sections[-1].end == 68
    assert viz.sections(Packet().encode()) == []  # an empty packet, as a numpy array


def test_a_drawn_packet_has_every_word_once() -> None:
    words = upload(register_file()).step.tolist()
    (axes,) = viz.packet(words).axes
    places = [(round(bar.get_x()), round(bar.get_y() + 0.45)) for bar in axes.patches]
    assert sorted(x + 16 * y for x, y in places) == list(range(68))
    shown = [int(text.get_text()) for text in axes.texts]
    columns = [column for section in viz.sections(words) for column in section.columns.values()]
    assert shown == [*words[:15], *chain(*columns)]
    by_colour = Counter(bar.get_facecolor() for bar in axes.patches[15:])
    assert sorted(by_colour.values()) == [1, 1, 2, 2, 2, 3, 4, 1 + 68 - 16 - 15]


def test_steps_say_what_a_forward_does_with_each_slot() -> None:
    panels = viz.steps({kind.__name__: run(kind(every=2)) for kind in KINDS}).axes
    said = {}
    for axes, name in zip(panels, [kind.__name__ for kind in KINDS], strict=True):
        cells = {(int(t.get_position()[0]), t.get_position()[1]): t.get_text() for t in axes.texts if t.get_text()}
        said[name] = [[cells.get((at, slot), "") for at in range(6)] for slot in (1, 2, 3)]
        assert axes.get_title(loc="left") == name
    nothing = [""] * 6
    assert said == {
        "NoTracking": [["r w 1", "r w 2", "r w 3", "r w 4", "r w 5", "r w 6"], nothing, nothing],
        "PingPong": [
            ["r w 1", "r w 2", "r w 3", "r w 4", "r w 5", "r w 6"],
            ["", "s 2", "2", "2", "2", "s 6"],
            ["", "", "", "s 4", "4", "4"],
        ],
        "LazyPingPong": [
            ["r w 1", "r w 2", "r w 3", "r w 4", "r w 5", "r w 6"],
            ["", "s 2", "2", "2", "", "s 6"],
            ["", "", "", "s 4", "4", "4"],
        ],
        "Redirect": [["r w 1", "r w 2", "r 2", "2", "w 5", "r w 6"], ["", "", "w 3", "r w 4", "r 4", "4"], nothing],
    }


def test_steps_are_coloured_by_owner() -> None:
    moments = run(ms.Redirect(every=2), 3)
    (axes,) = viz.steps({"redirect": moments}).axes
    cells = {(round(bar.get_x()), round(bar.get_y() + 0.5)): bar.get_facecolor() for bar in axes.patches}
    assert set(cells) == {(0, 1), (1, 1), (2, 1), (2, 2)}
    assert cells[0, 1] == cells[1, 1] == cells[2, 2] != cells[2, 1]


def texts(svg: str) -> list[str]:
    return [
        "".join(text.itertext()).strip() for text in ElementTree.fromstring(svg).iter() if text.tag.endswith("}text")
    ]


def of_the_guide() -> str:
    drawn = viz.steps({kind.__name__: run(kind(every=4), count=9, slots=3) for kind in KINDS})
    svg = re.sub(r"(?s) *<metadata>.*?</metadata>\n", "", drawn._repr_svg_())
    return re.sub(r"font-family: '[^;\"]*sans-serif", "font-family: sans-serif", svg)


def test_the_picture_of_the_guide_is_what_is_drawn_now() -> None:
    assert texts(GUIDE.read_text()) == texts(of_the_guide()), "run `python -m tests.viz.test_stepwise`"
    assert GUIDE.stat().st_size < MOST_BYTES


def test_curves_have_their_numbers_and_show_equal_lines() -> None:
    upper, lower = viz.curves(
        {"slots": {"a": [1, 2], "b": [1, 3]}, "MiB": {"a": [0.5, 1], "b": [0, 2]}}, ["x", "y"]
    ).axes
    assert [line.get_ydata().tolist() for line in upper.lines] == [[1, 2], [1, 3]]
    assert [line.get_ydata().tolist() for line in lower.lines] == [[0.5, 1], [0, 2]]
    assert upper.get_ylabel() == "slots" and [t.get_text() for t in lower.get_xticklabels()] == ["x", "y"]
    below, above = (line.get_linewidth() for line in upper.lines)
    assert below > above
    assert [tick for tick in upper.get_yticks() if tick != int(tick)] == []


test_bad_input_is_refused_with_the_numbers = refusals(
    ms.InvalidArgument,
        (lambda: viz.free_words("bits"), "'bits': expected what `StateManager.inspect` returns"),
        (lambda: viz.bitmap(replace(EMPTY, capacity=40_000, free=[False] * 40_001)), "1251 words cannot be told apart"),
        (lambda: viz.sections([0] * 15), "packet: 15 words, expected 16 or more whole numbers"),
        (lambda: viz.sections([0, 0, 5, *[0] * 7, 16, *[0] * 5]), "5 claims from word 16 on do not fit 16 words"),
        (lambda: viz.packet([0, 0, 1020, *[0] * 7, 16, *[0] * 1100]), "1036 words cannot be told apart"),
        (lambda: viz.steps({}), r"steps: \{\}, expected a dict of lists of `viz.PlannedStep`"),
        (lambda: viz.steps({"a": []}), "none of them empty"),
        (lambda: viz.steps({"a": [EMPTY]}), "steps: a: expected a list of `viz.PlannedStep`"),
        (lambda: viz.steps({"a": [viz.PlannedStep("0", EMPTY)] * 25}), "25 steps of .3. slots, expected at most 24"),
        (
            lambda: viz.steps({"a": [viz.PlannedStep("0", EMPTY), viz.PlannedStep("1", replace(EMPTY, capacity=2))]}),
            "a: 2 steps of .2, 3. slots",
        ),
        (lambda: viz.steps({"a": [viz.PlannedStep("0", replace(EMPTY, capacity=4001))]}), "4001 cells cannot be told"),
        (lambda: viz.curves({"a": {"x": 5}}), "expected a list of numbers for each name"),
        (lambda: viz.sections(5), "packet: 5, expected a list of words"),
        (lambda: viz.curves({"a": {"x": [1]}, "b": {"y": [1]}}), "expected the names .'x'. in every group"),
        (lambda: viz.curves({"a": {"x": [1], "y": [1, 2]}}), r"lines of \[1, 2\] numbers and 0 labels"),
        (lambda: viz.curves({"a": {"x": [1]}}, ["0", "1"]), r"lines of \[1\] numbers and 2 labels"),
        (lambda: viz.curves({"a": {"x": [float("nan")]}}), "a, x is nan, expected a number"),
)  # fmt: skip


if __name__ == "__main__":
    GUIDE.write_text(of_the_guide())

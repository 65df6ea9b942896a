"""Tests that drawn lines and stacked bars have the given numbers."""

import math
from collections.abc import Callable

import pytest

from memstate import viz
from memstate.errors import InvalidArgument

PLAN = {"small": {"states": 1.0, "KV": 3.0}, "large": {"states": 0.0, "KV": 12_345.0}}


def test_parts_lie_one_behind_the_other() -> None:
    (axes,) = viz.stacked(PLAN, "GiB").axes
    bars = [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars == [(0, 0, 1), (0, 1, 3), (1, 0, 0), (1, 0, 12_345)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["small", "large"]
    assert axes.get_xlabel() == "GiB" and axes.get_xlim() == (0, 12_345)
    assert [text.get_text() for text in axes.texts] == ["12,345"], "a part that is too narrow has no number in it"
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["states", "KV"]


def test_bars_that_are_all_empty_are_drawn() -> None:
    (axes,) = viz.stacked({"a": {"x": 0}}, "GiB").axes
    assert axes.get_xlim() == (0, 1) and not axes.texts


def test_lines_go_through_their_points_in_order() -> None:
    drawn = viz.lines({"lru": {64: 0.5, 8: 0.25}, "best $": {8: 0.75}}, "states", "rate", limits={"all": 0.9})
    (axes,) = drawn.axes
    lru, best, limit = axes.lines
    assert (list(lru.get_xdata()), list(lru.get_ydata())) == ([8, 64], [0.25, 0.5])
    assert (list(best.get_xdata()), list(best.get_ydata())) == ([8], [0.75])
    assert lru.get_linewidth() > best.get_linewidth(), "a line under another is wider"
    assert list(limit.get_ydata()) == [0.9, 0.9] and [text.get_text() for text in axes.texts] == ["all"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "64"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_xscale(), axes.get_yscale()) == (
        "states", "rate", "log", "linear",
    )  # fmt: skip
    assert axes.get_ylim()[0] == 0
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["lru", r"best \$"]


def test_lines_can_be_logarithmic_and_below_zero() -> None:
    assert viz.lines({"a": {1: 10.0, 2: 1000.0}}, "n", "bytes", log=True).axes[0].get_yscale() == "log"
    assert viz.lines({"a": {1: -2.0, 2: 3.0}}, "n", "gain").axes[0].get_ylim()[0] == -2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: viz.stacked({"a": {"x": -1}}, "m"), "a, x is -1, expected a number from 0 on"),
        (lambda: viz.lines({"a": {}}, "n", "m"), "expected a dict of groups, each a dict of values by name"),
        (lambda: viz.lines({"a": {0: 1.0}}, "n", "m"), "a at 0, expected a whole number from 1 on"),
        (lambda: viz.lines({"a": {1: math.inf}}, "n", "m"), "a at 1 is inf, expected a number"),
        (lambda: viz.lines({"a": {1: 0.0}}, "n", "m", log=True), "a at 1 is 0.0, expected a number above 0"),
        (lambda: viz.lines({"a": {1: 1.0}}, "n", "m", limits=[1]), r"limits: \[1\], expected a dict"),
        (lambda: viz.lines({"a": {1: 1.0}}, "n", "m", limits={"b": "1"}), "limits: b is '1', expected a number"),
    ],
)
def test_bad_numbers_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()

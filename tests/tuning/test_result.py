"""Tests what a sweep returns: the best configurations, the table, the document and the pictures."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memstate.errors import InvalidArgument
from memstate.kernels import tuned_files
from memstate.kernels.configs import LEAST_VALUES, DeltaConfig
from memstate_tools.tuning import Sweep, Trial
from memstate_tools.tuning.cost import UNIT
from memstate_tools.tuning.plot import require_plot
from tests.support import swept
from tests.support.sources import ROOT
from tests.support.swept import outcome_of

folder = swept.folder


@pytest.mark.parametrize(
    ("timed", "values", "best"),
    [
        (True, (100.0, 101.9, 90.0), 0),  # better, but not clearly
        (True, (100.0, 102.1, 102.5), 2),
        (True, (None, 50.0, 51.0), 2),
        (True, (100.0, None), 0),
        (False, (2.0, 1.97, 3.0), 0),
        (False, (2.0, 1.5, 1.4), 2),
    ],
)
def test_the_default_stays_unless_another_is_clearly_better(timed: bool, values: Any, best: int) -> None:
    outcome = outcome_of(*values, timed=timed)
    assert outcome.best == [outcome.trials[best]]


def test_each_key_has_a_best_configuration() -> None:
    one, two = outcome_of(1.0, 3.0, 2.0), outcome_of(None, 1.0, key="unit=16,tiles=64")
    both = Sweep("cpu", True, [*two.trials[:1], *one.trials, *two.trials[1:]])
    assert both.best == [two.trials[1], one.trials[1]]
    assert both.ordered == [two.trials[1], two.trials[0], one.trials[1], one.trials[2], one.trials[0]]
    assert outcome_of(None, None).best == []
    near = outcome_of(1.0, 1.01)
    assert near.ordered == near.trials  # the chosen one first, though the other one is faster


def on_h100() -> Sweep:
    """Returns what an H100 has measured of the gated delta step, in configurations that still exist."""
    proofs = json.loads((ROOT / "benchmarks/results/nvidia-h100-80gb-hbm3/proofs.json").read_text())
    names = ("kernel", "key", "checked", "value", "unit", "why", "details")
    trials = [
        Trial(**{name: each[name] for name in names}, config=DeltaConfig(**each["config"]), micros=each["us"])
        for each in proofs["sweep"]["trials"] if each["config"].get("block_value", 0) >= LEAST_VALUES
    ]  # fmt: skip
    return Sweep("NVIDIA H100 80GB HBM3", True, trials)


def at(trial: Trial, batch: int, factor: float) -> Trial:
    """Returns a trial with another rate of a batch."""
    name = f"gated delta, {batch}"
    return replace(trial, details={**trial.details, name: factor * trial.details[name]})


def test_a_second_configuration_of_a_key_holds_from_the_rows_where_it_is_clearly_better(folder: Path) -> None:
    outcome = on_h100()
    plain, wide = outcome.trials[0], outcome.trials[5]
    assert wide.config == DeltaConfig(block_value=64)
    assert [(each.config, each.rows) for each in outcome.best] == [(plain.config, 1), (wide.config, 64)]
    assert [outcome.marks(each) for each in (plain, wide)] == [["chosen", "default"], ["chosen from 64 rows"]]
    path = outcome.store(folder)
    values = [each["value"] for each in tuned_files.read(path)["entries"]]
    assert values == pytest.approx([plain.value, wide.details["gated delta, 64"]])
    shipped = tuned_files.read(ROOT / "kernels" / "tuned" / path.name)["entries"]
    assert values == pytest.approx([each["value"] for each in shipped if each["kernel"] == "gated_delta"])
    for trials, rows in (
        ([plain, at(wide, 64, 0.93)], []),  # better, but not clearly
        ([plain, at(wide, 8, 1.25)], [8]),
        ([plain, at(at(wide, 1, 1.2), 64, 0.93)], []),  # clearly better for few rows only
        ([plain, replace(wide, config=DeltaConfig(1024, 64))], []),  # may have other bits
        ([plain, replace(wide, value=None)], []),
        ([replace(each, unit=UNIT) for each in (plain, wide)], []),
    ):
        assert [each.rows for each in replace(outcome, trials=trials).best[1:]] == rows


def test_the_table_has_the_best_first_and_the_excluded_last() -> None:
    table = outcome_of(None, 1.0, 3.0, 2.0).table()
    assert [row["time"] for row in table] == ["3 us", "2 us", "1 us", ""]
    assert [row["rate"] for row in table] == ["3 B/s", "2 B/s", "1 B/s", ""]
    assert [row["note"] for row in table] == ["chosen", "", "", "spills 8 bytes"]
    assert table[0]["configuration"] == "programs_per_sm=8 warps=4 entries=256 lanes=4096"
    assert outcome_of(3.0, 1.0).table()[0]["note"] == "chosen, default"


def test_a_ranked_table_has_weights_and_says_that_nothing_was_timed() -> None:
    outcome = outcome_of(2.0, 1.2345, None, timed=False, device="sm_90")
    assert [row["weight"] for row in outcome.table()] == [1.23, 2.0, None]
    assert outcome.table()[0].keys() >= {"registers", "programs"}
    said = "sm_90, NOT timed (no GPU): ranked by compiled code, launches keep their defaults"
    assert outcome.title == said and repr(outcome).splitlines()[0] == said
    wrong = [*outcome.trials[:2], replace(outcome.trials[2], checked=False)]
    broken = replace(outcome, trials=wrong, complete=False, resumed=2)
    assert broken.title == f"{said}; 1 WRONG; INCOMPLETE; 2 of 3 from the file" and type(broken) is Sweep
    assert "spills 8 bytes" in outcome._repr_html_()


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_bars_mark_the_chosen_and_the_default(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcome = outcome_of(2.0, 1.0, None, 3.0, timed=False)
    figure = outcome.plot()
    (axes,) = figure.axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert ["(chosen)" in name for name in names] == [True, False, False]
    assert ["(default)" in name for name in names] == [False, True, False]
    assert "1 excluded" in axes.get_title(loc="left") and axes.get_xlabel() == f"{UNIT}: less is better"
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0, 3.0]
    assert "NOT timed" in figure.get_suptitle() and "incomplete" not in figure.get_suptitle()
    (axes,) = outcome_of(2.0, 3.0).plot().axes
    assert axes.get_xlabel() == "device time of a call, us"
    (axes,) = outcome_of(2.0, 1.97, timed=False).plot().axes
    assert [bar.get_width() for bar in axes.patches] == [1.97, 2.0]  # the shortest first, whichever is chosen
    (axes,) = on_h100().plot().axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    chosen = [bar.get_facecolor() for bar, name in zip(axes.patches, names, strict=True) if "(chosen" in name]
    assert len(chosen) == 2 and chosen[0] == chosen[1] != axes.patches[-2].get_facecolor()
    figure.savefig(tmp_path / "sweep.svg")
    assert (tmp_path / "sweep.svg").stat().st_size > 1000


def test_a_map_has_a_cell_for_two_values() -> None:
    pytest.importorskip("matplotlib")
    outcome = outcome_of(2.0, 3.0, 1.0, None, 4.0, 5.0, 1.5, timed=False)
    (axes,) = outcome.plot("heat").axes
    assert (axes.get_ylabel(), axes.get_xlabel().split()[0]) == ("entries", "warps")
    columns, rows = ([text.get_text() for text in each] for each in (axes.get_xticklabels(), axes.get_yticklabels()))
    cells = {(columns[int(x)], rows[int(y)]): text.get_text() for text in axes.texts for x, y in [text.get_position()]}
    assert cells == {  # the cell of the default has two more configurations: the best is shown
        ("2", "256"): "1\nchosen", ("8", "256"): "3", ("4", "256"): "1.5\ndefault", ("4", "128"): "4",
        ("4", "512"): "excluded",
    }  # fmt: skip


@pytest.mark.parametrize(("values", "kind"), [((1.0,), "bar"), ((), "bars")])
def test_a_picture_of_another_kind_or_of_nothing_is_refused(values: Any, kind: str) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"plot '{kind}' of {len(values)} trials: expected trials, and bars, heat"
    ):
        outcome_of(*values).plot(kind)


def test_a_picture_that_cannot_be_drawn_is_known_before_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    require_plot(Path("a.svg"))
    with pytest.raises(InvalidArgument, match=r"a.txt: expected a name that ends with .svg, .png, .pdf"):
        require_plot(Path("a.txt"))
    for name in ("matplotlib", "memstate.viz.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidArgument):
        require_plot(Path("a.svg"))

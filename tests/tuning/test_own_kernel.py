"""Tests sweeps of a kernel of one's own: a right one is ranked, faults are named, trials stay until something changes.

The kernel is tests/support/running_mean.py, or that file with edits.
"""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from memstate.errors import InvalidArgument
from memstate_tools import tuning
from memstate_tools.tuning import check
from memstate_tools.tuning.cost import UNIT
from memstate_tools.tuning.result import MARGIN, Trial
from tests.support.processes import ended, in_child
from tests.support.running_mean import running_mean
from tests.support.written import HELPED, imported, source

STATE_STORE = "tl.store(state_ptr + write.to(tl.int64) * size + lane, mean, mask=inside & (write > 0))"
OUT_STORE = "tl.store(out_ptr + at, tl.where(write > 0, mean, 0.0), mask=inside)"
RETURNED = {
    "num_warps=warps)\n": "num_warps=warps)\n    return out * 2\n",
    "] = mean\n\n": "] = mean\n    return out\n\n",
}
IN_TUPLES = {
    "num_warps=warps)\n": "num_warps=warps)\n    return 0, out * 2\n",
    "] = mean\n\n": "] = mean\n    return 0, out\n\n",
}
torch.set_num_threads(1)  # a child of this process has none of its threads
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")
SMALL: Any = {"batches": [1, 3]}


def swept(folder: Path, edits: dict[str, str], **given: Any) -> tuning.Sweep:
    """Sweeps the kernel with edits, as a process does that imports it for the first time."""
    return tuning.sweep(imported(folder, source(edits)).running_mean, **SMALL, **given)


# -- right and wrong kernels -------------------------------------------------------------------------------------------


def test_a_right_kernel_is_ranked_by_its_compiled_code() -> None:
    outcome = tuning.sweep(running_mean, **SMALL)
    assert [trial.text for trial in outcome.trials[:3]] == [
        "BLOCK=128 warps=1", "BLOCK=256 warps=1", "BLOCK=128 warps=2",
    ]  # fmt: skip
    assert all(trial.checked and trial.key == "size=208" for trial in outcome.trials) and not outcome.wrong
    assert [trial.why for trial in outcome.trials] == ["", "", "moves 64 bits a lane for sm_90, expected 128"]
    (best,) = outcome.best
    ranked = [trial for trial in outcome.trials if trial.value]
    assert best.value <= MARGIN * min(trial.value for trial in ranked) and best.unit == UNIT
    assert [trial.details["programs"] for trial in ranked] == [6, 3]  # three rows, of two blocks or one
    assert all(trial.details["spill_bytes"] == 0 < trial.details["registers"] for trial in ranked)
    assert (outcome.device, outcome.timed, outcome.complete, outcome.resumed) == ("sm_90", False, True, 0)


FAULTS = {
    "unmasked": ({STATE_STORE: STATE_STORE.replace("inside & ", "")}, r"(state|memory behind state)"),
    "padding": ({STATE_STORE: STATE_STORE.replace(" & (write > 0)", "")}, "state"),  # in slot 0, which nobody owns
    "slot": ({STATE_STORE: STATE_STORE.replace("write.to", "read.to")}, "state"),
    "unmasked too": (
        {OUT_STORE: OUT_STORE.replace("mask=inside", "mask=lane < 2 * size")},
        r"out(, memory behind out)?",
    ),
    "before": ({OUT_STORE: OUT_STORE + "\n    tl.store(x_ptr - 1 - row, 0.0)"}, "memory before x"),
    "input": ({OUT_STORE: OUT_STORE + "\n        tl.store(x_ptr + at, mean, mask=inside)"}, "x"),
    "sum": ({"* RATE": "* 0.26"}, "state, out"),
    "tokens": ({"for token in range(tl.load(tokens_ptr + row))": "for token in range(1)"}, "state, out"),
    "one row": ({"most, size = x.shape\n": "most, size = x.shape\n    size -= batch == 1\n"}, "state, out"),
    "result": (RETURNED, "the result"),
    "tuple": (IN_TUPLES, r"the result\[1\]"),
}


@pytest.mark.parametrize(("edits", "says"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_and_named(edits: dict[str, str], says: str, tmp_path: Path) -> None:
    outcome = swept(tmp_path, edits, limit=1)
    (trial,) = outcome.wrong
    assert trial.value is None and outcome.best == []
    said = rf"running_mean: {says} differs from the reference, batch [13], seed \d+: .+ numbers of .+, by up to .+"
    assert re.fullmatch(said, trial.why), trial.why


def test_what_only_one_of_two_returns_is_not_compared(tmp_path: Path) -> None:
    assert swept(tmp_path, dict([*RETURNED.items()][:1]), limit=1).wrong == []


def test_a_kernel_that_raises_is_named(tmp_path: Path) -> None:
    (trial,) = swept(tmp_path, {"row, lane = ": "row, lane = 1 // 0, "}, limit=1).trials
    assert trial.why.startswith("running_mean raises InterpreterError: ") and not trial.checked


def test_a_kernel_that_is_wrong_for_many_rows_only_is_found(tmp_path: Path) -> None:
    kernel = imported(tmp_path, source({"most, size = x.shape\n": "most, size = x.shape\n    size -= batch > 4\n"}))
    (trial,) = tuning.sweep(kernel.running_mean, limit=1).wrong
    assert "batch 8" in trial.why


def test_a_tensor_that_was_computed_has_poison_around_it(tmp_path: Path) -> None:
    computed = {"make.normal(batch, TOKENS, SIZE)": "make.normal(batch, TOKENS, SIZE).abs()"}
    assert swept(tmp_path, computed, limit=1).wrong == []
    (trial,) = swept(
        tmp_path, computed | {OUT_STORE: OUT_STORE + "\n    tl.store(x_ptr - 1 - row, 0.0)"}, limit=1
    ).wrong
    assert "memory before x" in trial.why


def test_a_launch_that_fails_for_one_configuration_ends_no_sweep(tmp_path: Path) -> None:
    outcome = swept(tmp_path, {"most, size = x.shape\n": "most, size = x.shape\n    assert BLOCK == 128\n"}, limit=2)
    assert [trial.checked for trial in outcome.trials] == [True, False]


def test_a_sweep_takes_no_random_number_of_the_process(tmp_path: Path) -> None:
    torch.manual_seed(5)
    swept(tmp_path, {}, limit=1)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))


def test_a_case_that_differs_from_call_to_call_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'running_mean': x differs between two cases of .* values from `make`"):
        swept(tmp_path, {"make.normal(batch, TOKENS, SIZE)": "make.empty(batch, TOKENS, SIZE).normal_()"})


def test_a_case_without_arguments_or_states_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'running_mean': `case` returned None, expected arguments by name"):
        tuning.sweep(replace(running_mean, case=lambda batch, make: None), **SMALL)
    with pytest.raises(InvalidArgument, match="'running_mean': `case` makes no tensor 'ssm', which `state` names"):
        tuning.sweep(replace(running_mean, state=["ssm"]), **SMALL)


# -- trials that stay in a file ----------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trials.jsonl"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The configurations that were checked, in order."""
    configs: list[str] = []
    usual = check.wrong

    def counted(config: Any, *given: Any) -> str:
        configs.append(Trial("", "", config, True, None, "").text)
        return usual(config, *given)

    monkeypatch.setattr(import_module("memstate_tools.tuning.sweep"), "wrong", counted)
    return configs


def test_trials_of_an_earlier_sweep_are_not_made_again(file: Path, made: list[str]) -> None:
    seen: list[Trial] = []
    first = tuning.sweep(running_mean, file=file, **SMALL)
    again = tuning.sweep(running_mean, file=str(file), report=seen.append, **SMALL)
    assert len(made) == len(first.trials) == 3 and (first.resumed, again.resumed) == (0, 3)
    assert again.trials == first.trials == seen and "; 3 of 3 from the file" in again.title
    assert tuning.sweep(running_mean, file=file, space={"warps": [1, 2]}, **SMALL).resumed == 3
    for other in ({"batches": [1]}, {"batches": [3, 1, 2]}, {"target": "sm_80"}):
        assert tuning.sweep(running_mean, file=file, limit=1, **SMALL | other).resumed == 0
    assert tuning.sweep(running_mean, file=file, batches=[3, 1]).resumed == 3


@pytest.mark.parametrize(
    ("edit", "again"),
    [
        (("    return RATE\n", "    return RATE * 1.0\n"), True),  # a function that the kernel calls
        (("return triton.cdiv(size, block)", "return triton.cdiv(size + 0, block)"), True),  # in a lambda of the launch
        (("    return number\n", "    return 1 * number\n"), True),  # in a generator of the reference
        (("tl.constexpr(0.25)", "tl.constexpr(0.5)"), True),  # a constant of the kernel
        (("DTYPE = torch.float32", "DTYPE = torch.bfloat16"), True),  # a constant of the case
        (("kept[0] > 0 else 0", "kept[0] > 0 else 0.0"), True),  # the reference
        (("make.like(x)", "make.normal(batch, TOKENS, SIZE)"), True),  # the case
        (("twice * given", "1 * twice * given"), True),  # the function of the key
        (("plus=0", "plus=0, twice=1"), True),  # and what is bound to it
        (('state=["state"]', "state=[]"), True),
        (("lambda given: 9 if", "lambda given: 8 if"), True),  # the bytes
        (("BLOCK=BLOCK", "BLOCK=BLOCK + 0"), True),  # the launch
        (("    return RATE\n", "    # a comment\n    return (\n        RATE  # and one more\n    )\n"), False),
        (('    """Moves', '    """It moves'), False),
        (("    return size\n", "    return 2 * size\n"), False),  # nobody calls it
    ],
    ids=lambda given: "" if isinstance(given, bool) else given[1].strip(),
)
def test_an_edit_makes_trials_again_unless_it_is_a_comment(
    edit: tuple[str, str], again: bool, tmp_path: Path, file: Path, made: list[str]
) -> None:
    text = source(HELPED)
    assert edit[0] in text
    tuning.sweep(imported(tmp_path, text).running_mean, file=file, limit=2, **SMALL)
    outcome = tuning.sweep(imported(tmp_path, text.replace(*edit)).running_mean, file=file, limit=2, **SMALL)
    assert (len(made), outcome.resumed) == ((4, 0) if again else (2, 2))


SPACE = {"BLOCK": (128, 256), "warps": (1, 2, 4)}
wider = replace(running_mean, space=SPACE)


def test_a_stopped_sweep_goes_on_where_it_stopped(file: Path, made: list[str]) -> None:
    seen: list[Trial] = []
    first = tuning.sweep(wider, file=file, report=seen.append, stop=lambda: len(seen) == 3, **SMALL)
    assert (len(first.trials), first.complete) == (3, False) and "; INCOMPLETE" in first.title
    before = made.copy()
    second = tuning.sweep(wider, file=file, **SMALL)
    assert second.complete and second.resumed == 3 and list(second.trials[:3]) == seen
    assert made[len(before) :] == [trial.text for trial in second.trials[3:]] and len(made) == len(second.trials) == 4


@pytest.mark.parametrize("left", [1, 4, 30], ids="{} bytes of the last line".format)
def test_a_killed_process_loses_the_line_that_it_was_writing(left: int, file: Path, made: list[str]) -> None:
    def killed_in(number: int) -> Callable[[Trial], None]:
        seen: list[Trial] = []

        def report(trial: Trial) -> None:
            seen.append(trial)
            if len(seen) == number:
                os._exit(9)

        return report

    child = in_child(lambda: tuning.sweep(wider, file=file, report=killed_in(3), **SMALL))
    assert ended(child) == 9
    *whole, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole) + last[:left])
    second = tuning.sweep(wider, file=file, **SMALL)
    assert (len(whole), second.resumed) == (2, 2) and made == [trial.text for trial in second.trials[2:]]
    assert tuning.sweep(wider, file=file, **SMALL).resumed == len(second.trials) == 4


@pytest.mark.parametrize("text", ["{}", "[1]\n", "hello", '{"of": "1"}\nhello\n', '"of"\n{"of'])
def test_a_file_of_something_else_is_refused_and_stays(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=r"trials.jsonl', line [12]: .* is no trial: name another file"):
        tuning.sweep(running_mean, file=file, **SMALL)
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "trials.jsonl"):
        with pytest.raises(InvalidArgument, match=f"file '{path}': "):
            tuning.sweep(running_mean, file=path, **SMALL)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match=r"file .*bytes': .*utf-8"):
        tuning.sweep(running_mean, file=tmp_path / "bytes", **SMALL)


def test_a_line_has_all_of_a_trial(file: Path) -> None:
    (trial,) = tuning.sweep(running_mean, file=file, limit=1, **SMALL).trials
    line = json.loads(file.read_text())
    assert line.pop("of") and line == vars(trial) | {"config": {"BLOCK": 128, "warps": 1}}

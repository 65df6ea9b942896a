"""Runs SGLang's own tests twice, with SGLang's classes and with memstate's, and compares the outcomes.

    SGLANG_TESTS=<a source tree of SGLang> python -m tests.proof.sglang_tests [PATH...]

It needs the environment of docs/sglang.md, and a source tree of the installed version. PATHs are relative to this tree.
The default is the tests of slots, pools, prefix cache and sessions. A *side* is a run in its own process, either with
SGLang's classes or with memstate's. A module that a side cannot import is reported with the reason, and the rest runs.

Exits with 0 if every test that passes with SGLang's classes also passes with memstate's, with 1 if one does not, and
with 2 if no test could be compared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

FILES = (
    "mem_cache/test_mamba_slot_allocator.py",
    "mem_cache/test_mamba_unittest.py",
    "mem_cache/test_mamba_donated_alloc_ratio.py",
    "mem_cache/test_mamba_path_state_cap.py",
    "mem_cache/test_replayssm_ring_accounting.py",
    "mem_cache/test_unified_radix_cache_unittest.py",
    "mem_cache/test_streaming_session_unit.py",
    "managers/test_batch_result_processor_mamba_boundary.py",
    "managers/test_mamba_checkpoint_depth.py",
)
UNIT = "test/registered/unit"
ROOT = Path(__file__).parents[2]
SIDES = ("theirs", "ours")
BEFORE = (  # these modules must import SGLang's classes before memstate's classes replace them
    "sglang.srt.disaggregation.decode",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.mem_cache.unified_radix_cache",
)
PASSED = "passed"


@dataclass
class Side:
    """The results of one side. tests: test -> outcome; not_run: file or module -> reason."""

    tests: dict[str, str] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)


class Notes:
    """A plugin of pytest that writes each outcome at once, so that no outcome is lost in a crash."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collectreport(self, report: Any) -> None:
        """Notes that a file of tests cannot be imported, or that it skips all of its tests."""
        if not report.passed:
            self.write(not_run=report.nodeid, why=_reason(report.longrepr))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes the outcome of a test, and a failed setup or teardown."""
        if report.when == "call" or not report.passed:
            self.write(test=report.nodeid, outcome=report.outcome)


def _reason(told: Any) -> str:
    """Returns the error in a report of pytest, or the last line of the report."""
    lines = str(told[-1] if isinstance(told, tuple) else told).strip().splitlines() or ["no reason given"]
    return next((line for line in lines if line.startswith("E ")), lines[-1]).removeprefix("E").strip()


def run_side(side: str, tree: str, paths: list[str], notes: Notes) -> int:
    """Runs the tests of one side in this process. Returns the exit code of pytest."""
    import pytest

    def tried(name: str) -> Any:
        try:
            return import_module(name)
        except Exception as error:  # an import may raise anything
            notes.write(not_run=name, why=f"{type(error).__name__}: {error}")
            return None

    if standing_in := tried("memstate_tools.bench.no_torchvision"):
        standing_in.leave_out_torchvision()
    for name in BEFORE:
        tried(name)
    torch, utils = tried("torch"), tried("sglang.srt.utils")
    if utils and torch and not torch.cuda.is_available():
        utils.get_device = utils.common.get_device = lambda *_: "cpu"
    place: Any = nullcontext()
    if side == "ours":
        try:
            place = import_module("memstate.integrations.sglang").in_place()
        except Exception as error:  # no test can use memstate's classes
            notes.write(not_run="everything", why=f"{type(error).__name__}: {error}")
            return 2
    options = ["-q", "-rfE", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--rootdir", tree]
    with place:
        return int(pytest.main([*options, *(str(Path(tree, path)) for path in paths)], plugins=[notes]))


def side_of(side: str, tree: str, paths: list[str]) -> Side:
    """Runs the tests of one side in a new process, and returns the results."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines")
        lines.touch()
        command = [sys.executable, "-m", "tests.proof.sglang_tests", "--side", side, "--notes", str(lines), *paths]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        results = read([json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()])
    if status < 0:
        results.not_run["what was left"] = f"the process ended with signal {-status}"
    return results


def read(lines: list[dict[str, str]]) -> Side:
    """Returns the noted outcomes. If the teardown of a test fails, the test has failed."""
    side = Side()
    for line in lines:
        if "test" in line:
            worse = side.tests.get(line["test"], PASSED) == PASSED
            side.tests[line["test"]] = line["outcome"] if worse else side.tests[line["test"]]
        else:
            side.not_run[line["not_run"]] = line["why"]
    return side


def compared(theirs: Side, ours: Side) -> tuple[list[str], int]:
    """Compares both sides. Returns the lines to print, and the exit status."""
    good = {test for test, outcome in theirs.tests.items() if outcome == PASSED}
    both = [test for test in good if ours.tests.get(test) == PASSED]
    bad = sorted(good - set(both))
    also = sorted(test for test, outcome in ours.tests.items() if outcome == PASSED and test not in good)
    neither = len((theirs.tests.keys() | ours.tests.keys()) - good) - len(also)
    said = [
        f"not run with {side}: {name}: {why}"
        for side, results in zip(SIDES, (theirs, ours), strict=True)
        for name, why in results.not_run.items()
    ]
    if not good or not ours.tests:
        return [*said, "nothing compared: no test passed with SGLang's classes, or none ran with ours"], 2
    said += [f"passes with theirs alone: {test} (ours: {ours.tests.get(test, 'not run')})" for test in bad]
    said += [f"passes with ours alone: {test} (theirs: {theirs.tests.get(test, 'not run')})" for test in also]
    counts = f"{len(both)} of {len(good)} tests that pass with SGLang's classes pass with ours"
    said.append(f"{counts}; {len(also)} with ours alone, {neither} on neither side")
    return said, 1 if bad else 0


def main() -> int:
    """Runs the program. Returns its exit status."""
    parser = argparse.ArgumentParser("python -m tests.proof.sglang_tests")
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    tree = os.environ.get("SGLANG_TESTS")
    if not tree or not Path(tree).is_dir():
        print(f"SGLANG_TESTS={tree or ''}: give the folder of SGLang's sources", file=sys.stderr)
        return 2
    paths = given.paths or [f"{UNIT}/{file}" for file in FILES if Path(tree, UNIT, file).exists()]
    if missing := [path for path in paths if not Path(tree, path).exists()] or ([] if paths else [UNIT]):
        print(f"SGLANG_TESTS={tree} has no {', '.join(missing)}: give paths in it", file=sys.stderr)
        return 2
    if given.side:
        return run_side(given.side, tree, paths, Notes(given.notes))
    said, status = compared(*(side_of(side, tree, paths) for side in SIDES))
    print("\n".join(said), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Runs some of the tests marked `gpu` and reports each, in several processes if pytest-xdist is installed.

All tests, about three thousand, would take more time than there is. `collecting.RULE` chooses among them.
"""

import json
import os
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from tests.proof.gpu.collecting import RULE
from tests.proof.gpu.machine import Machine, Result
from tests.proof.gpu_proof import limited

PROCESSES = 12
TOY = "tests/state/test_split.py"  # the tests that run at toy sizes
MARGIN = 12.0  # seconds kept for the end of the session and the reports
NO_TESTS = 5  # exit status of pytest


def command(machine: Machine, report: Path) -> list[str]:
    """Returns the command of pytest. It must run in the root of the checkout."""
    given = [
        sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-p",
        "tests.proof.gpu.collecting",
    ]  # fmt: skip
    given += ["--continue-on-collection-errors", f"--junitxml={report}"]
    if machine.toy:
        return [*given, TOY]
    workers = min(PROCESSES, os.cpu_count() or 1)
    return [*given, *(("-n", str(workers), "--dist", "loadgroup") if find_spec("xdist") else ()), "-m", "gpu", "tests"]


def summed_up(lines: list[dict[str, object]]) -> Result:
    """Returns counts of outcomes, the failures, and the left-out files. A test that fails twice counts once."""
    tests = {str(line["test"]): line for line in lines if "test" in line and line["outcome"] != "passed"}
    passed = {str(line["test"]) for line in lines if line.get("outcome") == "passed"} - tests.keys()
    counts = Counter(str(line["outcome"]) for line in tests.values())
    bad = {name: str(line["why"]) for name, line in tests.items() if line["outcome"] in ("failed", "error")}
    told = next((line for line in lines if "chosen" in line), {})
    done = len(passed) + len(tests)
    result: Result = {"incomplete": f"{done} of {told.get('chosen', 'the chosen')} tests"} if _over(lines) else {}
    result |= {"chosen": told["chosen"], "marked": told["marked"], "rule": RULE} if told else {}
    return result | {
        "passed": len(passed), **counts, "failures": [f"{name}: {why.strip()[-300:]}" for name, why in bad.items()],
        "left_out": {str(line["left_out"]): line["why"] for line in lines if "left_out" in line},
    }  # fmt: skip


def _over(lines: list[dict[str, object]]) -> bool:
    return any("time_is_up" in line for line in lines)


def cut(report: Path, most: int) -> None:
    """Shortens the texts of a report until it has at most `most` bytes."""
    length = 8000
    while report.stat().st_size > most and length > 50:
        tree = ElementTree.parse(report)
        for node in tree.iter():
            if node.text and len(node.text) > length:
                node.text = node.text[-length:]
        tree.write(report, encoding="unicode")
        length //= 4


def prove(machine: Machine, result: Result) -> None:
    """Runs the tests, and writes the report gpu-tests.xml into the folder of the result."""
    with tempfile.TemporaryDirectory() as folder:
        lines, report = Path(folder, "results"), machine.beside("gpu-tests.xml")
        environment = os.environ | {"PROOF_RESULTS": str(lines), "PROOF_SECONDS": str(max(1.0, machine.left - MARGIN))}
        if not machine.toy:
            environment.pop("TRITON_INTERPRET", None)
            environment |= {"MEMSTATE_PROOF": "1", "PROOF_CHOOSE": "1"}  # chooses among all cases
        status = None
        try:
            status = limited(command(machine, report), max(1.0, machine.left), environment, None)
        finally:  # runs even if the part itself is ended
            texts = lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
            result |= summed_up([json.loads(line) for line in texts]) | {"status": status}
        if report.exists():
            cut(report, 12 * 2**20)
        if status is None:
            result.setdefault("incomplete", f"{result['passed']} tests passed, then time was up")
        if "incomplete" in result:
            return
        if status == NO_TESTS or not result["passed"]:
            result["failures"].append("no test passed")
        elif status not in (0, 1) or (status == 1 and not result["failures"]):
            result["failures"].append(f"pytest ended with status {status}: broken; see the log")

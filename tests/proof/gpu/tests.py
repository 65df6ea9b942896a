"""A set of the tests marked `gpu`, with a report of every one; several processes where pytest-xdist is there.

There are about three thousand of them, which take longer than the part has. The rule that chooses is `collecting.RULE`.
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
from tests.proof.gpu.machine import Machine, Result, main
from tests.proof.gpu_proof import limited

PROCESSES = 12
TOY = "tests/state/test_split.py"  # what stands in for them on a CPU
MARGIN = 12.0  # seconds in which the session ends and reports are written
NO_TESTS = 5  # exit status of pytest


def command(machine: Machine, report: Path) -> list[str]:
    """What is run, from the root of the checkout."""
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
    """Counts of outcomes, what failed and why, and what was left out; a test that fails twice counts once."""
    tests = {str(line["test"]): line for line in lines if "test" in line and line["outcome"] != "passed"}
    passed = {str(line["test"]) for line in lines if line.get("outcome") == "passed"} - tests.keys()
    counts = Counter(str(line["outcome"]) for line in tests.values())
    bad = {name: str(line["why"]) for name, line in tests.items() if line["outcome"] in ("failed", "error")}
    told = next((line for line in lines if "chosen" in line), {})
    done = len(passed) + len(tests)
    found: Result = {"incomplete": f"{done} of {told.get('chosen', 'the chosen')} tests"} if _over(lines) else {}
    found |= {"chosen": told["chosen"], "marked": told["marked"], "rule": RULE} if told else {}
    return found | {
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
    """The report goes beside the part's own file, as gpu-tests.xml."""
    with tempfile.TemporaryDirectory() as folder:
        lines, report = Path(folder, "results"), machine.beside("gpu-tests.xml")
        environment = os.environ | {"PROOF_RESULTS": str(lines), "PROOF_SECONDS": str(max(1.0, machine.left - MARGIN))}
        if not machine.toy:
            environment.pop("TRITON_INTERPRET", None)
            environment |= {"MEMSTATE_PROOF": "1", "PROOF_CHOOSE": "1"}  # among all cases
        status = None
        try:
            status = limited(command(machine, report), max(1.0, machine.left), environment, None)
        finally:  # also where the part itself is ended
            found = lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
            result |= summed_up([json.loads(line) for line in found]) | {"status": status}
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


if __name__ == "__main__":
    main(prove)

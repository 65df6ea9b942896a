"""Runs tests on a copy of the project with one mutant in it, and says what became of the mutant."""

import difflib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple
from xml.etree import ElementTree

from tests.proof.mutation.catalogue import Mutant

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("memstate", "kernels", "tools", "tests", "examples", "pyproject.toml")
OPTIONS = "-q", "-p", "no:cacheprovider", "-p", "no:xdist"
SAID, TAIL = 300, 2000  # numbers of characters kept of the message of a failing test, and of the output
NOT_LINKED = {".git", ".venv", ".hypothesis", "build", "dist", "mutants", "shared", *COPIED}
SEED = 7  # fixed: the killer must not pass or fail by chance
DEAD = "killed", "crashed"  # both count as noticed: a wrong address may end the process
# Errors of mutants that are no valid Python. Their failure says nothing about the tests.
BROKEN = ("SyntaxError", "IndentationError", "NameError", "ImportError", "ModuleNotFoundError", "UnboundLocalError")


class Stale(Exception):
    """Raised if the old text of a mutant does not occur exactly once in its file."""


class Verdict(NamedTuple):
    """The fate of a mutant.

    fate: killed, survived, timed out, crashed, broken or error. failed: (test, message) of each failed test. passed:
    number of passed tests. output: last part of the output of pytest.
    """

    fate: str
    failed: list[tuple[str, str]]
    passed: int
    seconds: float
    output: str

    @property
    def finished(self) -> bool:
        """Whether all tests have run."""
        return self.fate in ("killed", "survived")

    def __str__(self) -> str:
        said = [f"  {test}: {message}" for test, message in self.failed[:5]]
        tail = [] if self.finished else [self.output]
        return "\n".join([f"{self.fate} after {self.seconds:.1f} s, {self.passed} tests passed", *said, *tail])


class Runner:
    """A copy of the project in a temporary folder, in which tests run."""

    def __init__(self, root: Path = ROOT) -> None:
        self.scratch = Path(mkdtemp(prefix="memstate-mutants-"))
        self.root = self.scratch / "tree"
        self.root.mkdir()
        for path in root.iterdir():
            target = self.root / path.name
            if path.is_dir() and path.name in COPIED:
                shutil.copytree(path, target, symlinks=True)
            elif path.name in COPIED:
                shutil.copy2(path, target)
            elif path.name not in NOT_LINKED and not path.name.endswith("_cache"):
                target.symlink_to(path)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self.scratch)

    def source(self, mutant: Mutant) -> str:
        """Returns the source of the file that a mutant changes. Raises: Stale."""
        path = self.root / mutant.file
        text = path.read_text() if path.is_file() else ""
        if text.count(mutant.old) != 1:
            raise Stale(
                f"mutant {mutant.name!r}: its old text is {text.count(mutant.old)} times in {mutant.file}, expected "
                f"once; mutate what stands there now:\n{mutant.old}"
            )
        return text

    def diff(self, mutant: Mutant) -> str:
        """Returns the diff of a mutant. Raises: Stale."""
        before = self.source(mutant)
        after = before.replace(mutant.old, mutant.new)
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), mutant.file, mutant.file, "", "", 1, "")
        return "\n".join(lines)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Puts a mutant into the copy during the block. Raises: Stale."""
        text, path = self.source(mutant), self.root / mutant.file
        at = path.stat().st_mtime
        path.write_text(text.replace(mutant.old, mutant.new))
        os.utime(path, (at + 1000, at + 1000))  # to see whether a file has changed, Python compares whole seconds
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, (at, at))

    def killer(self, mutant: Mutant, limit: float) -> Verdict:
        """Runs the test that must fail for a mutant. Its random inputs are the same in every run.

        Kernels are compiled if the mutant says so. limit: seconds. Raises: Stale.
        """
        with self.mutated(mutant):
            return self._pytest(["-x", f"--hypothesis-seed={SEED}", mutant.killer], limit, SEED, mutant.compiled)

    def run(self, mutant: Mutant | None, tests: Sequence[str], limit: float, seed: int | None = None) -> Verdict:
        """Runs tests with a mutant or without one. Random inputs are new, unless a seed is given.

        limit: seconds. Raises: Stale.
        """
        with self.mutated(mutant) if mutant else nullcontext():
            return self._pytest(tests, limit, seed)

    def _pytest(
        self, arguments: Sequence[str], limit: float, seed: int | None = None, compiled: str = ""
    ) -> Verdict:  # fmt: skip
        """Runs pytest in the copy. At the limit, kills it with all its processes."""
        report, began = self.scratch / "report.xml", time.monotonic()
        report.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "MEMSTATE"))}
        environment |= {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # files change and change back within one second
        if seed is not None:
            environment["MEMSTATE_SEED"] = str(seed)
        if compiled:
            environment["MEMSTATE_COMPILED"] = compiled
        places = f"--rootdir={self.root}", f"--basetemp={self.scratch / 'pytest'}", f"--junitxml={report}"
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *OPTIONS, *places, *arguments], cwd=self.root, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        fate = "error"
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, fate = process.communicate()[0], "timed out"
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        failed = [(case, bad) for case in cases for bad in (*case.findall("failure"), *case.findall("error"))]
        said = [(f"{case.get('classname')}::{case.get('name')}", bad.get("message", "")[:SAID]) for case, bad in failed]
        passed = sum(not any(case.findall(end) for end in ("failure", "error", "skipped")) for case in cases)
        if process.returncode == 0 and passed:
            fate = "survived"
        elif process.returncode == 1 and said:
            fate = "broken" if all(any(name in text for name in BROKEN) for _, text in said) else "killed"
        elif process.returncode < 0 and fate == "error":
            fate = "crashed"
        return Verdict(fate, said, passed, time.monotonic() - began, output[-TAIL:])

"""Runs tests on a copy of the project with one mutant in it, and says what became of the mutant."""

import difflib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import NamedTuple

from tests.proof.mutation.mutant import Mutant

ROOT = Path(__file__).resolve().parents[3]
COPIED = ("memstate", "kernels", "tests", "pyproject.toml")
NOT_LINKED = {".git", ".venv", ".hypothesis", "build", "dist", "shared", *COPIED}
SEED = 7  # whether the one test kills a mutant may not be chance
# A mutant that is no Python, or names what is not there, says nothing of the tests that notice it.
BROKEN = ("SyntaxError", "IndentationError", "NameError", "ImportError", "ModuleNotFoundError", "UnboundLocalError")


class Stale(Exception):
    """A mutant whose old text is not there exactly once: mutate what stands there now."""


class Verdict(NamedTuple):
    """What became of a mutant.

    fate: killed, survived, timed out, crashed, broken or error. failed: (test, what it said).
    """

    fate: str
    failed: list[tuple[str, str]]
    passed: int
    seconds: float
    output: str

    def __str__(self) -> str:
        said = [f"  {test}: {message}" for test, message in self.failed[:5]]
        tail = [] if self.fate in ("killed", "survived") else [self.output]
        return "\n".join([f"{self.fate} after {self.seconds:.1f} s, {self.passed} tests passed", *said, *tail])


class Tree:
    """A copy of the files that tests read, in a folder that goes with it."""

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

    def source(self, mutant: Mutant) -> str:
        """The text that a mutant changes. Raises: Stale."""
        path = self.root / mutant.file
        text = path.read_text() if path.is_file() else ""
        if text.count(mutant.old) != 1:
            raise Stale(
                f"mutant {mutant.name!r}: its old text is {text.count(mutant.old)} times in {mutant.file}, expected "
                f"once; mutate what stands there now:\n{mutant.old}"
            )
        return text

    def diff(self, mutant: Mutant) -> str:
        """What a mutant changes, as lines. Raises: Stale."""
        before = self.source(mutant)
        after = before.replace(mutant.old, mutant.new)
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), mutant.file, mutant.file, "", "", 1, "")
        return "\n".join(lines)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """The tree with a mutant in it. Raises: Stale."""
        text, path = self.source(mutant), self.root / mutant.file
        at = path.stat().st_mtime
        path.write_text(text.replace(mutant.old, mutant.new))
        os.utime(path, (at + 1000, at + 1000))  # compiled Python is told apart by whole seconds
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, (at, at))

    def remove(self) -> None:
        """Deletes the copy."""
        shutil.rmtree(self.scratch)


class Runner:
    """A tree and a warm process, its own or that of another runner, which asks one thing at a time as well."""

    def __init__(self, root: Path = ROOT, beside: "Runner | None" = None) -> None:
        self.tree, self._beside = Tree(root), beside
        if beside:
            self._process = beside._process
            return
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        program = str(Path(__file__).with_name("warm.py"))
        self._process = subprocess.Popen(
            [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin and self._process.stdout
        if not self._beside:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
        self.tree.remove()

    def killer(self, mutant: Mutant, limit: float) -> Verdict:
        """Runs the one test that must fail for a mutant, with random inputs that are the same every time.

        limit: seconds. Raises: Stale.
        """
        with self.tree.mutated(mutant):
            return self._ask(["-x", f"--hypothesis-seed={SEED}", mutant.killer], limit, SEED)

    def run(self, mutant: Mutant | None, tests: Sequence[str], limit: float) -> Verdict:
        """Runs tests with a mutant in the tree, or without one, with fresh random inputs.

        limit: seconds. Raises: Stale.
        """
        with self.tree.mutated(mutant) if mutant else nullcontext():
            return self._ask(tests, limit, None)

    def _ask(self, arguments: Sequence[str], limit: float, seed: int | None) -> Verdict:
        assert self._process.stdin and self._process.stdout
        asked = {"root": str(self.tree.root), "scratch": str(self.tree.scratch), "arguments": arguments, "limit": limit}
        asked["seed"] = None if seed is None else str(seed)
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        found = json.loads(self._process.stdout.readline())
        failed = [(test, said) for test, said in found["failed"]]
        fate = "timed out" if found["timed_out"] else "crashed" if found["crashed"] else "error"
        if found["exit"] == 0 and found["passed"]:
            fate = "survived"
        elif found["exit"] == 1 and failed:
            fate = "killed"
            if all(any(name in said for name in BROKEN) for _, said in failed):
                fate = "broken"
        return Verdict(fate, failed, found["passed"], found["seconds"], found["output"])

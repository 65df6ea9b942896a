"""A process that has imported what is slow to import and nothing of the project; a child of it runs tests.

Run as a program. A line of JSON asks for a run in a tree of files, and a line answers it:

    {"root": .., "scratch": .., "arguments": [..], "limit": seconds, "seed": text or null}
    {"exit": status or null, "failed": [[test, what was said]], "passed": n, "seconds": s, "output": the last lines,
     "timed_out": .., "crashed": ..}

`exit` is null where the limit ran out, or where the child came to an end without a word, such as by a wild address.
"""

import gc
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when kernels are imported, which happens in the children
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a context on a GPU does not survive a fork
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # files change and change back within one second
for name in [name for name in os.environ if name.startswith("PYTEST_")]:
    del os.environ[name]
sys.dont_write_bytecode = True

import einops  # noqa: E402, F401
import hypothesis  # noqa: E402, F401
import numpy  # noqa: E402
import numpy.typing  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language  # noqa: E402, F401

SAID = 300  # characters kept of what a failing test says
TAIL = 2000  # characters kept of the output


class Report:
    """What became of the tests of one run."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
            self.failed.append((report.nodeid, said[:SAID]))


def options(root: str, scratch: str) -> list[str]:
    """What every run of pytest is told: to keep nothing, and to look for nothing outside of its tree."""
    return ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", root, "--basetemp", f"{scratch}/pytest"]


def warm_up() -> None:
    """Imports the plugins of pytest, and what torch imports late, before the first fork."""
    torch.use_deterministic_algorithms(False)
    numpy.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        Path(folder, "test_nothing.py").write_text("def test_nothing(): pass\n")
        pytest.main([*options(folder, folder), "-c", os.devnull, "-qq", folder])
    gc.collect()
    gc.freeze()  # pytest collects twice a run: what was there before the fork is not looked at again


def run(root: str, scratch: str, arguments: list[str], seed: str | None) -> dict[str, Any]:
    """Runs pytest in a tree, in this process, which is good for nothing else then."""
    os.chdir(root)
    os.environ["PYTHONPATH"] = root  # for the processes that tests start
    os.environ.pop("MEMSTATE_SEED", None)
    os.environ.update({} if seed is None else {"MEMSTATE_SEED": seed})
    here = str(Path(__file__).parent)
    # The installed project is the tree that this file belongs to: only `root` may be found.
    sys.path[:] = [root, *(place for place in sys.path if place not in ("", here, str(Path(__file__).parents[3])))]
    assert "memstate" not in sys.modules and "tests" not in sys.modules
    report = Report()
    status = pytest.main([*options(root, scratch), *arguments], plugins=[report])
    strangers = [
        f"{name} from {module.__file__}"
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("memstate", "tests")
        and getattr(module, "__file__", None)
        and not str(module.__file__).startswith(root + os.sep)
    ]
    if strangers:
        print("\nnot of this tree:", *strangers)
        status = pytest.ExitCode.INTERNAL_ERROR
    return {"exit": int(status), "failed": report.failed, "passed": report.passed}


def fork(root: str, scratch: str, arguments: list[str], limit: float, seed: str | None) -> dict[str, Any]:
    """Runs pytest in a child, which is ended with all its processes when the limit runs out."""
    answer, output = Path(scratch, "answer.json"), Path(scratch, "output.txt")
    answer.unlink(missing_ok=True)
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.setsid()
        said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(said, number)
        status = 1
        try:
            answer.write_text(json.dumps(run(root, scratch, arguments, seed)))
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended and time.monotonic() - began < limit:
        time.sleep(0.005)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    found = json.loads(answer.read_text()) if ended and answer.exists() else {"exit": None, "failed": [], "passed": 0}
    tail = output.read_text(errors="replace")[-TAIL:]
    fate = {"timed_out": not ended, "crashed": bool(ended) and os.WIFSIGNALED(status)}
    return found | fate | {"seconds": time.monotonic() - began, "output": tail}


def main() -> None:
    """Answers line by line until there is no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warm_up()
    for line in sys.stdin:
        print(json.dumps(fork(**json.loads(line))), file=answers)


if __name__ == "__main__":
    main()

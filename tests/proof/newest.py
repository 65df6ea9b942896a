"""Runs the adapters' tests with the newest release of each package that an adapter or a preset names.

    python -m tests.proof.newest                   every package; the same as `make newest`
    python -m tests.proof.newest transformers      one package

The newest releases are installed in a separate environment, build/newest, with all other packages as in
constraints.txt. The tests run there and in the pinned environment. A test is lost if it passes only with the pinned
versions, also if it is skipped with the newest ones because an import fails. Ends with 1 if a test is lost.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "build" / "newest"
EXTRAS: Final = (
    "transformers",
    "events",
    "mooncake",
    "objects",
    "metrics",
    "proof",
)  # extras with packages of adapters
PEERS: Final = ("mamba-ssm", "causal-conv1d")  # built here without CUDA; their requirements are not installed
TESTS: Final = (
    "tests/integrations", "tests/events", "tests/metrics", "tests/kernels/test_mamba3.py",
    "tests/state/test_presets.py", "tests/tiers/test_mooncake_client.py", "tests/tiers/test_mooncake_store.py",
    "tests/tiers/test_stores.py", "tests/tiers/test_objects.py",
)  # fmt: skip
NO_CUDA: Final = {
    f"{peer}_{name}": "TRUE" for peer in ("MAMBA", "CAUSAL_CONV1D") for name in ("FORCE_BUILD", "SKIP_CUDA_BUILD")
}
VERSIONS: Final = """
import sys
from importlib.metadata import PackageNotFoundError, version
for name in sys.argv[1:]:
    try: print(name, version(name))
    except PackageNotFoundError: print(name, "none")
"""

Outcomes = dict[str, str]  # test -> "passed", "skipped", "failed"


class Side(NamedTuple):
    """An environment in which tests run.

    Attributes:
        python: its interpreter.
        variables: environment variables, besides those of this process.
    """

    python: Path | str
    variables: Mapping[str, str] = {}

    def run(self, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """Runs Python with arguments. Returns the ended process, with its output."""
        given = [str(self.python), *arguments]
        return subprocess.run(given, cwd=cwd, env=os.environ | self.variables, capture_output=True, text=True)

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the installed version of each package, or "none"."""
        return dict(line.split() for line in self.run("-c", VERSIONS, *names).stdout.splitlines())

    def outcomes(self, tests: Sequence[str], root: Path = ROOT) -> Outcomes:
        """Runs tests. Returns the outcome of each; a file that cannot be collected has failed.

        Args:
            tests: files or folders, relative to `root`, and options of pytest.
            root: the folder where pytest runs.

        Raises:
            SystemExit: pytest did not run.
        """
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
            done = self.run("-m", "pytest", *options, *tests, cwd=root)
            if not report.is_file():
                raise SystemExit(f"pytest did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            return {_name(case): _outcome(case) for case in ET.parse(report).iter("testcase")}


def _name(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}".strip(":")


def _outcome(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def lost(pinned: Outcomes, newest: Outcomes) -> Outcomes:
    """Returns the tests that pass only with the pinned versions: test -> outcome with the newest versions.

    Raises:
        SystemExit: no test passes with the pinned versions.
    """
    passed = [test for test, outcome in pinned.items() if outcome == "passed"]
    if not passed:
        raise SystemExit("no test passes with the pinned versions, so nothing was compared")
    return {test: outcome for test in passed if (outcome := newest.get(test, "not collected")) != "passed"}


def named() -> list[str]:
    """Returns the packages whose newest releases are tried: those that EXTRAS require, and PEERS."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = (re.match(r"[A-Za-z0-9_.-]+", line) for extra in EXTRAS for line in extras[extra])
    return [*dict.fromkeys(match[0] for match in listed if match), *PEERS]


def pins() -> dict[str, str]:
    """Returns package -> its exact version in constraints.txt."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def build(names: Sequence[str]) -> Side:
    """Builds and returns the environment build/newest: newest releases of some packages, all others pinned.

    Args:
        names: the packages to take the newest release of. If one cannot be installed, this is printed, and its tests
            are lost.

    Raises:
        CalledProcessError: pip could not install the pinned packages.
    """
    if not (FOLDER / "bin" / "python").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    held = FOLDER / "constraints.txt"
    free = {re.escape(name) for name in names}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    held.write_text("\n".join(line for line in lines if not re.match(rf"({'|'.join(free)})[=<>]", line)))
    pip = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(held)]
    torch = Side(sys.executable).versions(["torch"])["torch"].partition("+")[0]
    subprocess.run([*pip, f"torch=={torch}"], check=True)  # first, or pip would download a CUDA build of gigabytes
    subprocess.run([*pip, "-e", f"{ROOT}[cli,test]", "setuptools", "wheel"], check=True)
    for name in names:
        peer = name in PEERS
        options = ["--no-deps", "--no-build-isolation"] if peer else []
        if subprocess.run([*pip, "--upgrade", *options, name], env=os.environ | (NO_CUDA if peer else {})).returncode:
            print(f"{name}: its newest release cannot be installed here", flush=True)
    return Side(FOLDER / "bin" / "python")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the versions that are newer than in constraints.txt, and the lost tests. Returns 1 if a test is lost."""
    parser = argparse.ArgumentParser("tests.proof.newest", description=__doc__.partition("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {named()}; default: all")
    parser.add_argument("--workers", type=int, default=2, help="test processes")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.packages) - set(named()):
        parser.error(f"no adapter names {sorted(unknown)}: expected some of {named()}")
    newest, known = build(names := chosen.packages or named()), pins()
    for name, version in newest.versions(names).items():
        print(f"{name} {version}" + ("" if version == known.get(name) else f", pinned {known.get(name)}"), flush=True)
    options = [*TESTS, f"-n{chosen.workers}", "--dist=worksteal"]
    before, now = Side(sys.executable).outcomes(options), newest.outcomes(options)
    broken = lost(before, now)
    for test, outcome in broken.items():
        print(f"lost: {test}: {outcome}")
    print(
        f"{list(before.values()).count('passed')} tests pass with the pinned versions, {len(broken)} of them are lost"
    )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

"""Compiles every kernel with several versions of Triton, and compares the figures with the recorded ones.

    python -m tests.proof.compile_matrix              with the oldest supported version, the installed and the newest
    python -m tests.proof.compile_matrix 3.8.0        with this version
    python -m tests.proof.compile_matrix --record     writes tests/proof/compiled/triton-<version>.json for each version
    python -m tests.proof.compile_matrix --only _tail --record      only kernels with this text in their name

Versions that are not installed are first installed into build/triton/<version>.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import triton

from memstate.errors import CompileFailed
from memstate_tools.compile import TARGETS, KernelReport, compile_elsewhere
from memstate_tools.compile.accesses import WIDE_BITS

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "tests" / "proof" / "compiled"
TRITONS = ROOT / "build" / "triton"
INSTALLED: str = triton.__version__
VERSIONS = ("3.6.0", "installed", "newest")

# figure -> tolerated difference. The hardware allocates registers in eights, so a smaller difference after a change of
# a kernel does not matter.
FIGURES = {
    "registers": 8, "spill_bytes": 0, "shared_bytes": 0, "narrowest_bulk_access_bits": 0, "barriers": 0,
    "source_barriers": 0, "dependent_loads": 0, "instructions": 8, "bytes_in_flight": 0,
    "instructions_folded": 8, "instructions_verified": 8,
}  # fmt: skip

Figures = dict[str, int | None]
Record = dict[tuple[str, str], Figures]  # (kernel, target) -> figures


def figures(reports: Iterable[KernelReport]) -> Record:
    """Returns the figures to record of these reports, sorted by kernel, then in the order of TARGETS."""
    rows = {(report.kernel, report.target): {name: getattr(report, name) for name in FIGURES} for report in reports}
    return dict(sorted(rows.items(), key=_place))


def _place(entry: tuple[tuple[str, str], Figures]) -> tuple[str, int]:
    """Returns the key by which `figures` sorts an entry: the kernel, then the place of the target in TARGETS."""
    (kernel, target), _ = entry
    return kernel, list(TARGETS).index(target)


def path_of(version: str) -> Path:
    """Returns the path of the record of a version of Triton."""
    return RECORDS / f"triton-{version}.json"


def text_of(record: Record) -> str:
    """Returns a record as JSON with one line per kernel and target, so that a diff shows which kernels differ."""
    rows = [json.dumps({"kernel": kernel, "target": target} | row) for (kernel, target), row in record.items()]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def read(version: str) -> Record | None:
    """Returns the record of a version of Triton; None if there is none."""
    if not path_of(version).exists():
        return None
    rows = json.loads(path_of(version).read_text())
    return {(row.pop("kernel"), row.pop("target")): row for row in rows}


def differences(version: str, recorded: Record, compiled: Record) -> list[str]:
    """Returns a line for each figure that differs, and for each kernel that only one of the two records has."""
    lines = []
    for key in dict.fromkeys((*recorded, *compiled)):
        place = f"Triton {version}: {key[0]} on {key[1]}"
        if key not in compiled:
            lines.append(f"{place}: recorded, but there is no such kernel any more")
        elif key not in recorded:
            lines.append(f"{place}: a new kernel, which is not recorded")
        else:
            lines += [f"{place}: {line}" for line in _changes(recorded[key], compiled[key])]
    return lines


def _changes(recorded: Figures, compiled: Figures) -> Iterable[str]:
    for name, tolerance in FIGURES.items():
        before, now = recorded.get(name), compiled[name]
        same = before is now if before is None or now is None else abs(now - before) <= tolerance
        if not same:
            yield f"{name} {_text(now)}, recorded {_text(before)}"


def _text(figure: int | None) -> str:
    return "none" if figure is None else str(figure)


def faults(version: str, reports: Iterable[KernelReport]) -> list[str]:
    """Returns a line for each kernel that spills or moves planes in narrow pieces, even if the record says the same."""
    lines = []
    for report in reports:
        place, bits = f"Triton {version}: {report.kernel} on {report.target}", report.narrowest_bulk_access_bits
        if report.spill_bytes:
            lines.append(f"{place}: spill_bytes {report.spill_bytes}, must be 0")
        if (bits is not None and bits < WIDE_BITS) or not (report.ok or report.spill_bytes):
            lines.append(f"{place}: narrowest_bulk_access_bits {_text(bits)}, must be {WIDE_BITS}")
    return lines


def advice(version: str) -> str:
    """Returns the text that names the command which records intended differences."""
    return f"If this is meant: python -m tests.proof.compile_matrix {version} --record"


def newest() -> str:
    """Returns the newest version of Triton that pip finds."""
    said = _pip("index", "versions", "triton", failing="ask for the newest Triton")
    match = re.search(r"^triton \((\S+)\)", said, re.MULTILINE)
    if match is None:
        raise SystemExit(f"pip does not say which Triton is the newest: {said.strip()!r}; name the versions to try")
    return match[1]


def versions_of(given: Iterable[str]) -> list[str]:
    """Returns versions of Triton, each once: `installed` and `newest` become numbers."""
    names = {"installed": lambda: INSTALLED, "newest": newest}
    return list(dict.fromkeys(names[version]() if version in names else version for version in given))


def folder_of(version: str) -> Path | None:
    """Returns the folder of a version of Triton, and installs it there if needed. None: Python has this version."""
    if version == INSTALLED:
        return None
    folder = TRITONS / version
    if not folder.exists():
        print(f"installing Triton {version} into {folder}", file=sys.stderr)
        TRITONS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=TRITONS) as part:  # only a complete install gets the final name
            target = Path(part) / version
            _pip(
                "install", "--target", str(target), "--no-deps", "--only-binary", ":all:", f"triton=={version}",
                failing=f"install Triton {version}",
            )  # fmt: skip
            target.rename(folder)
    return folder


def _pip(*arguments: str, failing: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise SystemExit(f"cannot {failing}: {reason}")
    return done.stdout


def progress(version: str) -> Callable[[int, int], None]:
    """Returns a function that prints, four times in all, how many kernels a version has compiled."""

    def show(done: int, total: int) -> None:
        if done * 4 // total > (done - 1) * 4 // total:
            print(f"Triton {version}: {done} of {total} compiled", file=sys.stderr)

    return show


def check(version: str, record: bool, only: str = "") -> list[str]:
    """Compiles all kernels with one version. Returns a line for each fault and for each difference from the record.

    record: whether to write a new record instead of comparing. only: compiles only kernels with this text in their
    names; a new record keeps the old entries of the other kernels.
    """
    try:
        reports = compile_elsewhere(tuple(TARGETS), progress(version), folder_of(version), only=only)
    except CompileFailed as failure:
        return [f"Triton {version}: {failure}"]
    compiled, lines = figures(reports), faults(version, reports)
    recorded = read(version)
    if record:
        RECORDS.mkdir(exist_ok=True)
        others = {key: row for key, row in (recorded or {}).items() if only not in key[0]}
        path_of(version).write_text(text_of(dict(sorted((others | compiled).items(), key=_place))))
        return lines
    if recorded is None:
        return [*lines, f"Triton {version}: nothing is recorded. {advice(version)}"]
    changed = differences(version, {key: row for key, row in recorded.items() if only in key[0]}, compiled)
    return [*lines, *changed, advice(version)] if changed else lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for every fault and difference. Returns 0 if there is none, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.compile_matrix", description=__doc__.splitlines()[0])
    parser.add_argument(
        "versions", nargs="*", default=VERSIONS, metavar="VERSION",
        help=f"a version of Triton, `installed` or `newest`; without any: {' '.join(VERSIONS)}",
    )  # fmt: skip
    parser.add_argument("--record", action="store_true", help="write what comes out into tests/proof/compiled")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels with this text in their name")
    given = parser.parse_args(arguments)

    bad = 0
    for version in versions_of(given.versions):
        lines = check(version, given.record, given.only)
        bad += bool(lines)
        print("\n".join(lines) or f"Triton {version}: {'recorded' if given.record else 'as recorded'}", flush=True)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

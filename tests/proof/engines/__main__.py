"""Builds the environments, runs the engines, and prints a line for each engine. Ends with 1 if an engine failed."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tests.proof.engines as package
from tests.proof.engines.environment import ROOT, build, engines


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the engines that the command line names.

    Args:
        arguments: Arguments of the command line; None for those of this process.

    Returns:
        0 if all engines passed, otherwise 1.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("tests.proof.engines", description=package.__doc__, formatter_class=form)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {engines()}; default: all")
    parser.add_argument(
        "--only", action="append", default=[], metavar="SCENARIO", help="of the engine's; may be repeated"
    )
    parser.add_argument("--newest", action="store_true", help="the newest release of each engine, not the pinned one")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write what the engines report")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.engines) - set(engines()):
        parser.error(f"no engine {sorted(unknown)}: expected some of {engines()}")
    options = [f"--only={name}" for name in chosen.only]
    results = {name: run(name, build(name, chosen.newest), options) for name in chosen.engines or engines()}
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=2))
    for result in results.values():
        print(result["line"])
    return int(any(result["status"] for result in results.values()))


def run(name: str, python: Path, options: Sequence[str], root: Path = ROOT) -> dict[str, object]:
    """Runs the proof of an engine, and prints its lines. The output of the engine itself goes to a log.

    Args:
        name: The engine.
        python: The interpreter of its environment.
        options: The options that the engine's program `run.py` gets.
        root: The folder that holds `tests`.

    Returns:
        A dict: `status` is the exit status, `line` the last printed line, `report` the report that the proof has
        written.
    """
    report = root / "build" / "engines" / f"{name}.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [python, "-m", f"tests.proof.engines.{name}.run", *options, f"--json={report}"]
    variables, line, log = os.environ | {"PYTHONPATH": str(root)}, "", report.with_suffix(".log")
    with (
        log.open("w") as said,
        subprocess.Popen(command, cwd=root, env=variables, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
    if process.returncode:
        line = (line if line.startswith(name) else f"{name}: ended with {process.returncode}").strip()
        line += f", see {log.relative_to(root)}"
    written = json.loads(report.read_text()) if report.is_file() else None
    return {"status": process.returncode, "line": line.strip(), "report": written}


if __name__ == "__main__":
    sys.exit(main())

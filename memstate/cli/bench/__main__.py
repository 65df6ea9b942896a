"""Runs benchmarks where typer and rich are not installed.

`python -m memstate.cli.bench NAME... [--peer NAME] [--case TEXT] [--toy] [--json PATH]`. The file is written after
every measurement: a later failure loses nothing.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> int:
    """Returns 1 where something was wrong and therefore not measured, 2 for bad input."""
    parser = argparse.ArgumentParser("python -m memstate.cli.bench")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--peer")
    parser.add_argument("--case", default="")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    import torch

    on_gpu = torch.cuda.is_available() and not given.toy
    if given.toy:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported
    from memstate.cli.bench import NAMES, BenchResult, run
    from memstate.errors import InvalidArgument

    def keep(outcome: BenchResult) -> None:
        if given.json:
            text = json.dumps([asdict(entry) for entry in outcome.entries], indent=1)
            given.json.write_text(text + "\n", encoding="utf-8")

    names = list(NAMES) if given.names == ["all"] else given.names
    try:
        outcome = run(names, "auto", "cuda" if on_gpu else "cpu", given.toy, given.peer, found=keep, case=given.case)
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(outcome.entries)} entries", *outcome.unmeasured, sep="\n")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""The library's kernels with a barrier or an alignment taken away: the compile matrix notices.

Run as a program, this file compiles them; kernels that are interpreted in a process cannot be compiled there.
"""

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from memstate.cli.compile import KernelReport, compile_cases
from tests.proof.compile_matrix import differences, faults, figures

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_90", "gfx942")


class Loss(NamedTuple):
    """A text that is taken out of a module, and what is said of a kernel then."""

    module: str
    kernel: str
    gone: str
    instead: str
    change: str
    fault: str | None


LOSSES = {
    "barrier": Loss(  # of all three the one that the number of all barriers does not tell: the compiler puts its own
        "registers", "ownership", "    phase_barrier()\n    _claim_phase(", "    _claim_phase(",
        "source_barriers 7, recorded 8: a barrier of the source was lost", None,
    ),
    "alignment": Loss(
        "copy", "copy_slots",
        "tl.multiple_of((start + to.to(tl.int64) * stride).to(tl.pointer_type(WORD)), UNIT)",
        "(start + to.to(tl.int64) * stride).to(tl.pointer_type(WORD))",
        "narrowest_bulk_access_bits 32, recorded 128: width was lost", "narrowest_bulk_access_bits 32, must be 128",
    ),
}  # fmt: skip


def lossy() -> None:
    """Writes, for each of LOSSES, the reports of the kernel as it is and as it is then."""
    lines = sys.stdout
    with redirect_stdout(sys.stderr), TemporaryDirectory() as folder:
        found = {}
        for name, loss in LOSSES.items():
            path = ROOT / "kernels" / f"{loss.module}.py"
            source = path.read_text()
            if source.count(loss.gone) != 1:
                raise SystemExit(f"{path.name} has not exactly one {loss.gone!r} to take away")
            copy = Path(folder) / path.name
            copy.write_text(source.replace(loss.gone, loss.instead))
            found[name] = [compile_from(path, loss.kernel), compile_from(copy, loss.kernel)]
    json.dump(found, lines)


def compile_from(path: Path, kernel: str) -> list[dict[str, Any]]:
    """One kernel of the module in a file."""
    spec = spec_from_file_location(f"memstate.kernels.{path.stem}_from_a_file", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = [case for case in module.compile_cases() if case.name == kernel]
    return [asdict(report) for report in compile_cases(cases, TARGETS)]


@pytest.fixture(scope="module")
def losses() -> dict[str, list[list[KernelReport]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: [[KernelReport(**one) for one in side] for side in sides] for name, sides in found.items()}


@pytest.mark.proof
def test_losses_in_real_kernels_are_noticed(losses: dict[str, list[list[KernelReport]]]) -> None:
    assert set(losses) == set(LOSSES)
    for name, (sound, lossy) in losses.items():
        loss = LOSSES[name]
        places = [f"Triton 3.0: {loss.kernel} on {target}" for target in TARGETS]
        assert {f"{place}: {loss.change}" for place in places} <= set(
            differences("3.0", figures(sound), figures(lossy))
        )
        assert faults("3.0", lossy) == ([f"{place}: {loss.fault}" for place in places] if loss.fault else [])
        assert faults("3.0", sound) == []


if __name__ == "__main__":
    lossy()

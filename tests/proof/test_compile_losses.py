"""Tests that the compile matrix notices if the copy kernel loses its alignment. Mutants test lost barriers.

The test process interprets kernels and cannot compile them, so the test runs this file as a program, which compiles.
"""

import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from memstate_tools.arguments import ints, plane_map
from memstate_tools.calls import Call
from memstate_tools.compile import KernelReport, compile_calls
from tests.proof.compile_matrix import differences, faults, figures
from tests.support.kernel_runs import not_interpreted

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_90", "gfx942")
ALIGNED = "(start + to.to(tl.int64) * stride).to(tl.pointer_type(WORD))"  # the argument of `tl.multiple_of` in copy.py


def compiled(path: Path) -> list[KernelReport]:
    """Returns the reports on the copy kernel in a file."""
    spec = spec_from_file_location(f"memstate.kernels.{path.stem}_from_a_file", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    planes = plane_map()
    call = Call("copy_slots", lambda _: module.copy_slots(planes, ints(64), ints(64)), (planes.tiles,))
    return compile_calls([call], TARGETS)


def main() -> None:
    """Writes as JSON the reports on the copy kernel with and without its alignment."""
    lines, path = sys.stdout, ROOT / "kernels" / "copy.py"
    with redirect_stdout(sys.stderr), TemporaryDirectory() as folder:
        (lossy := Path(folder, "copy.py")).write_text(
            path.read_text().replace(f"tl.multiple_of({ALIGNED}, UNIT)", ALIGNED)
        )
        reports = [[asdict(report) for report in compiled(each)] for each in (path, lossy)]
    json.dump(reports, lines)


@pytest.mark.proof
def test_an_alignment_that_is_lost_is_noticed() -> None:
    sound, lossy = ([KernelReport(**one) for one in side] for side in not_interpreted(__file__))
    places = [f"Triton 3.0: copy_slots on {target}: narrowest_bulk_access_bits 32" for target in TARGETS]
    lines = set(differences("3.0", figures(sound), figures(lossy)))
    assert {f"{place}, recorded 128" for place in places} <= lines
    assert faults("3.0", lossy) == [f"{place}, must be 128" for place in places] and faults("3.0", sound) == []


if __name__ == "__main__":
    main()

"""Lists the instructions of compiled kernels that no test of the machine executes.

Compiles some kernels for sm_90; full runs compile all, and also read what compiled tests have kept in build/ptx.
"""

import json
import random
import sys
from itertools import chain

import pytest
import torch
import triton

from memstate_tools.calls import all_calls, launch_of
from tests.kernels.test_ptx_machine import ATOMICS, BODIES, MATRICES, MOVES
from tests.kernels.test_ptx_values import ROWS
from tests.support.kernel_runs import ROOT, not_interpreted
from tests.support.ptx_body import forms, kernel
from tests.support.sampling import PROOF

BODIES_OF_TESTS = chain((body for body, _ in BODIES.values()), MATRICES.values(), MOVES.values(), ATOMICS.values())
TESTED = {"ld.param.b64", *ROWS, *chain(*(forms(kernel(body)) for body in BODIES_OF_TESTS))}


@pytest.mark.slow
def test_every_instruction_of_compiled_kernels_is_tested(generator: torch.Generator) -> None:
    names = [call.name for call in all_calls()]
    some = names if PROOF else random.Random(generator.initial_seed()).sample(names, 2)
    found = not_interpreted(__file__, *some)
    assert len(found) > 20
    assert {name: where for name, where in found.items() if name not in TESTED} == {}


def texts(names: list[str]) -> dict[str, str]:
    """Returns the PTX of the launches of calls, and in full runs the PTX that compiled tests have kept."""
    kept = ROOT.glob(f"build/ptx/{triton.__version__}/*/*.ptx") if PROOF else []
    return {str(path): path.read_text() for path in kept} | {
        call.name: launch_of(call, "sm_90").compiled.asm["ptx"] for call in all_calls() if call.name in names
    }


if __name__ == "__main__":
    found = {
        form: f"{where}: {line}" for where, text in texts(sys.argv[1:]).items() for form, line in forms(text).items()
    }
    json.dump(found, sys.stdout)

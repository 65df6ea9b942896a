"""The tests and their helpers: a package, so that no installed package of this name takes its place.

The tools come from the checkout, whether they are installed or not. With MEMSTATE_COMPILED in the environment, kernels
are compiled, and run on the CPU (tests.support.ptx). Its value is the order of warps: together, warps, backwards or a
seed.
"""

import os
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.insert(0, str(TOOLS))

if COMPILED := os.environ.get("MEMSTATE_COMPILED"):
    from tests.support.ptx.device import install

    install(COMPILED)

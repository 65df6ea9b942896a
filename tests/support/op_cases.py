"""What makes a launch of each operation from a seed: `CASES[op](Maker(seed))`."""

from collections.abc import Callable

from memstate.kernels.dispatch import OPS
from tests.support import byte_cases, register_cases
from tests.support.op_case import Case, Maker

MAKERS = vars(register_cases) | vars(byte_cases)
CASES: dict[str, Callable[[Maker], Case]] = {op: MAKERS[op] for op in OPS if op in MAKERS}

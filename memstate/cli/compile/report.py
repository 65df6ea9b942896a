"""What is said of one kernel compiled for one target."""

from dataclasses import dataclass
from typing import NamedTuple


class Resources(NamedTuple):
    """What one thread takes: registers, and bytes of private memory that registers were spilled to."""

    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class KernelReport:
    """One kernel compiled for one target.

    registers: per thread; spill_bytes: per thread; shared_bytes: shared memory of one program; barriers: in the
    program's text. narrowest_bulk_access_bits: of the loads and stores of one lane that move plane bytes, None for
    kernels that move none. ok: nothing spilled, and plane bytes move at least 16 at a time. source_barriers: those of
    the barriers that the kernel's source asks for; the compiler added the others.
    """

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    narrowest_bulk_access_bits: int | None
    barriers: int
    ok: bool
    source_barriers: int = 0

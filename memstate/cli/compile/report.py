"""What is reported of one kernel compiled for one target."""

from dataclasses import dataclass
from typing import NamedTuple


class Resources(NamedTuple):
    """What one thread takes: registers, and bytes of private memory that registers were spilled to."""

    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class KernelReport:
    """One kernel compiled for one target.

    Attributes:
        kernel: Name of the kernel.
        target: Name of the target.
        registers: Per thread.
        spill_bytes: Per thread.
        shared_bytes: Shared memory of one program.
        narrowest_bulk_access_bits: Of one lane's loads and stores that move plane bytes; None where none do.
        barriers: In the program's text.
        ok: Whether nothing spilled, and plane bytes move at least 16 at a time.
        source_barriers: Those of the barriers that the kernel's source asks for; the compiler added the others.
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

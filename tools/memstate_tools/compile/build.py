"""Compiles one kernel for one target, without a GPU, and reports figures of the compiled code."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from memstate.errors import CompileFailed, ConfigurationError
from memstate.kernels import dispatch
from memstate.sizes import format_bytes
from memstate_tools.calls import CALLS, Call, launch_of
from memstate_tools.compile.accesses import WIDE_BITS, accesses, plane_accesses
from memstate_tools.compile.assembly import barriers, resources
from memstate_tools.compile.chains import dependent_loads
from memstate_tools.compile.instructions import Instruction, bytes_in_flight, disassemble, of_a_token, of_two_loops
from memstate_tools.launches import TARGETS, Launch

KERNELS = Path(dispatch.__file__).parent
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
T = TypeVar("T")


@dataclass(frozen=True)
class KernelReport:
    """One kernel compiled for one target.

    Attributes:
        kernel: Name of the kernel.
        target: Name of the target.
        registers: Registers of a thread.
        spill_bytes: Spilled bytes of a thread.
        shared_bytes: Shared memory of one program.
        narrowest_bulk_access_bits: Fewest bits of a lane's load or store of plane bytes; None if there is none.
        barriers: Barriers in the compiled text.
        ok: Whether nothing spilled, and plane bytes move at least 16 at a time.
        source_barriers: Barriers that the kernel's source asks for; the compiler added the others.
        dependent_loads: Loads of global memory in the longest chain in which each waits for the previous one; None for
            AMD.
        instructions: Instructions that one warp of a decode kernel issues for one token; None for other kernels, for
            launches that store marks or have a tail, and for AMD.
        bytes_in_flight: Most bytes that this warp waits for at a time; None where `instructions` is None.
        instructions_folded: Instructions that one warp of a decode kernel with a tail issues for each kept token that
            it adds to the state; None for other launches and AMD.
        instructions_verified: Instructions that this warp issues for each token of the step; None where
            `instructions_folded` is None.
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
    dependent_loads: int | None = None
    instructions: int | None = None
    bytes_in_flight: int | None = None
    instructions_folded: int | None = None
    instructions_verified: int | None = None

    def row(self) -> dict[str, str | int | None]:
        """Returns the main figures as a row for people, with units."""
        bits = self.narrowest_bulk_access_bits
        return {
            "kernel": self.kernel, "target": self.target, "registers": self.registers,
            "spills": format_bytes(self.spill_bytes), "shared memory": format_bytes(self.shared_bytes),
            "narrowest access": bits and f"{bits} bits", "barriers": self.barriers,
            "dependent loads": self.dependent_loads, "ok": self.ok,
        }  # fmt: skip


def known_targets(targets: Sequence[str]) -> list[str]:
    """Returns the targets that the Triton of this process knows.

    Triton does not know a target if it compiles a small kernel for the oldest target of the same vendor, but not for
    this one. If both fail, the reason is another one, and the later compilation reports it.
    """
    (call,) = CALLS["resolve"]()

    def known(target: str) -> bool:
        oldest = next(name for name in TARGETS if name[:2] == target[:2])
        return target == oldest or _compiles(call, target) or not _compiles(call, oldest)

    return list(filter(known, targets))


def _compiles(call: Call, target: str) -> bool:
    try:
        _ = launch_of(call, target).compiled
    except Exception:  # a pass of Triton can raise any error
        return False
    return True


def build(call: Call, target: str) -> KernelReport:
    """Compiles the launch of a call, or takes it from Triton's cache, and inspects the result.

    Raises:
        CompileFailed: The compiler fails, or its output cannot be read. The message has the compiler's last line.
        ConfigurationError: Triton cannot write its cache.
    """

    def report() -> KernelReport:
        launch = launch_of(call, target)
        made = inspect(call, launch)
        launch.forget()
        return made

    return reporting(call.name, target, report)


def blame_cache(error: Exception) -> None:
    """Raises ConfigurationError if an error says that Triton cannot write its cache."""
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        raise ConfigurationError(
            f"Triton cannot keep compiled kernels: {error}; TRITON_CACHE_DIR names another folder"
        ) from error


def reporting(name: str, target: str, work: Callable[[], T]) -> T:
    """Returns what `work` makes of a kernel.

    Raises:
        CompileFailed: The compiler fails, or its output cannot be read. The message has the compiler's last line.
        ConfigurationError: Triton cannot write its cache.
    """
    try:
        return work()
    except Exception as error:  # a pass of Triton can raise any error
        blame_cache(error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CompileFailed(name, target, lines[-1] if lines else type(error).__name__) from error


def inspect(call: Call, launch: Launch) -> KernelReport:
    """Returns the report of a compiled launch, from its texts."""
    compiled, narrowest = launch.compiled, None
    if call.planes:
        pointers = [name for name, kind in launch.types.items() if kind.startswith("*")]
        found = accesses(compiled.asm["llir"], list(launch.types))
        moved = plane_accesses(found, launch.arguments_in(call.planes), pointers)
        narrowest = min((access.bits for access in moved), default=None)
    used = resources(compiled.asm)
    folders = (Path(launch.kernel.fn.__code__.co_filename).parent, KERNELS)
    barrier_count, of_source = barriers(compiled.asm.get("amdgcn") or compiled.asm["ptx"], folders)
    wide = narrowest is not None and narrowest >= WIDE_BITS
    token: list[Instruction] = []
    folded, verified = token, token
    if "ptx" in compiled.asm and _decodes(call):
        assembly = disassemble(compiled.asm["cubin"])
        if call.name.endswith(("_tail", "_tree")):
            folded, verified = of_two_loops(assembly)
        else:
            token = of_a_token(assembly)
    return KernelReport(
        kernel=call.name,
        target=launch.target,
        registers=used.registers,
        spill_bytes=used.spill_bytes,
        shared_bytes=compiled.metadata.shared,
        narrowest_bulk_access_bits=narrowest,
        barriers=barrier_count,
        ok=used.spill_bytes == 0 and (wide or not call.planes),
        source_barriers=of_source,
        dependent_loads=dependent_loads(compiled.asm["ptx"]) if "ptx" in compiled.asm else None,
        instructions=len(token) or None,
        bytes_in_flight=bytes_in_flight(token) if token else None,
        instructions_folded=len(folded) or None,
        instructions_verified=len(verified) or None,
    )


def _decodes(call: Call) -> bool:
    """Returns whether a call launches a decode kernel whose instructions are counted: no marks, no fp16."""
    if call.rare or "fp16" in call.name or call.name.endswith("_marks"):
        return False
    return call.name.startswith(("gated_delta_step_", "selective_step_", "conv_step_"))

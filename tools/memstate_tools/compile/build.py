"""Compiles one kernel for one target, without a GPU, and reports figures of the compiled code."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memstate.errors import CompileFailed, ConfigurationError
from memstate.kernels import catalog
from memstate.kernels.catalog import CompileCase
from memstate.sizes import format_bytes
from memstate_tools.compile.accesses import WIDE_BITS, accesses, plane_accesses
from memstate_tools.compile.assembly import barriers, resources
from memstate_tools.compile.chains import dependent_loads
from memstate_tools.compile.instructions import Instruction, bytes_in_flight, disassemble, of_a_token, of_two_loops
from memstate_tools.launches import TARGETS

KERNELS = Path(catalog.__file__).parent
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
    (case,) = (case for case in catalog.all_cases() if case.name == "resolve")

    def known(target: str) -> bool:
        oldest = next(name for name in TARGETS if name[:2] == target[:2])
        return target == oldest or _compiles(case, target) or not _compiles(case, oldest)

    return list(filter(known, targets))


def _compiles(case: CompileCase, target: str) -> bool:
    try:
        compile_case(case, target)
    except Exception:  # a pass of Triton can raise any error
        return False
    return True


def build(case: CompileCase, target: str) -> KernelReport:
    """Compiles one case, or takes it from Triton's cache, and inspects the result.

    Raises:
        CompileFailed: The compiler fails, or its output cannot be read. The message has the compiler's last line.
        ConfigurationError: Triton cannot write its cache.
    """
    return reporting(case.name, target, lambda: inspect(case, target, compile_case(case, target)))


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


def compile_case(case: CompileCase, target: str) -> Any:
    """Returns the compiled kernel, with its texts in `.asm`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    constants = case.constexprs | (dict(case.of_64) if TARGETS[target][2] == 64 else {})
    source = ASTSource(case.kernel, signature, constants, divisible)
    options = {"num_warps": case.num_warps, **case.options}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def inspect(case: CompileCase, target: str, compiled: Any) -> KernelReport:
    """Returns the report of a compiled kernel, from its texts."""
    arguments = [name for name in case.kernel.arg_names if name not in case.constexprs]
    narrowest = None
    if case.plane_args:
        pointers = [name for name in arguments if case.signature[name].startswith("*")]
        moved = plane_accesses(accesses(compiled.asm["llir"], arguments), case.plane_args, pointers)
        narrowest = min((access.bits for access in moved), default=None)
    used = resources(compiled.asm)
    folders = (Path(case.kernel.fn.__code__.co_filename).parent, KERNELS)
    barrier_count, of_source = barriers(compiled.asm.get("amdgcn") or compiled.asm["ptx"], folders)
    wide = narrowest is not None and narrowest >= WIDE_BITS
    token: list[Instruction] = []
    folded, verified = token, token
    if "ptx" in compiled.asm and _decodes(case):
        assembly = disassemble(compiled.asm["cubin"])
        if case.name.endswith(("_tail", "_tree")):
            folded, verified = of_two_loops(assembly)
        else:
            token = of_a_token(assembly)
    return KernelReport(
        kernel=case.name,
        target=target,
        registers=used.registers,
        spill_bytes=used.spill_bytes,
        shared_bytes=compiled.metadata.shared,
        narrowest_bulk_access_bits=narrowest,
        barriers=barrier_count,
        ok=used.spill_bytes == 0 and (wide or not case.plane_args),
        source_barriers=of_source,
        dependent_loads=dependent_loads(compiled.asm["ptx"]) if "ptx" in compiled.asm else None,
        instructions=len(token) or None,
        bytes_in_flight=bytes_in_flight(token) if token else None,
        instructions_folded=len(folded) or None,
        instructions_verified=len(verified) or None,
    )


def _decodes(case: CompileCase) -> bool:
    """Returns whether a case launches a decode kernel whose instructions are counted: no marks, no fp16."""
    if case.rare or "fp16" in case.name or case.name.endswith("_marks"):
        return False
    return case.name.startswith(("gated_delta_step_", "selective_step_", "conv_step_"))

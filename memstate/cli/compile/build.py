"""Compiles one kernel for one target, without a GPU, and reports what came out. Knows Triton's compiler."""

from pathlib import Path
from types import ModuleType
from typing import Any

from memstate.cli.compile import amdgcn, ptx
from memstate.cli.compile.places import source_barriers
from memstate.cli.compile.provenance import WIDE_BITS, plane_accesses
from memstate.cli.compile.report import KernelReport
from memstate.errors import CompileFailed
from memstate.kernels import catalog
from memstate.kernels.catalog import CompileCase

TARGETS: dict[str, tuple[str, int | str, int]] = {  # name -> Triton's backend, architecture, lanes of a warp
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
KERNELS = Path(catalog.__file__).parent


def build(case: CompileCase, target: str) -> KernelReport:
    """Compiles one case, or takes it from Triton's cache, and inspects the result.

    Raises:
        CompileFailed: With what the compiler says, or where its output cannot be followed.
    """
    try:
        return inspect(case, target, compile_case(case, target))
    except Exception as error:  # Triton raises whatever its passes raise
        reason = next(
            (line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__
        )
        raise CompileFailed(case.name, target, reason) from error


def compile_case(case: CompileCase, target: str) -> Any:
    """Returns the compiled kernel, with its texts in `.asm`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: "constexpr" if name in case.constexprs else case.signature[name] for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible}
    source = ASTSource(case.kernel, signature, dict(case.constexprs), divisible)
    options = {"num_warps": case.num_warps, **case.options}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def inspect(case: CompileCase, target: str, compiled: Any) -> KernelReport:
    """Reports what the compiled texts of a kernel say."""
    arguments = [name for name in case.kernel.arg_names if name not in case.constexprs]
    reader: ModuleType
    if "amdgcn" in compiled.asm:
        text, reader = compiled.asm["amdgcn"], amdgcn
        resources = amdgcn.resources(text)
    else:
        from triton import knobs

        text, reader = compiled.asm["ptx"], ptx
        resources = ptx.resources(compiled.asm["cubin"], knobs.nvidia.cuobjdump.path)

    narrowest = None
    if case.plane_args:
        pointers = [name for name in arguments if case.signature[name].startswith("*")]
        moved = plane_accesses(reader.accesses(text, arguments), case.plane_args, pointers)
        narrowest = min((access.bits for access in moved), default=None)
    folders = (Path(case.kernel.fn.__code__.co_filename).parent, KERNELS)
    wide = narrowest is not None and narrowest >= WIDE_BITS
    return KernelReport(
        kernel=case.name,
        target=target,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        shared_bytes=compiled.metadata.shared,
        narrowest_bulk_access_bits=narrowest,
        barriers=reader.barriers(text),
        ok=resources.spill_bytes == 0 and (wide or not case.plane_args),
        source_barriers=source_barriers(text, folders),
    )

"""Reads AMD GPU assembly and its metadata: what LLVM made of a kernel. Knows no plane.

Physical registers are used again and again, so what one derives from depends on where in the program it is read. Lanes
that are switched off keep their registers: going on where lanes come back, past what the others did, counts as a jump.
"""

import re
from collections.abc import Iterator, Sequence

from memstate.cli.compile.provenance import PARAMETERS, Access, Instruction, trace
from memstate.cli.compile.report import Resources

REGISTER = re.compile(r"(?<![\w.])([sva])(?:(\d+)|\[(\d+):(\d+)\])(?!\w)|(?<!\w)vcc(_lo|_hi)?(?!\w)")
GLOBAL = re.compile(r"(?:global|flat|buffer|s)_(?:buffer_)?(load|store|atomic)_(\w+)")
WIDTHS = {
    "dwordx16": 512, "dwordx8": 256, "dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "x2": 64, "f64": 64,
    "short": 16, "byte": 8,
}  # fmt: skip
WRITES_NOTHING = re.compile(
    r"s_(cmp|bitcmp|setreg|waitcnt|nop|barrier|sleep|sendmsg|setprio)|ds_write|v_cmpx|buffer_(inv|wb)|scratch_store"
)
FROM_ELSEWHERE = re.compile(r"v_cmp|ds_read|scratch_load|v_mbcnt|s_memtime|s_getpc")
WRITES_PREDICATE = re.compile(r"v_(mad_u64_u32|mad_i64_i32|div_scale)|v_\w+_co_")
KEEPS_OLD = re.compile(r"v_\w+_dpp$|v_(writelane|fmac|mac|dot\w*c)|s_cmov")


def instructions(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yields (label, opcode, operands) of the kernel's body, in order; a label is an entry of its own."""
    name = re.search(r"\.amdhsa_kernel\s+(\S+)", text)
    if name is None:
        raise ValueError("amdgcn: no kernel in the text")
    body = text[text.index(f"\n{name[1]}:") :]
    for line in body[: body.index("\n\t.section")].splitlines():
        line = line.partition(";")[0].strip()
        if line.endswith(":"):
            yield line[:-1], "", []
        elif line and not line.startswith("."):
            opcode, _, operands = line.partition(" ")
            yield "", opcode, re.split(r",\s*(?![^\[]*\])", operands.strip())


def barriers(text: str) -> int:
    """Counts the barriers of the whole program in the text."""
    return sum(opcode == "s_barrier" for _, opcode, _ in instructions(text))


def accesses(text: str, arguments: Sequence[str]) -> list[Access]:
    """Returns every access of global memory.

    Args:
        text: The assembly.
        arguments: Names, in the order of the kernel's parameters.

    Raises:
        ValueError: There is control flow that cannot be followed.
    """
    labels: dict[str, int] = {}
    body: list[tuple[str, list[str]]] = []
    for label, opcode, operands in instructions(text):
        if label:
            labels[label] = len(body)
        else:
            body.append((opcode, operands))
    fields = _argument_bytes(text, arguments)
    program = [_instruction(index, body, labels, fields) for index in range(len(body))]
    base = _parameter_register(text)
    return trace(program, {f"s{base}": frozenset({PARAMETERS}), f"s{base + 1}": frozenset({PARAMETERS})})


def resources(text: str) -> Resources:
    """Returns registers per lane and spilled bytes, from the metadata.

    Raises:
        ValueError: They are not there.
    """
    figures = dict(re.findall(r"\.(vgpr_count|[sv]gpr_spill_count|private_segment_fixed_size):\s*(\d+)", text))
    try:
        spilled = 4 * (int(figures["vgpr_spill_count"]) + int(figures["sgpr_spill_count"]))
        private = int(figures["private_segment_fixed_size"])
        return Resources(registers=int(figures["vgpr_count"]), spill_bytes=max(spilled, private))
    except KeyError as error:
        raise ValueError(f"amdgcn: no {error} in the metadata") from error


def _argument_bytes(text: str, arguments: Sequence[str]) -> dict[int, str]:
    """Byte offset in the block of arguments -> the argument that has these four bytes."""
    listed = text[text.index("\n    .args:") :]
    spans = re.findall(r"\.offset:\s*(\d+)\s+\.size:\s*(\d+)", listed)
    return {
        at: argument
        for argument, (offset, size) in zip(arguments, spans, strict=False)  # what follows is the runtime's own
        for at in range(int(offset) // 4 * 4, int(offset) + int(size), 4)
    }


def _parameter_register(text: str) -> int:
    """Number of the first of the two scalar registers that point to the arguments at the start."""
    before = {"private_segment_buffer": 4, "dispatch_ptr": 2, "queue_ptr": 2}
    enabled = dict(re.findall(r"\.amdhsa_user_sgpr_(\w+) (\d+)", text))
    return sum(size for name, size in before.items() if enabled.get(name) == "1")


def _instruction(
    index: int, body: Sequence[tuple[str, list[str]]], labels: dict[str, int], fields: dict[int, str]
) -> Instruction:
    opcode, operands = body[index]
    if opcode.startswith(("s_setpc", "s_swappc", "s_call")):
        raise ValueError(f"amdgcn: cannot follow `{opcode}`")
    if opcode == "s_endpgm":
        return Instruction(falls=False)
    if opcode.startswith(("s_branch", "s_cbranch")):
        return Instruction(jumps=(labels[operands[0]],), falls=opcode != "s_branch")
    if memory := GLOBAL.match(opcode):
        return _access(opcode, operands, memory[1], memory[2], fields)

    target, rest = operands[0], operands[1:]
    if WRITES_NOTHING.match(opcode):
        return Instruction()
    if FROM_ELSEWHERE.match(opcode):
        return Instruction(clears=_registers(target))
    if "saveexec" in opcode:
        return Instruction(clears=_registers(target), jumps=_lanes_back(index, body, target))
    predicates: tuple[str, ...] = ()
    if WRITES_PREDICATE.match(opcode):
        predicates, rest = _registers(rest[0]), rest[1:]
    elif opcode.startswith("v_swap"):
        target += " " + rest[0]
        rest = [target]
    weak = bool(KEEPS_OLD.match(opcode)) or "UNUSED_PRESERVE" in operands[-1]
    copies = opcode.startswith(("s_mov_b32", "s_mov_b64"))
    return Instruction(_registers(target), _registers(*rest), copies, weak, predicates)


def _access(opcode: str, operands: list[str], kind: str, suffix: str, fields: dict[int, str]) -> Instruction:
    """A load, store or atomic: where its address and its result stand depends on the family."""
    width = next((bits for name, bits in WIDTHS.items() if name in suffix), 32 if kind == "atomic" else 0)
    if not width:
        raise ValueError(f"amdgcn: `{opcode}` does not say how wide it is")
    returns = kind == "load" or (kind == "atomic" and operands[-1].endswith("sc0"))
    written = operands[:1] if returns else []
    if "lds" in suffix:  # straight to shared memory
        written, address = [], operands
    elif kind == "load" or opcode.startswith(("s_", "buffer_")):
        address = operands[1:]
    else:  # the data stands after the register with the address
        address = [operands[len(written)], *operands[len(written) + 2 :]]
    writes = _registers(*written)
    arguments: tuple[str | None, ...] = ()
    if opcode.startswith("s_load") and re.match(r"(0x)?[0-9a-f]+$", operands[2]):
        arguments = tuple(fields.get(int(operands[2], 0) + 4 * number) for number in range(len(writes)))
    return Instruction(
        writes, (), weak="d16" in suffix, address=_registers(*address), bits=width, loads=kind == "load",
        arguments=arguments,
    )  # fmt: skip


def _lanes_back(index: int, body: Sequence[tuple[str, list[str]]], saved: str) -> tuple[int, ...]:
    """Where the lanes that the instruction at `index` switches off come back, if no branch around the rest says so."""
    for later in range(index + 1, len(body)):
        opcode, operands = body[later]
        if opcode.startswith(("s_branch", "s_cbranch", "s_endpgm")):
            return ()
        if operands[0] == "exec" and saved in operands[1:]:
            return (later,)
    return ()


def _registers(*operands: str) -> tuple[str, ...]:
    """`v[0:1]` -> v0, v1; the lanes that are on are no value."""
    found = []
    for match in REGISTER.finditer(" ".join(operands)):
        kind, single, first, last, half = match.groups()
        if kind is None:
            found += [f"vcc{half}"] if half else ["vcc_lo", "vcc_hi"]
        elif single:
            found.append(kind + single)
        else:
            found += [f"{kind}{number}" for number in range(int(first), int(last) + 1)]
    return tuple(found)

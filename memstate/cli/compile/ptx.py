"""Reads PTX and the resources of a cubin: what NVIDIA's compilers made of a kernel. Knows no plane."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

from memstate.cli.compile.provenance import PARAMETERS, Access, Instruction, trace
from memstate.cli.compile.report import Resources

REGISTER = re.compile(r"%[a-zA-Z_]\w*(?:\.\w+)?")
STATEMENT = re.compile(r"(?:@!?(?P<guard>%?\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.DOTALL)
LABEL = re.compile(r"\s*(\$?\w+)\s*:(?!:)")
BARRIER = re.compile(r"(bar|barrier)(\.cta)?\.sync")
NO_PLANE_BYTES = ("prefetch", "discard", "applypriority", "mbarrier", "fence", "cp.async.mbarrier")
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")


def statements(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yields (label, guard, opcode, operands) of the kernel's body, in order; a label is a statement of its own.

    Inline assembly puts several statements, with scopes of their own, on a line.
    """
    text = re.sub(r"//[^\n]*|^\s*\.(?:loc|file)[^\n]*$", "", text, flags=re.MULTILINE)
    start = text.index("{", text.index(".entry"))
    for part in text[start : _closing_brace(text, start)].split(";"):
        part = part.lstrip("{} \t\n")
        while label := LABEL.match(part):
            yield label[1], "", "", ""
            part = part[label.end() :].lstrip("{} \t\n")
        if match := STATEMENT.fullmatch(part.rstrip()):
            yield "", match["guard"] or "", match["opcode"], match["operands"]


def _closing_brace(text: str, start: int) -> int:
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return start + brace.start()
    raise ValueError("PTX: the kernel's body does not end")


def barriers(text: str) -> int:
    """Counts the barriers of the whole program (not of a warp) in the text."""
    return sum(bool(BARRIER.match(opcode)) for _, _, opcode, _ in statements(text))


def accesses(text: str, arguments: Sequence[str]) -> list[Access]:
    """Returns every access of global memory.

    Args:
        text: The PTX.
        arguments: Names, in the order of the kernel's parameters.

    Raises:
        ValueError: There is control flow that cannot be followed.
    """
    labels: dict[str, int] = {}
    body: list[tuple[str, str, str]] = []
    for label, guard, opcode, operands in statements(text):
        if label:
            labels[label] = len(body)
        else:
            body.append((guard, opcode, operands))
    program = [_instruction(guard, opcode, operands, labels, arguments) for guard, opcode, operands in body]
    return trace(program, {"%parameters": frozenset({PARAMETERS})})


def _instruction(
    guard: str, opcode: str, operands: str, labels: dict[str, int], arguments: Sequence[str]
) -> Instruction:
    name, *modifiers = opcode.split(".")
    if name == "bra":
        return Instruction(jumps=(labels[operands.strip()],), falls=bool(guard))
    if name in ("ret", "exit", "trap"):
        return Instruction(falls=bool(guard))
    if name in ("call", "brx"):
        raise ValueError(f"PTX: cannot follow `{opcode} {operands}`")

    weak = bool(guard)  # where the guard is false the old value stays
    memory = re.search(r"\[(.*?)\]", operands)
    if memory is None:
        target, _, rest = operands.partition("}" if operands.startswith("{") else ",")
        if name in ("setp", "set", "testp"):  # says which value is selected later, not what that derives from
            return Instruction(clears=_registers(target))
        return Instruction(_registers(target), _registers(rest), weak=weak, copies=name == "mov")

    writes = _registers(operands[: memory.start()])
    if name == "ld" and "param" in modifiers:
        number = re.search(r"_param_(\d+)", memory[1])
        argument = arguments[int(number[1])] if number and int(number[1]) < len(arguments) else None
        return Instruction(writes, weak=weak, address=("%parameters",), arguments=(argument,) * len(writes))
    if name == "cp" and "async" in modifiers and not opcode.startswith(NO_PLANE_BYTES):
        return _asynchronous_copy(opcode, operands)
    spaces = {modifier.split("::")[0] for modifier in modifiers}
    if opcode.startswith(NO_PLANE_BYTES) or spaces & {"shared", "local", "const"}:
        return Instruction(writes, weak=weak)
    return Instruction(
        writes, weak=weak, address=_registers(memory[1]), bits=_bits(opcode), loads=name.startswith("ld")
    )


def _asynchronous_copy(opcode: str, operands: str) -> Instruction:
    """cp.async from global to shared memory: [to], [from], bytes. The bulk forms move what a register says."""
    inside = re.findall(r"\[(.*?)\]", operands)
    size = re.search(r"\]\s*,\s*(0x[0-9a-fA-F]+|\d+)", operands[operands.rindex("[") :])
    if len(inside) != 2 or size is None or ".bulk" in opcode:
        raise ValueError(f"PTX: cannot tell what `{opcode} {operands}` moves")
    return Instruction(address=_registers(inside[1]), bits=8 * int(size[1], 0))


def _registers(operand: str) -> tuple[str, ...]:
    return tuple(REGISTER.findall(operand))


def _bits(opcode: str) -> int:
    """Width of one lane's access: `ld.global.v4.b32` is 128."""
    vector = re.search(r"\.v(\d)\b", opcode)
    kinds = re.findall(r"\.(?:b|u|s|f|bf)(8|16|32|64|128)(x2)?\b", opcode)
    if not kinds:
        raise ValueError(f"PTX: `{opcode}` does not say how wide it is")
    width, twice = kinds[-1]
    return int(width) * (2 if twice else 1) * (int(vector[1]) if vector else 1)


def resources(cubin: bytes, cuobjdump: str) -> Resources:
    """Returns registers per thread and bytes of its stack frame, as the assembler noted them in the binary.

    Triton gives kernels no local arrays: the frame is what was spilled.

    Raises:
        ValueError: Nothing is noted.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.check_output([cuobjdump, "--dump-resource-usage", file.name], text=True)
    usage = USAGE.search(text)
    if usage is None:
        raise ValueError(f"cuobjdump tells no resource usage: {text!r}")
    return Resources(registers=int(usage[1]), spill_bytes=int(usage[2]) + int(usage[3]))

"""What each instruction of PTX does to a machine: its operands, memory and warps. `values` has what it computes."""

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.ptx import values
from tests.support.ptx.memory import COMBINE
from tests.support.ptx.reading import Instruction
from tests.support.ptx.values import TYPES

if TYPE_CHECKING:
    from tests.support.ptx.program import Machine

Array = Any
Threads = Any  # indices of the threads that run an instruction, or slice(None) for all
Step = Callable[["Machine", Instruction, Threads], None]
LANES = 32
ACCESSES = ("ld", "st", "atom", "red", "ldmatrix", "stmatrix")
REDUCE: dict[str, Any] = {"add": np.add, "min": np.minimum}
ADDRESS = re.compile(r"\[\s*([%\w$~]+)\s*(?:\+\s*(-?\d+)\s*)?\]")


def find(one: Instruction) -> Step | None:
    """Returns what an instruction does, None if there is no such instruction here."""
    words, name = one.words, one.words[0]
    if words[:3] == ("bar", "warp", "sync"):
        return lambda machine, one, at: machine.meet(one, at, 1)
    if words[:2] == ("ld", "param"):
        return _parameter
    if name == "griddepcontrol":
        return {"wait": lambda machine, one, at: machine.of.wait()}.get(words[1], lambda machine, one, at: None)
    if name in ("ldmatrix", "stmatrix"):
        return _matrices if "m8n8" in words and words[-2:] == ("shared", "b16") else None
    if name in ("ld", "st", "atom", "red"):
        does = name in ("ld", "st") or (COMBINE.keys() & words and words[-1] in ("b32", "u32", "b64", "u64"))
        known = ("global" in words or "shared" in words) and does
        return {"ld": _load, "st": _store}.get(name, _atomic) if known else None
    if name == "shfl":
        return _shuffle
    if name == "redux":
        return _reduce if words[2] in REDUCE else None
    if name == "mov" and one.args[0].startswith("{"):
        return _split
    if name == "mov" and one.args[1].startswith("{"):
        return _join
    value = values.find(words)
    return value and _computing(value)


def size_of(one: Instruction) -> int:
    """Returns the bytes of one word of an instruction."""
    return TYPES[one.words[-1]].itemsize


def names_in(text: str) -> list[str]:
    """Returns the registers of an operand such as "{%r1, %r2}"."""
    return [name.strip() for name in text.strip("{} ").split(",")]


@cache
def constant(text: str, kind: str) -> Any:
    """Returns a constant operand as a number of a type. Raises: ValueError: it is no constant."""
    bits = 0 if text == "global_smem" else int(text[2:], 16) if text[:2] == "0f" else int(text.rstrip("U"), 0)
    dtype = TYPES[kind]
    word = np.array([bits % 2 ** (8 * dtype.itemsize)], f"u{dtype.itemsize}")
    return (word.astype(bool) if kind == "pred" else word.view(dtype))[0]


def _computing(value: values.Value) -> Step:
    def step(machine: "Machine", one: Instruction, at: Threads) -> None:
        operands = [machine.read(text, kind, at) for text, kind in zip(one.args[1:], value.of, strict=True)]
        result = value.compute(*operands)
        for name, word in zip(one.args[0].split("|"), result.T if result.ndim == 2 else [result], strict=True):
            machine.write(name, word, at)

    return step


def _split(machine: "Machine", one: Instruction, at: Threads) -> None:
    names = names_in(one.args[0])
    whole = np.ascontiguousarray(machine.read(one.args[1], one.words[-1], at))
    for name, part in zip(names, whole.view(f"u{size_of(one) // len(names)}").reshape(-1, len(names)).T, strict=True):
        machine.write(name, part.copy(), at)


def _join(machine: "Machine", one: Instruction, at: Threads) -> None:
    names = names_in(one.args[1])
    parts = [machine.read(name, f"b{8 * size_of(one) // len(names)}", at) for name in names]
    machine.write(one.args[0], np.stack(parts, 1).view(f"u{size_of(one)}").reshape(-1), at)


def _parameter(machine: "Machine", one: Instruction, at: Threads) -> None:
    bits = machine.params[machine.of.listing.params.index(one.args[1].strip("[] "))]
    machine.write(one.args[0], np.full(machine.count(at), bits).astype(TYPES[one.words[-1]]), at)


# -- memory -------------------------------------------------------------------------------------------------------


def _address(machine: "Machine", one: Instruction, at: Threads) -> Array:
    """Returns the address of each thread; in shared memory, from the start of its program's."""
    found = next((ADDRESS.fullmatch(arg) for arg in one.args if arg.startswith("[")), None)
    if found is None:
        raise one.fault("this address is not known here")
    base = machine.read(found[1], f"b{machine.bits_of(found[1])}", at)
    return base.astype("i8") + int(found[2] or 0)


def _load(machine: "Machine", one: Instruction, at: Threads) -> None:
    names = names_in(one.args[0])
    words = machine.memory.load(one, _address(machine, one, at), size_of(one), len(names), *machine.who(at))
    for name, word in zip(names, words, strict=True):
        machine.write(name, word.view(TYPES[one.words[-1]]), at)


def _store(machine: "Machine", one: Instruction, at: Threads) -> None:
    words = [machine.read(name, f"b{8 * size_of(one)}", at) for name in names_in(one.args[1])]
    machine.memory.store(one, _address(machine, one, at), words, *machine.who(at))


def _atomic(machine: "Machine", one: Instruction, at: Threads) -> None:
    operand = machine.read(one.args[-1], one.words[-1], at)
    old = machine.memory.change(one, _address(machine, one, at), operand, *machine.who(at))
    if one.words[0] == "atom":
        machine.write(one.args[0], old, at)


# -- warps --------------------------------------------------------------------------------------------------------


def _shuffle(machine: "Machine", one: Instruction, at: Threads) -> None:
    """Bits 0 to 4 of the operand c bound the source of a lane, and its bits 8 to 12 split the warp into segments."""
    machine.meet(one, at)
    x, by, c = (machine.read(text, "u32", at).reshape(-1, LANES) for text in one.args[1:4])
    lane, by, bound, segment = np.arange(LANES), by & 31, c & 31, c >> 8 & 31
    first = lane & segment
    last = first | bound & ~segment
    source = {"up": lane - by.astype("i8"), "down": lane + by, "bfly": lane ^ by, "idx": first | by & ~segment}[
        one.words[2]
    ]
    inside = source >= last if one.words[2] == "up" else source <= last
    name, _, exists = one.args[0].partition("|")
    machine.write(name, np.take_along_axis(x, np.where(inside, source, lane).astype("i8"), 1).reshape(-1), at)
    if exists:
        machine.write(exists, inside.reshape(-1), at)


def _reduce(machine: "Machine", one: Instruction, at: Threads) -> None:
    machine.meet(one, at)
    x = machine.read(one.args[1], one.words[-1], at).reshape(-1, LANES)
    machine.write(one.args[0], np.repeat(REDUCE[one.words[2]].reduce(x, axis=1, dtype=x.dtype), LANES), at)


def _matrices(machine: "Machine", one: Instruction, at: Threads) -> None:
    """Loads or stores matrices of 8 by 8 elements of 16 bits. A lane names a row, and has two elements of each."""
    machine.meet(one, at)
    loads, lane, who = one.words[0] == "ldmatrix", np.arange(LANES), machine.who(at)
    rows, names = _address(machine, one, at).reshape(-1, LANES), names_in(one.args[0 if loads else 1])
    if (rows[:, : 8 * len(names)] % 16).any():
        raise one.fault("misaligned row of 16 bytes")
    for number, name in enumerate(names):
        places = []
        for half in range(2):
            row, column = lane // 4, lane % 4 * 2 + half
            row, column = (column, row) if "trans" in one.words else (row, column)
            places.append((rows[:, 8 * number + row] + 2 * column).reshape(-1))
        if loads:
            low, high = (machine.memory.load(one, place, 2, 1, *who)[0].astype("u4") for place in places)
            machine.write(name, low | high << 16, at)
        else:
            pair = machine.read(name, "b32", at)
            for half, place in enumerate(places):
                machine.memory.store(one, place, [(pair >> 16 * half).astype("u2")], *who)

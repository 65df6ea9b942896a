"""The instructions of PTX that only compute: functions on numpy arrays with one element for each thread.

Numbers are as PTX ISA 8.7 says. Where it leaves a choice: `approx` and `full` forms are rounded to nearest, and a NaN
that arithmetic makes is the canonical one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Array = Any
TYPES = {
    name: np.dtype(code) for name, code in {
        "pred": "?", "b8": "u1", "b16": "u2", "b32": "u4", "b64": "u8", "u8": "u1", "u16": "u2", "u32": "u4",
        "u64": "u8", "s8": "i1", "s16": "i2", "s32": "i4", "s64": "i8", "f16": "f2", "f32": "f4", "bf16": "u2",
        "bf16x2": "u4", "f16x2": "u4",
    }.items()
}  # fmt: skip
NAN = {"f2": np.uint16(0x7FFF), "f4": np.uint32(0x7FFFFFFF)}


class Value(NamedTuple):
    """What an instruction computes: the type of its result, those of its operands, and the function."""

    to: str
    of: tuple[str, ...]
    compute: Callable[..., Array]


def find(words: tuple[str, ...]) -> Value | None:
    """Returns what an instruction computes, None if there is no such instruction here.

    words: opcode and modifiers, such as ("add", "s32").
    """
    found = _find(words)
    if found is not None and "ftz" in words:
        return Value(found.to, found.of, lambda *operands: _flushed(found.compute(*map(_flushed, operands))))
    return found


def _find(words: tuple[str, ...]) -> Value | None:
    known = tuple(word for word in words if word not in ("lo", "rn", "ftz", "approx", "full"))
    name, kind = ".".join(known[:-1]), words[-1]
    if words[0] == "cvt":
        return _cvt(words, words[-2], kind)
    if kind in TYPES and kind.endswith("x2"):
        single = _find((*words[:-1], kind[:-2]))
        return single and Value(single.to, (kind,) * len(single.of), _in_pairs(single))
    if words[0] == "setp" and len(known) == 3 and words[1] in RELATIONS and kind in TYPES:
        return Value("pred", (kind, kind), _compare(words[1], kind))
    if words == ("abs", "bf16"):
        return Value(kind, (kind,), lambda x: x & 0x7FFF)
    if words == ("max", "bf16"):
        return Value(kind, (kind, kind), lambda x, y: bf16(TWO["max"]["f"](_of_bf16(x), _of_bf16(y))))
    if kind not in TYPES or kind.startswith("bf"):
        return None
    if name in ONE:
        return Value("u32" if name == "popc" else kind, (kind,), ONE[name])
    if name in TWO:
        compute = _of_kind(TWO[name], kind)
        return compute and Value(kind, (kind, kind), _rounded(compute) if kind[0] == "f" else compute)
    if name in ("shl", "shr"):
        return Value(kind, (kind, "u32"), _shift(name, kind))
    if name in ("mul.wide", "mul.hi", "mad.wide") and kind[1:] in ("16", "32"):
        double = kind[0] + str(2 * int(kind[1:]))
        return {
            "mul.wide": Value(double, (kind, kind), lambda x, y: _wide(x) * _wide(y)),
            "mad.wide": Value(double, (kind, kind, double), lambda x, y, z: _wide(x) * _wide(y) + z),
            "mul.hi": Value(kind, (kind, kind), lambda x, y: (_wide(x) * _wide(y) >> 8 * x.itemsize).astype(x.dtype)),
        }[name]
    of, compute = OTHER.get(name, OTHER.get(f"{name}.{kind}", ((), None)))
    return compute and Value(kind, tuple(each or kind for each in of), compute)


def _in_pairs(single: Value) -> Callable[..., Array]:
    """Returns a function that treats each operand as two numbers of half the width. It returns two truths, if any."""

    def compute(*operands: Array) -> Array:
        halves = [np.ascontiguousarray(x).view(TYPES[kind]) for x, kind in zip(operands, single.of, strict=True)]
        result = single.compute(*halves)
        return result.reshape(-1, 2) if single.to == "pred" else result.view("u4")

    return compute


def _wide(x: Array) -> Array:
    return x.astype(f"{x.dtype.kind}{2 * x.itemsize}")


def _rounded(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a function whose results have the type of the first operand, and whose NaN is the canonical one."""

    def canonical(*operands: Array) -> Array:
        result = np.asarray(compute(*operands)).astype(operands[0].dtype)
        nan = np.isnan(result)
        return np.where(nan, NAN[result.dtype.str[1:]].view(result.dtype), result) if nan.any() else result

    return canonical


def _flushed(x: Array) -> Array:
    """Returns float32 with 0 of the same sign in place of each subnormal number."""
    small = (np.abs(x) < np.finfo("f4").tiny) if x.dtype == np.float32 else np.zeros(len(x), bool)
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def _of_kind(compute: Any, kind: str) -> Callable[..., Array]:
    """Returns the function of a type, where floating point, signed and unsigned numbers have different ones."""
    return compute.get(kind[0] if kind[0] in "fs" else "u") if isinstance(compute, dict) else compute


# -- integers -----------------------------------------------------------------------------------------------------


def _quotient(x: Array, y: Array) -> Array:
    """Divides integers towards 0. Division by 0 has no defined result; here all bits are 1."""
    safe = np.where(y == 0, x.dtype.type(1), y)
    whole = x // safe
    whole = whole + ((x % safe != 0) & ((x < 0) != (safe < 0))).astype(x.dtype)
    return np.where(y == 0, ~x.dtype.type(0), whole)


def _shift(name: str, kind: str) -> Callable[..., Array]:
    """Shifts by more than the width give 0, or the sign in each bit."""
    bits = 8 * np.dtype(TYPES[kind]).itemsize

    def shift(x: Array, by: Array) -> Array:
        most = np.minimum(by, bits - 1).astype(x.dtype)
        if name == "shr" and kind[0] == "s":
            return x >> most
        return np.where(by >= bits, x.dtype.type(0), x << most if name == "shl" else x >> most)

    return shift


def _field(x: Array, start: Array, length: Array) -> Array:
    """Returns `length` bits from bit `start` on (bfe); a signed field has its sign in the bits above."""
    bits, signed = 8 * x.itemsize, x.dtype.kind == "i"
    start, length = (start & 255).astype("i8"), (length & 255).astype("i8")
    digits = np.arange(bits)[:, None]
    source = start + np.minimum(digits, np.maximum(length - 1, 0)) if signed else start + digits
    source = np.minimum(source, bits - 1) if signed else source
    there = (length > 0) & ((digits < length) & (source < bits) | signed)
    unsigned = x.view(f"u{x.itemsize}")
    chosen = unsigned >> np.minimum(source, bits - 1).astype(unsigned.dtype) & 1
    return (
        (np.where(there, chosen, 0).astype(unsigned.dtype) << digits.astype(unsigned.dtype))
        .sum(0, dtype=unsigned.dtype)
        .view(x.dtype)
    )


def _permuted(x: Array, y: Array, choice: Array) -> Array:
    """Returns four bytes of the eight of y and x (prmt). Bit 3 of a choice repeats the sign of the byte."""
    both, result = y.astype("u8") << 32 | x, np.zeros(len(x), "u8")
    for place in range(4):
        nibble = choice.astype("u8") >> 4 * place & 15
        byte = both >> 8 * (nibble & 7) & 255
        byte = np.where(nibble & 8, np.where(byte & 128, 255, 0).astype("u8"), byte)
        result |= byte << 8 * place
    return result.astype("u4")


# -- floating point -----------------------------------------------------------------------------------------------


def _signed_zero(pick: Callable[..., Array], of_zeros: Callable[..., Array]) -> Callable[..., Array]:
    """Returns min or max for which -0.0 is less than 0.0."""

    def least(x: Array, y: Array) -> Array:
        bits = f"u{x.itemsize}"
        return np.where((x == 0) & (y == 0), of_zeros(x.view(bits), y.view(bits)).view(x.dtype), pick(x, y))

    return least


def fused(x: Array, y: Array, z: Array) -> Array:
    """Returns x * y + z, rounded once.

    The product of two float32 is exact in float64. The sum is rounded to odd there, so that the second rounding is as
    if it were the only one (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    product, addend = x.astype("f8") * y.astype("f8"), z.astype("f8")
    total = product + addend
    late = total - product
    lost = (product - (total - late)) + (addend - late)
    bits = total.view("i8").copy()
    odd = (lost != 0) & np.isfinite(total) & np.isfinite(lost) & (bits & 1 == 0)
    bits[odd] += np.where((lost > 0) == (total > 0), 1, -1)[odd]
    return bits.view("f8").astype(x.dtype)


def bf16(x: Array) -> Array:
    """Returns float32 as the bits of bfloat16, rounded to the nearest even."""
    bits = x.view("u4")
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("u2")
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def _of_bf16(bits: Array) -> Array:
    return (bits.astype("u4") << 16).view("f4")


def _exactly(function: Callable[..., Array]) -> Callable[..., Array]:
    """Returns a function that computes in float64, then rounds."""
    return _rounded(lambda x: function(x.astype("f8")))


def _compare(relation: str, kind: str) -> Callable[..., Array]:
    """Returns a comparison, which is false if one of the numbers is NaN, but for `nan`."""
    compare = RELATIONS[relation]
    if relation == "ne" and kind[0] == "f":
        compare = lambda x, y: (x < y) | (x > y)  # noqa: E731
    return (lambda x, y: compare(_of_bf16(x), _of_bf16(y))) if kind == "bf16" else compare


RELATIONS: dict[str, Callable[..., Array]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "nan": lambda x, y: np.isnan(x) | np.isnan(y), "num": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
}  # fmt: skip
WHOLE = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _cvt(words: tuple[str, ...], to: str, of: str) -> Value | None:
    """Conversions: integers wrap, floating point saturates in integers, and rounds to the nearest even otherwise."""
    whole = next((WHOLE[word] for word in words if word in WHOLE), None)
    if to not in TYPES or of not in TYPES or not {*words[1:-2]} <= {"rn", "ftz", *WHOLE}:
        return None
    if to in ("bf16x2", "f16x2"):
        half = bf16 if to == "bf16x2" else lambda x: _half(x).view("u2")
        return Value(to, (of, of), lambda x, y: half(x).astype("u4") << 16 | half(y))
    if to == "bf16":
        return Value(to, (of,), bf16) if of == "f32" else None
    if of == "bf16":
        wide = {"f32": _of_bf16, "f16": lambda x: _half(_of_bf16(x))}
        return Value(to, (of,), wide[to]) if to in wide else None
    if of[0] == "f" and to[0] in "us":
        if whole is None:
            return None
        least, most = np.iinfo(TYPES[to]).min, np.iinfo(TYPES[to]).max
        return Value(to, (of,), lambda x: _saturated(whole(x.astype("f8")), least, most).astype(TYPES[to]))
    if of[0] == "f" and whole is not None:
        return Value(to, (of,), _rounded(whole))
    return Value(to, (of,), _half if to == "f16" and of == "f32" else lambda x: x.astype(TYPES[to]))


def _half(x: Array) -> Array:
    return np.where(np.isnan(x), NAN["f2"].view("f2"), x.astype("f2"))


def _saturated(x: Array, least: int, most: int) -> Array:
    """Returns whole numbers as integers of 64 bits; NaN becomes 0, but the highest bit in a result of 64 bits."""
    inside = np.where((x > least) & (x < most), x, 0)
    whole = inside.astype("i8") if least < 0 else inside.astype("u8")
    nan = 0 if most < 2**32 else least or 2**63
    return np.where(np.isnan(x), nan, np.where(x <= least, least, np.where(x >= most, most, whole)))


# -- tables -------------------------------------------------------------------------------------------------------

ONE: dict[str, Callable[..., Array]] = {
    "mov": lambda x: x, "not": np.invert, "neg": np.negative, "abs": np.abs,
    "popc": lambda x: np.bitwise_count(x).astype("u4"), "ex2": _exactly(np.exp2),
    "rsqrt": _exactly(lambda x: 1 / np.sqrt(x)),
}  # fmt: skip
TWO: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "div": {"f": np.divide, "s": _quotient, "u": _quotient},
    "rem": dict.fromkeys("su", lambda x, y: x - _quotient(x, y) * y),
    "min": {"f": _signed_zero(np.fmin, np.bitwise_or), "s": np.minimum},
    "max": {"f": _signed_zero(np.fmax, np.bitwise_and), "s": np.maximum},
    "max.NaN": {"f": _signed_zero(np.maximum, np.bitwise_and)},
    "min.relu": {"s": lambda x, y: np.maximum(np.minimum(x, y), 0)},
}  # fmt: skip
OTHER: dict[str, tuple[tuple[str, ...], Any]] = {  # types of the operands, "" for that of the result
    "selp": (("", "", "pred"), lambda x, y, chosen: np.where(chosen, x, y)),
    "mad.s32": (("", "", ""), lambda x, y, z: x * y + z),
    "mad.s64": (("", "", ""), lambda x, y, z: x * y + z),
    "fma.f32": (("", "", ""), _rounded(fused)),
    "bfe.s32": (("", "u32", "u32"), _field),
    "bfe.u32": (("", "u32", "u32"), _field),
    "prmt.b32": (("u32", "u32", "u32"), _permuted),
}

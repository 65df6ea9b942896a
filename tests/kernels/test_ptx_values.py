"""Executes each instruction of compiled kernels on a CPU, and compares with a few lines of arithmetic.

Expected values come from Python's integers and fractions, and never from the machine that executes PTX.
"""

import math
import random
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from operator import add, and_, eq, ge, gt, le, lt, mul, or_, sub, truediv, xor
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ptx_body import run

COUNT = 1536  # operands of each form
FLOATS = {"f16": (16, 11, -24), "bf16": (16, 8, -133), "f32": (32, 24, -149)}  # bits, digits, exponent of the last one
BITS = {f"{sign}{n}": n for sign in "bus" for n in (8, 16, 32, 64)} | {kind: FLOATS[kind][0] for kind in FLOATS}
BITS |= {"pred": 1, "bf16x2": 32, "f16x2": 32}
LETTERS = {1: "p", 8: "rs", 16: "rs", 32: "r", 64: "rd"}  # of the registers
ODD: dict[str, Sequence[int]] = {  # bits that go wrong easily: limits, ties, NaNs with a payload
    "f16": [0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7E01],
    "bf16": [0, 1, 0x7F, 0x80, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FC1],
    "f32": [
        0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F808000, 0x3F818000, 0x46FFFE00, 0x477FEFFF, 0x477FF000, 0x4EFFFFFF,
        0x4F000000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC12345,
    ],
}  # fmt: skip
ODD |= dict.fromkeys({*BITS} - {*ODD}, (0, 1, 2, 31, 32, 33, 63, 64, 127, 128, 255, 2**15 - 1, 2**31 - 1, 2**63 - 1))
TWICE = {  # a * b + c is one unit too large if it is first rounded to 53 digits, or to 24
    "f32": (0x33800001, 0x3F7FFFFE, 0x3F800001), "f16": (0x1001, 0x3BFE, 0x3C01),
}  # fmt: skip

# form -> the exact result (None if the manual leaves it open), types of the operands and of the result, and by how many
# units in the last place it may differ
ROWS: dict[str, tuple[Callable[..., Any], list[str], str, int]] = {}


def rows(forms: str, want: Callable[..., Any], types: str = "T T", ulps: int = 0) -> None:
    """Adds a row for each form. types: of the operands, then ">" and that of the result, if another than `T`.

    `T` is the last part of the form's name, `D` the part before, and `W` twice as wide as `T`.
    """
    for form in forms.split():
        *_, before, last = form.split(".")
        names = {"T": last, "D": before, "W": f"{last[0]}{2 * BITS[last]}"}
        words = (types if ">" in types else types + " T").replace(">", " ").split()
        *takes, gives = [names.get(word, word) for word in words]
        ROWS[form] = want, takes, gives, ulps


# -- numbers -------------------------------------------------------------------------------------


def decoded(bits: int, kind: str) -> Any:
    """Returns the number that these bits are."""
    if kind == "bf16":
        bits, kind = bits << 16, "f32"
    if kind in FLOATS:
        return np.float64(struct.unpack("<f" if kind == "f32" else "<e", bits.to_bytes(BITS[kind] // 8, "little"))[0])
    bits &= (1 << BITS[kind]) - 1
    return bits - (bits >> BITS[kind] - 1 << BITS[kind]) if kind[0] == "s" else bits


def encoded(value: Any, kind: str) -> int:
    """Returns the bits of an exact number: wrapped if an integer, otherwise rounded to nearest, ties to even."""
    if kind not in FLOATS:
        return int(decoded(int(value), kind)) & (1 << max(16, BITS[kind])) - 1
    bits, digits, least = FLOATS[kind]
    sign, infinite = int(math.copysign(1, value) < 0) << bits - 1, (1 << bits - 1) - (1 << digits - 1)
    if not value or abs(value) == math.inf:
        return sign | (infinite if value else 0)
    exact = abs(Fraction(value))
    step = max(math.frexp(exact)[1] - digits, least)
    return sign | min(round(exact / Fraction(2) ** step) + (step - least << digits - 1), infinite)


def odd(kind: str) -> list[int]:
    """Returns special bits of a type, each also with the other sign."""
    return [(bits ^ sign) & (1 << BITS[kind]) - 1 for bits in ODD[kind] for sign in (0, 1 << BITS[kind] - 1)]


def operand(kind: str, chance: random.Random) -> int:
    """Returns any bits, special ones, or those of a small number."""
    small = chance.getrandbits(chance.randrange(1, 26)) * chance.choice([-1.0, 1.0]) / 2 ** chance.randrange(30)
    near = encoded(small if kind in FLOATS else small % 64, kind)
    return chance.choice([chance.getrandbits(max(16, BITS[kind])), chance.choice(odd(kind)), near])


def operands(kinds: list[str], chance: random.Random) -> list[tuple[int, ...]]:
    """Returns all pairs of special operands, or `TWICE`, and random ones."""
    pairs = list(product(*map(odd, kinds))) if len(kinds) < 3 else [TWICE[kind] for kind in kinds[:1] if kind in TWICE]
    return pairs + [tuple(operand(kind, chance) for kind in kinds) for _ in range(COUNT - len(pairs))]


def same(got: int, want: Any, kind: str, ulps: int) -> bool:
    """Returns whether a register holds a value. Of a result that is not a number, the manual leaves the bits open."""
    if kind.endswith("x2"):
        halves = zip((got >> 16, got & 65535), want, strict=True)
        return all(same(half, value, kind[:-2], ulps) for half, value in halves)
    if want is None or want != want:
        return want is None or bool(np.isnan(decoded(got, kind)))
    return abs(got - encoded(want, kind)) <= ulps


# -- what instructions do ------------------------------------------------------------------------


def quotient(a: int, b: int) -> int | None:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else None


def field(a: int, start: int, length: int, sign: int = 0) -> int:
    bits = a >> (start & 255) & (1 << (length & 255)) - 1
    return bits - (bits << sign >> (length & 255) << (length & 255))


def permuted(a: int, b: int, select: int) -> int:
    data, picks = (b << 32 | a).to_bytes(8, "little"), [select >> 4 * place & 15 for place in range(4)]
    return int.from_bytes(bytes(data[p & 7] if p < 8 else data[p & 7] // 128 * 255 for p in picks), "little")


def fused(a: Any, b: Any, c: Any) -> Any:
    total = a * b + c
    return Fraction(a) * Fraction(b) + Fraction(c) if total and math.isfinite(total) else total


def least(a: Any, b: Any) -> Any:
    return b if a != a else a if b != b else min(a, b, key=lambda x: (x, math.copysign(1, x)))


def flushed(a: Any) -> Any:
    return np.copysign(0.0, a) if abs(a) < 2.0**-126 else a


rows("add.s16 add.s32 add.s64 add.rn.f32", add)
rows("sub.s32 sub.s64 sub.rn.f32", sub)
rows("mul.lo.s32 mul.lo.s64 mul.rn.f32", mul)
rows("mul.hi.s32 mul.hi.u32", lambda a, b: a * b >> 32)
rows("mul.wide.s16 mul.wide.u16 mul.wide.s32 mul.wide.u32", mul, "T T > W")
rows("mad.lo.s32 mad.lo.s64", lambda a, b, c: a * b + c, "T T T")
rows("mad.wide.u16 mad.wide.s32 mad.wide.u32", lambda a, b, c: a * b + c, "T T W > W")
rows("div.s32 div.s64 div.u32", quotient)
rows("rem.s32 rem.s64 rem.u32", lambda a, b: a - b * (quotient(a, b) or 0) if b else None)
rows("min.s32 min.s64", min)
rows("max.s32 max.s64", max)
rows("min.relu.s32", lambda a, b: max(min(a, b), 0))
rows("neg.s32 neg.s64 neg.f32", lambda a: -a, "T")
rows("abs.s64 abs.f32 abs.f16 abs.bf16", abs, "T")
rows("and.b16 and.b32 and.b64 and.pred", and_)
rows("or.b16 or.b32 or.b64 or.pred", or_)
rows("xor.b16 xor.b32 xor.pred", xor)
rows("not.b32 not.pred", lambda a: ~a, "T")
rows("shl.b16 shl.b32 shl.b64", lambda a, by: a << min(by, 64), "T u32")
rows("shr.s16 shr.u16 shr.s32 shr.u32 shr.s64 shr.u64", lambda a, by: a >> min(by, 64), "T u32")
rows("bfe.u32", field, "T u32 u32")
rows("bfe.s32", lambda a, start, length: field(a, start, length, 1), "T u32 u32")
rows("popc.b32", int.bit_count, "T")
rows("prmt.b32", permuted, "T T T")
rows("selp.b16 selp.b32 selp.b64", lambda a, b, first: a if first else b, "T T pred")
rows("selp.f32", lambda a, b, first: a if first else b, "b32 b32 pred > b32")  # keeps the payload of a NaN
rows("mov.b16 mov.b32 mov.b64 mov.u16 mov.u32 mov.u64 mov.pred", lambda a: a, "T")
RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": eq, "lt": lt, "le": le, "gt": gt, "ge": ge, "ne": lambda a, b: a < b or a > b,
    "num": lambda a, b: a == a and b == b, "nan": lambda a, b: a != a or b != b,
}  # fmt: skip
COMPARISONS = """eq.b16 eq.b32 eq.b64 ne.b16 ne.b32 ne.b64 ne.f32 lt.s32 lt.u32 lt.s64 lt.u64 le.s32 le.s64 gt.s32
gt.u32 gt.s64 gt.f32 ge.s32 ge.s64 ge.f32 num.f32 num.f16 num.bf16 nan.f32 nan.f16 nan.bf16"""
for compare in COMPARISONS.split():
    rows(f"setp.{compare}", RELATIONS[compare.partition(".")[0]], "T T > pred")
rows("cvt.s64.s32 cvt.u64.u32 cvt.u32.u64 cvt.u16.u64 cvt.u16.u32 cvt.u32.u16 cvt.s16.s8 cvt.s8.s32", int, "T > D")
rows("cvt.f32.f16 cvt.f32.bf16 cvt.rn.f16.bf16 cvt.rn.f16.f32 cvt.rn.bf16.f32 cvt.rn.f32.s16", lambda a: a, "T > D")
rows("cvt.rn.bf16x2.f32 cvt.rn.f16x2.f32", lambda high, low: (high, low), "T T > D")
rows("cvt.rzi.s32.f32", lambda a: 0 if a != a else int(min(max(a, -(2.0**31)), 2**31 - 1)), "T > D")
rows("cvt.rzi.s16.f32", lambda a: 0 if a != a else int(min(max(a, -(2.0**15)), 2**15 - 1)), "T > D")
rows("cvt.rzi.s64.f32", lambda a: -(2**63) if a != a else int(min(max(a, -(2.0**63)), 2**63 - 1)), "T > D")
rows("cvt.rmi.ftz.f32.f32", lambda a: np.floor(flushed(a)), "T")
rows("fma.rn.f32", fused, "T T T")
rows("div.rn.f32", truediv)
rows("div.full.f32", truediv, ulps=2)
rows("ex2.approx.f32", lambda a: np.float64(2) ** a, "T", ulps=2)
rows("rsqrt.approx.ftz.f32", lambda a: 1 / np.sqrt(flushed(a)), "T", ulps=2)
rows("min.f32", least)
rows("max.f32 max.f16 max.bf16", lambda a, b: -least(-a, -b))
rows("max.NaN.f32", lambda a, b: a if a != a else b if b != b else -least(-a, -b))


# -- each row executed ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", ROWS)
def test_an_instruction_computes_as_the_manual_says(form: str, generator: torch.Generator) -> None:
    want, takes, gives, ulps = ROWS[form]
    given, out = operands(takes, random.Random(generator.initial_seed())), torch.zeros(COUNT, dtype=torch.int64)
    widths = [max(16, BITS[kind]) for kind in [*takes, gives]]
    names = [f"%{LETTERS[BITS[kind]]}{40 + k}" for k, kind in enumerate([*takes, gives])]
    cells = [f"%{LETTERS[bits]}{40 + k}" for k, bits in enumerate(widths)]
    body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.s32 %r3, %r1, 128, %r2;"
    for k, (bits, name, cell) in enumerate(zip(widths, names, cells, strict=True)):
        body += f"mad.wide.u32 %rd{20 + k}, %r3, 8, %rd{k}; ld.global.b{bits} {{{cell}}}, [%rd{20 + k} + 0];"
        body += f"and.b16 {cell}, {cell}, 1; setp.ne.b16 {name}, {cell}, 0;" * (name != cell)
    body += f"{form} {', '.join([names[-1], *names[:-1]])};"
    body += f"selp.b16 {cells[-1]}, 1, 0, {names[-1]};" * (gives == "pred")
    body += f"st.global.b{widths[-1]} [%rd{20 + len(takes)} + 0], {{{cells[-1]}}};"
    columns = [torch.from_numpy(np.array(column, np.uint64).view(np.int64)) for column in zip(*given, strict=True)]
    run(body, *columns, out, warps=4, grid=(COUNT // 128,))
    with np.errstate(all="ignore"):
        for got, bits_of in zip(out.tolist(), given, strict=True):
            wanted = want(*map(decoded, bits_of, takes))
            assert same(got & (1 << widths[-1]) - 1, wanted, gives, ulps), (form, *map(hex, bits_of), hex(got), wanted)

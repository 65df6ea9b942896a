"""Values of salts: two allowed values never share an entry of the cache or a digest; other values are refused."""

from collections import namedtuple
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum, IntEnum, StrEnum
from fractions import Fraction
from typing import Any
from uuid import UUID

import numpy as np
import pytest

import memstate as ms
from memstate.checks import NESTED, require_salt, shown
from memstate.salts import encode
from memstate.tiers.keys import Keys
from memstate.tokens import SaltedTokens
from tests.support.splits import TOKENS, Model
from tests.support.tiered_small import PAGE, T, push_down, tiered, turn
from tests.support.virtual import MemoryStore

HUGE = 10**5000  # a number with more digits than Python prints


def nested(depth: int, value: Hashable = 1) -> Hashable:
    for _ in range(depth):
        value = (value,)
    return value


ALIKE: list[Hashable] = [
    None, 0, 1, -1, 255, 256, 2**64, HUGE, -HUGE, "", "0", "1", "None", "True", "1.0", "é", "e\u0301", "\ud800", "\0",
    "\ud83d\ude00", "\U0001f600", "a" * 10**5, "a" * 10**5 + "b", b"", b"0", b"1", b"\0", b"None", (), ((),), (1,),
    ("1",), (b"1",), ((1,),), (None,), (1, 1), ("1", 1), ("a", "b"), ("ab",), (("a",), "b"), ("a", ("b",)),
    (b"a", "b"), (1, 2), (12,), nested(NESTED),
]  # fmt: skip


class Odd(str):
    """A str that claims to equal every object."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("a")


class Silent:
    """An object whose `repr` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@dataclass(frozen=True)
class Tenant:
    name: str


Number = IntEnum("Number", "ONE")
Word = StrEnum("Word", "ONE")
Colour = Enum("Colour", "RED")
Pair = namedtuple("Pair", "left right")
ODD: dict[str, Any] = {
    "bool": True, "float": 1.0, "minus zero": -0.0, "nan": float("nan"), "complex": 1 + 0j, "fraction": Fraction(1),
    "numpy integer": np.int64(1), "numpy text": np.str_("a"), "numpy float": np.float64(1), "int enum": Number.ONE,
    "str enum": Word.ONE, "enum": Colour.RED, "named tuple": Pair(1, 2), "odd text": Odd("a"), "dataclass": Tenant("a"),
    "uuid": UUID(int=1), "frozenset": frozenset((1,)), "object": object(), "type": int, "no text": Silent(),
    "list": ["a"], "bytearray": bytearray(b"a"), "within": ("a", True), "within within": ("a", (1, 1.0)),
    "huge within": (HUGE, True), "too deep": nested(NESTED + 1), "far too deep": nested(10**5),
}  # fmt: skip


def test_salts_that_look_alike_do_not_meet() -> None:
    assert len(set(ALIKE)) == len(ALIKE) and all(require_salt(salt) is salt for salt in ALIKE)
    mem = tiered(tiers={"host_slots": 64, "host_pages": 64}, slots=64)
    for salt in ALIKE:
        assert turn(mem, T[:4], salt=salt) == 0
    mem.poll()
    assert [mem.match(T[:5], salt).length for salt in ALIKE] == [4] * len(ALIKE)
    push_down(mem)
    matches = [mem.match(T[:5], salt) for salt in ALIKE]
    assert [(one.length, one.host_length) for one in matches] == [(0, 4)] * len(ALIKE)


def test_salts_that_look_alike_have_other_digests() -> None:
    keys, key = Keys(bytes(32), PAGE), ms.tokens.encode(T[:4])
    assert (
        len({encode(salt) for salt in ALIKE})
        == len({keys.of(SaltedTokens(key, salt))[0] for salt in ALIKE})
        == len(ALIKE)
    )


def test_equal_salts_are_one_whoever_made_them() -> None:
    mem = tiered()
    turn(mem, T[:8], salt=("ten", (1, b"ant")))
    again = ("".join(["t", "en"]), (int("1"), bytes(bytearray(b"ant"))))
    assert mem.match(T[:9], again).length == 8 and encode(again) == encode(("ten", (1, b"ant")))


DOORS: dict[str, Callable[[ms.StateManager, Any], object]] = {
    "admit": lambda mem, salt: mem.admit([ms.Request(0, tokens=T[:9]), ms.Request(1, tokens=T[:9], salt=salt)]),
    "admit without tokens": lambda mem, salt: mem.admit([ms.Request(1, salt=salt)]),
    "match": lambda mem, salt: mem.match(T, salt),
    "prefetch": lambda mem, salt: mem.prefetch(T, salt),
    "digests": lambda mem, salt: Keys(bytes(32), PAGE).of(SaltedTokens(b"", salt)),
    "hand over": lambda mem, salt: Model().hand_over(MemoryStore(), 1, MemoryStore(), 1, 0).run(TOKENS, salt),
}  # fmt: skip


@pytest.mark.sample(40)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_salt_is_refused(door: str, odd: str) -> None:
    mem = tiered(tiers={"store": MemoryStore()})
    turn(mem, T[:8], salt=1)
    before = mem.stats(), mem.prefix.inspect()
    with pytest.raises(ms.InvalidArgument, match=r"^salt .* of .*: expected None, str, .* tuple .* give the tenant's"):
        DOORS[door](mem, ODD[odd])
    assert (mem.stats(), mem.prefix.inspect()) == before
    mem.audit().raise_if_leaking()


def test_values_are_shown_as_far_as_they_can_be() -> None:
    assert [shown(value) for value in ("a", Silent(), HUGE)] == ["'a'", "<Silent>", "<int>"]
    assert shown("x" * 10**6) == "'" + "x" * 199 + ".."


def test_parts_of_a_salt_are_counted_not_followed_for_ever() -> None:
    """A part that several tuples share counts once per tuple. The count stops at a limit, which the refusal names."""
    assert require_salt(tuple(range(999))) == tuple(range(999))
    shared: tuple[object, ...] = ("x",) * 10
    for _ in range(7):
        shared = (shared,) * 10
    for salt in (tuple(range(1000)), shared):
        with pytest.raises(ms.InvalidArgument, match="at most 1000 parts"):
            require_salt(salt)

"""Tokens as keys: every form of whole numbers gives the same bytes, and anything else is refused by name."""

import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import memstate as ms
from memstate.tokens import BYTES, SaltedTokens, common, encode, ids, joined
from tests.support.build import build

INT64 = st.integers(-(2**63), 2**63 - 1)
EDGES = st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**32 + 1, -1, -(2**63)])  # some have equal lower halves
SMALL = st.integers(0, 127)
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "tuple": tuple,
    "int32": lambda tokens: np.array(tokens, np.int32),
    "uint64": lambda tokens: np.array(tokens, np.uint64),
    "big-endian": lambda tokens: np.array(tokens, ">i4"),
    "backwards": lambda tokens: np.array(tokens[::-1], np.int64)[::-1],
    "read-only": lambda tokens: np.frombuffer(np.array(tokens, np.int64).tobytes() + bytes(8), np.int64)[: len(tokens)],
    "array of longs": lambda tokens: array("q", tokens),
    "bytes": bytes,
    "tensor": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "every second of a tensor": lambda tokens: torch.tensor([x for t in tokens for x in (t, 99)], dtype=torch.int16)[
        ::2
    ],
    "list of numpy integers": lambda tokens: list(np.array(tokens, np.int16)),
    "range": lambda tokens: range(len(tokens)) if tokens == list(range(len(tokens))) else tokens,
}


def spelled(tokens: list[int]) -> bytes:
    """Returns the expected key of small tokens: the bytes of each token, one after the other."""
    return b"".join(token.to_bytes(BYTES, "little") for token in tokens)


@given(st.lists(INT64 | EDGES))
@example([])
@example([2**63 - 1, -(2**63), 0, -1])
@example([0, 2**32 - 1])
@example([2**32])
def test_a_key_is_the_tokens_four_bytes_each_if_all_fit(tokens: list[int]) -> None:
    key = encode(tokens)
    assert key == encode(tuple(tokens)) == encode(np.array(tokens, np.int64)) and ids(key).tolist() == tokens
    assert (key == spelled(tokens)) if all(0 <= token < 2**32 for token in tokens) else not isinstance(key, bytes)


@settings(max_examples=300)
@given(st.lists(EDGES, max_size=9), st.lists(EDGES, max_size=9), st.integers(0, 9), st.integers(0, 18))
def test_equal_tokens_are_one_key_however_it_was_cut_and_joined(
    one: list[int], other: list[int], a: int, b: int
) -> None:
    key, part = encode(one) + encode(other), slice(a * BYTES, b * BYTES)
    assert key == joined([encode(one), encode(other)]) == encode(one + other) and len(key) == BYTES * len(one + other)
    assert key[part] == encode((one + other)[a:b]) and hash(key[part]) == hash(encode((one + other)[a:b]))
    assert (encode(one) == encode(other)) == (one == other)
    same = next((at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    assert common(encode(one), encode(other), BYTES) == same * BYTES


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20)
@given(st.lists(SMALL, max_size=9))
@example([])
@example([0])
@example([0, 1, 2, 3])
def test_the_form_of_tokens_does_not_matter(form: str, tokens: list[int]) -> None:
    given_tokens = FORMS[form](tokens)
    assert encode(given_tokens) == spelled(tokens)
    assert list(given_tokens) == tokens  # `encode` has not changed its argument


REFUSED: dict[str, Any] = {
    "a word": "abc",
    "nothing": None,
    "one number": 5,
    "a float among numbers": [1, 2, 3.5],
    "a list in a list": [[1, 2]],
    "too large": [2**63],
    "too large without a sign": np.array([1, 2**63], np.uint64),
    "objects": np.array([1, 2**70], dtype=object),
    "two dimensions": np.zeros((2, 2), np.int64),
    "an array of doubles": array("d", [1.0]),
    "a tensor of floats": torch.tensor([1.0]),
    "a tensor elsewhere": torch.zeros(2, dtype=torch.int64, device="meta"),
    "a set": {1, 2},
    "a mapping": {1: 2},
    "a generator": (token for token in (1, 2)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_sequence_of_whole_numbers_is_refused(what: str) -> None:
    with pytest.raises(ms.InvalidArgument, match=r"tokens: .*expected whole numbers|tokens: .*does not fit 64 bits"):
        encode(REFUSED[what])


@pytest.mark.parametrize(
    "what", ["a word", "a float among numbers", "too large", "two dimensions", "a tensor of floats"]
)
def test_every_door_for_tokens_refuses_and_changes_nothing(what: str) -> None:
    layout = ms.StateLayout([ms.Plane("s", (4,), torch.float32)], layers=1)
    mem = build(
        layout, slots=6, max_requests=2, tracking=ms.Redirect(4), backend="reference", prefix=ms.Prefix(), pages=8,
        page_size=2, pages_per_row=4,
    )  # fmt: skip
    (row,) = mem.admit([ms.Request("a", tokens=[1, 2, 3])])
    before = (mem.stats(), mem.info(row).length)
    bad = REFUSED[what]
    for call in (
        lambda: mem.match(bad),
        lambda: mem.admit([ms.Request("b", tokens=[1]), ms.Request("c", tokens=bad)]),
        lambda: mem.publish([row], keep="cache", tokens=[bad]),
        lambda: mem.end([row], keep="cache", tokens=[bad]),
        lambda: mem.end([row], keep="cache", tokens=[bad]),
    ):
        with pytest.raises(ms.InvalidArgument, match=r"^tokens: .*expected whole numbers"):
            call()
        assert (mem.stats(), mem.info(row).length) == before
    step = mem.plan([row])
    with pytest.raises(ms.InvalidArgument, match=r"^tokens: .*expected whole numbers"):
        mem.cancel(step, keep="cache", tokens=[bad])
    mem.settle(step)
    for tokens in ([], [[1], [2]], [1]):  # each row needs one sequence
        with pytest.raises(ms.InvalidArgument, match=r"^tokens\b"):
            mem.publish([row], keep="cache", tokens=tokens)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="no tokens"):
        mem.admit([ms.Request("d", tokens=[])])
    mem.end([row])
    mem.audit().raise_if_leaking()


def test_tokens_of_a_request_are_read_at_once() -> None:
    """A key does not change if the caller later fills the buffer of the tokens with others."""
    buffer = np.arange(6)
    key = encode(buffer)
    buffer[:] = 0
    assert key == encode(range(6))


def test_the_first_tokens_of_a_prompt_keep_its_salt() -> None:
    tokens, salt = [5, 6, 7], ("tenant", 1)
    prompt = SaltedTokens(encode(tokens), salt)
    for n in range(5):
        assert prompt.head(n) == SaltedTokens(encode(tokens[:n]), salt) and prompt.head(n).tokens == min(n, 3)
    assert prompt != SaltedTokens(encode(tokens), None)


@settings(max_examples=300)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 8, 32]))
def test_common_is_what_a_loop_over_units_finds(seed: int, unit: int) -> None:
    chance = random.Random(seed)
    start, offset = chance.randrange(20), chance.randrange(20)
    shared = chance.randbytes(chance.randrange(8) * unit + chance.randrange(unit))
    one = chance.randbytes(start) + shared + chance.randbytes(chance.randrange(3 * unit))
    other = chance.randbytes(offset) + shared + chance.randbytes(chance.randrange(3 * unit))
    naive = 0
    while (
        start + naive + unit <= len(one)
        and offset + naive + unit <= len(other)
        and one[start + naive : start + naive + unit] == other[offset + naive : offset + naive + unit]
    ):
        naive += unit
    assert common(one, other, unit, start, offset) == naive
    assert naive >= len(shared) // unit * unit

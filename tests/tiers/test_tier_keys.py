"""Keys of prefixes: equal in every process, and different for different prefixes."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import numpy as np
import pytest
import torch

from memstate import Plane, StateLayout
from memstate.errors import InvalidArgument
from memstate.tiers import keys as module
from memstate.tiers.keys import Keys, fingerprint
from memstate.tokens import BYTES, Key, SaltedTokens
from memstate.tokens import encode as encode_tokens

STATE = StateLayout((Plane("conv", (6, 3), torch.bfloat16), Plane("ssm", (2, 4, 4), torch.float32)), layers=3)
KV = StateLayout((Plane("k", (4, 2, 8), torch.float16), Plane("v", (4, 2, 8), torch.float16)), layers=1)
KEYS = Keys(fingerprint("model", STATE, KV, 4, 0, 1), page_tokens=4)


def tokens(n: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(8 * n)


def key_of(tokens: bytes) -> Key:
    return encode_tokens(np.frombuffer(tokens, np.int64))


def test_values_are_those_of_every_other_process() -> None:
    """These values never change: with other values, no process would find what storage has."""
    assert KEYS.fingerprint.hex() == "4ac088215539508cd7617a602fe921a3391aa7c1999c8715846ef3bd9cb7fd98"
    digests = KEYS.of(SaltedTokens(encode_tokens(range(9)), ("tenant", 7, None, 1, b"\xff", -129)))
    assert [digest.hex() for digest in digests] == [
        "8903c73b9b50f18f1dbb69d79c8a9dd3626146f57142bf350573e7d78341af9d",
        "32cee0323a69ac96663f01ae3fe3ba632e9dd1d30680a88b34610b4d8454a0bf",
    ]
    keys = Keys(bytes(range(32)), 2)
    wide = keys.of(SaltedTokens(encode_tokens([-1, 2**31, 2**32 - 1, 2**32, -(2**63), 2**63 - 1, 0, 7]), "salt"))
    assert [digest.hex()[:32] for digest in wide] == [
        "5d24e4692182ad97ed60c6217c398f32", "f3e6aa5a794c509c5d32085ca68d96c7",
        "59270a511ab89dd99c3e974a4c0d49b2", "88d71046c41aaf9eb165249bccd435cf",
    ]  # fmt: skip


def test_a_digest_stands_for_all_tokens_before_it() -> None:
    raw = tokens(32, 1)
    key = key_of(raw)
    whole = KEYS.of(SaltedTokens(key, None))
    assert len(set(whole)) == 8
    for n in range(33):
        assert KEYS.of(SaltedTokens(key[: n * BYTES], None)) == whole[: n // 4]
    for changed in range(len(raw)):  # one bit anywhere changes the digests of this page and of all after it
        other = bytearray(raw)
        other[changed] ^= 1
        digests = KEYS.of(SaltedTokens(key_of(bytes(other)), None))
        page = changed // 32
        assert digests[:page] == whole[:page] and not set(digests[page:]) & set(whole)


@pytest.mark.parametrize("known", range(10))
def test_what_is_known_is_not_computed_again(known: int, monkeypatch: pytest.MonkeyPatch) -> None:
    key, calls = key_of(tokens(4 * 9 + 3, 2)), []
    whole = KEYS.of(SaltedTokens(key, "salt"))

    def counted(data: bytes, digest_size: int) -> object:
        calls.append(len(data))
        return blake2b(data, digest_size=digest_size)

    monkeypatch.setattr(module, "blake2b", counted)
    given_digests = tuple(whole[:known])
    assert KEYS.of(SaltedTokens(key, "salt"), given_digests) == whole
    assert len(calls) == 9 - known + (not known) and calls[not known :] == [32 + 4 * 8] * (9 - known)


def test_whatever_changes_bytes_changes_the_fingerprint() -> None:
    conv, ssm = STATE.planes
    states = [
        STATE, None, replace(STATE, layers=4), replace(STATE, planes=(ssm, conv)), replace(STATE, planes=(conv,)),
        replace(STATE, planes=(conv, replace(ssm, dtype=torch.bfloat16))),
        replace(STATE, planes=(conv, replace(ssm, dtype=torch.int32))),
        replace(STATE, planes=(conv, replace(ssm, shape=(4, 2, 4)))),
        replace(STATE, planes=(conv, replace(ssm, shape=(32,)))),
        replace(STATE, planes=(conv, replace(ssm, name="state"))),
        replace(STATE, planes=(conv, replace(ssm, order="value_key"))),
        *(replace(STATE, planes=(conv, replace(ssm, grid=grid))) for grid in (4, None)),
        replace(STATE, planes=(conv, replace(ssm, layers=4))),
    ]  # fmt: skip
    made = [fingerprint("model", state, KV, 4, 0, 2) for state in states]
    made += [fingerprint("model", STATE, kv, 4, 0, 2) for kv in (None, STATE, replace(KV, layers=2))]
    made += [fingerprint("model", KV, STATE, 4, 0, 2), fingerprint("model", None, None, 4, 0, 2)]
    made += [fingerprint("Model", STATE, KV, 4, 0, 2), fingerprint("model", STATE, KV, 8, 0, 2)]
    made += [fingerprint("model", STATE, KV, 4, 1, 2), fingerprint("model", STATE, KV, 4, 0, 4)]
    assert len(set(made)) == len(made) and all(len(digest) == 32 for digest in made)


@pytest.mark.parametrize("what", ["version of the record", "byte order"])
def test_what_else_is_in_the_fingerprint(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "byte order":
        monkeypatch.setattr("sys.byteorder", {"little": "big", "big": "little"}[module.sys.byteorder])
    else:
        monkeypatch.setattr(module, "VERSION", 2)
    assert fingerprint("model", STATE, KV, 4, 0, 1) != KEYS.fingerprint


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
@pytest.mark.parametrize("alignment", [16, 256])
def test_where_planes_lie_on_the_device_is_not_in_the_fingerprint(order: str, alignment: int) -> None:
    state, kv = (replace(layout, order=order, alignment=alignment) for layout in (STATE, KV))
    assert fingerprint("model", state, kv, 4, 0, 1) == KEYS.fingerprint


MODELS = [(b"model", 4, 0, 1), ("model", 0, 0, 1), ("model", 4, 1, 1), ("model", 4, -1, 1), ("model", 4, 0, 0)]
REFUSED = [lambda given=given: fingerprint(given[0], STATE, KV, *given[1:]) for given in MODELS]
REFUSED += [partial(Keys, *given) for given in ((b"short", 4), (bytearray(32), 4), ("f" * 32, 4), (bytes(32), 0))]


@pytest.mark.parametrize("call", REFUSED)
def test_what_cannot_be_meant_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument):
        call()

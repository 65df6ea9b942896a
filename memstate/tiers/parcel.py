"""Writes what a parked request is, without its records, as bytes: its manifest. docs/record-format.md describes it.

    head: numbers of a fixed size | keys and digests of records | tokens | kind | bytes of the caller | digest of all

No manifest is trusted: its digest is checked first, and a reader counts from its own layout what must be there.
"""

import struct
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from hmac import compare_digest
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from memstate.checks import INT32_MAX
from memstate.errors import InvalidArgument
from memstate.requests.handles import Parked
from memstate.salts import encode
from memstate.tiers.records import DIGEST_BYTES
from memstate.tokens import NUMBER, SaltedTokens, ids
from memstate.tokens import encode as encode_tokens

MAGIC = b"memstate parked 1\n"
MOST_BYTES, LONGEST_KEY = 2**24, 64
KINDS = ("state", "kv", "row")  # the order of the records
_HEAD = struct.Struct("<18s32s32sQQ3QQQQ")  # magic fingerprint salt length pending records tokens kind user


class Recorded(NamedTuple):
    """A record of a parked request in a store.

    Attributes:
        key: Its key.
        digest: With a shared key, the digest of its bytes; otherwise empty.
    """

    key: bytes
    digest: bytes


def digest_of(data: Any, shared: bytes = b"") -> bytes:
    """Returns 32 bytes that stand for some bytes. With a shared key, only those who have it can compute them."""
    return blake2b(data, digest_size=DIGEST_BYTES, key=shared).digest()


def pack(fingerprint: bytes, parked: Parked, records: Mapping[str, Sequence[Recorded]], shared: bytes) -> bytes:
    """Returns the manifest of a parked request.

    Args:
        fingerprint: Stands for model, layouts and rank.
        parked: The handle.
        records: Kind -> its records in order.
        shared: The key that writer and readers share; empty for none.
    """
    listed, prompt = [records.get(kind, ()) for kind in KINDS], parked.prompt
    kind = (prompt.kind or "").encode(errors="replace")  # any text is a kind, also half of a pair of surrogates
    head = _HEAD.pack(
        MAGIC, fingerprint, digest_of(encode(prompt.salt)), parked.length, parked.pending, *map(len, listed),
        prompt.tokens, len(kind), len(parked.user),
    )  # fmt: skip
    parts = [part for of_kind in listed for one in of_kind for part in one]
    body = b"".join([head, *parts, ids(prompt.key).tobytes(), kind, parked.user])
    return body + digest_of(body, shared)


def unpack(
    manifest: bytes, fingerprint: bytes, salt: Hashable, shared: bytes
) -> tuple[Parked, dict[str, list[Recorded]]]:
    """Returns a parked request, and kind -> its records in order.

    Args:
        manifest: What `pack` returned.
        fingerprint: That of the reader.
        salt: That of the reader.
        shared: The key that writer and readers share; empty for none.

    Raises:
        InvalidArgument: The bytes are no manifest, are damaged, or are sealed with another key; or the request is of
            another model, layout, page size, rank or salt.
    """
    if not isinstance(manifest, bytes | bytearray | memoryview):
        raise InvalidArgument(f"a manifest of {type(manifest).__name__}: expected the bytes that a write has made")
    body, seal = bytes(manifest[:-DIGEST_BYTES]), bytes(manifest[-DIGEST_BYTES:])
    if not _HEAD.size <= len(body) < MOST_BYTES or not compare_digest(digest_of(body, shared), seal):
        raise InvalidArgument(f"{len(manifest)} bytes are no manifest, are damaged, or are sealed with another key=")
    magic, mark, of_salt, length, pending, *counts, tokens, kind, user = _HEAD.unpack_from(body)
    if (magic, mark, of_salt) != (MAGIC, fingerprint, digest_of(encode(salt))):
        raise InvalidArgument("a parked request of another model, layout, page size, rank or salt")
    each = DIGEST_BYTES * (1 + bool(shared))
    ends = list(accumulate([*(each * n for n in counts), tokens * NUMBER, kind, user], initial=_HEAD.size))
    if not pending <= length <= INT32_MAX or ends[-1] != len(body):
        raise InvalidArgument(f"a manifest of {len(manifest)} bytes whose numbers contradict each other")
    *listed, key, named, more = (body[start:end] for start, end in pairwise(ends))
    records = dict[str, list[Recorded]]()
    for of, part in zip(KINDS, listed, strict=True):
        cut = [part[at : at + each] for at in range(0, len(part), each)]
        records[of] = [Recorded(one[:DIGEST_BYTES], one[DIGEST_BYTES:]) for one in cut]
    prompt = SaltedTokens(encode_tokens(np.frombuffer(key, np.int64)), salt, named.decode(errors="replace") or None)
    return Parked(length, pending, prompt, more), records

"""Writes what a parked request is, without its records, as bytes: its manifest. docs/record-format.md describes it.

    text: of what it is | numbers | keys and digests of records | tokens | kind | bytes of the caller | digest of all

No manifest is trusted: its digest is checked first, and a reader counts from its own layout what must be there.
"""

import struct
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from hmac import compare_digest
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from memstate.checks import INT32_MAX
from memstate.errors import InvalidArgument
from memstate.requests.handles import Parked
from memstate.salts import encode
from memstate.tiers.records import DIGEST_BYTES
from memstate.tokens import NUMBER, SaltedTokens, ids
from memstate.tokens import encode as encode_tokens

MOST_BYTES, LONGEST_KEY = 2**24, 64
_NUMBERS = struct.Struct("<3Q4Q")  # length, pending, memory; bytes of keys, tokens, kind, user


def digest_of(data: Any, shared: bytes = b"") -> bytes:
    """Returns 32 bytes that stand for some bytes. With a shared key, only those who have it can compute them."""
    return blake2b(data, digest_size=DIGEST_BYTES, key=shared).digest()


def _head(mark: str, salt: Hashable) -> bytes:
    """Returns the first bytes of a manifest. They must be equal where it is written and where it is read."""
    return f"memstate parked 1\n{mark}\nsalt={digest_of(encode(salt)).hex()}".encode()


def pack(mark: str, parked: Parked, keys: Sequence[bytes], shared: bytes) -> bytes:
    """Returns the manifest of a parked request.

    Args:
        mark: Lines that say of which model, page size, rank and layout it is.
        parked: The handle.
        keys: The keys of its own records in order, each with the digest of the record if a key is shared.
        shared: The key that writer and readers share; empty for none.
    """
    kind = (parked.prompt.kind or "").encode(errors="replace")  # any text is a kind, also half of a pair of surrogates
    parts = [b"".join(keys), ids(parked.prompt.key).tobytes(), kind, parked.user]
    numbers = _NUMBERS.pack(parked.length, parked.pending, parked.memory, *map(len, parts))
    body = b"".join([_head(mark, parked.prompt.salt), b"\0", numbers, *parts])
    return body + digest_of(body, shared)


def unpack(manifest: bytes, mark: str, salt: Hashable, shared: bytes) -> tuple[Parked, list[bytes]]:
    """Returns a parked request, and the keys of its own records in order, as `pack` was given them.

    Args:
        manifest: What `pack` returned.
        mark: That of the reader.
        salt: That of the reader.
        shared: The key that writer and readers share; empty for none.

    Raises:
        InvalidArgument: The bytes are no manifest, are damaged, or are sealed with another key; or the request is of
            another model, layout, page size, rank or salt.
    """
    if not isinstance(manifest, bytes | bytearray | memoryview):
        raise InvalidArgument(f"a manifest of {type(manifest).__name__}: expected the bytes that a write has made")
    manifest = bytes(manifest)  # first: a slice of a view counts in entries, which can be wider
    body, seal = manifest[:-DIGEST_BYTES], manifest[-DIGEST_BYTES:]
    if not len(body) < MOST_BYTES or not compare_digest(digest_of(body, shared), seal):
        raise InvalidArgument(f"{len(manifest)} bytes are no manifest, are damaged, or are sealed with another key=")
    theirs, _, rest = body.partition(b"\0")
    if theirs != (ours := _head(mark, salt)):
        lines = zip(*(text.decode(errors="replace").split("\n") for text in (theirs, ours)), strict=False)
        one, other = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
        what = "another model, layout, page size, rank or salt"
        raise InvalidArgument(f"a parked request of {what}: {one[:99]}, here {other[:99]}")
    length, pending, memory, *sizes = _NUMBERS.unpack(rest[: _NUMBERS.size].ljust(_NUMBERS.size))
    ends, each = list(accumulate(sizes, initial=_NUMBERS.size)), DIGEST_BYTES * (1 + bool(shared))
    sound = pending <= length <= INT32_MAX and (pending > 0) <= memory <= (length > 0)
    if not sound or ends[-1] != len(rest) or sizes[0] % each or sizes[1] % NUMBER:
        raise InvalidArgument(f"a manifest of {len(manifest)} bytes whose numbers contradict each other")
    keys, key, named, more = (rest[at:end] for at, end in pairwise(ends))
    prompt = SaltedTokens(encode_tokens(np.frombuffer(key, np.int64)), salt, named.decode(errors="replace") or None)
    return Parked(length, pending, prompt, more, bool(memory)), [
        keys[at : at + each] for at in range(0, len(keys), each)
    ]

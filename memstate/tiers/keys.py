"""Names of prefixes: digests that every process and every machine gives to the same tokens of the same model.

    fingerprint, salt ─▶ root ─▶ digest 0 ─▶ digest 1 ─▶ ..      each page's tokens go into its digest

Digest i stands for all tokens up to the end of page i. Knows no record, no pool and no storage.
"""

import sys
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from memstate.checks import require_salt, whole
from memstate.errors import InvalidArgument
from memstate.state.layout import StateLayout
from memstate.tiers.records import DIGEST_BYTES, VERSION, require_digest
from memstate.tokens import BYTES


class Keys:
    """The digests of prefixes, page by page.

    fingerprint: what else must be the same for bytes to be the same, see `fingerprint`. page_tokens: tokens of a page.
    Raises: InvalidArgument.
    """

    def __init__(self, fingerprint: bytes, page_tokens: int) -> None:
        self.fingerprint = require_digest("fingerprint", fingerprint)
        self.page_tokens = whole("page_tokens", page_tokens)
        self._page = self.page_tokens * BYTES

    def __repr__(self) -> str:
        return f"Keys({self.fingerprint.hex()[:8]}.., {self.page_tokens} tokens a page)"

    def of(self, key: bytes, salt: Hashable, known: Sequence[bytes] = ()) -> list[bytes]:
        """The digest of every whole page of a prefix, 32 bytes each.

        key: tokens as `memstate.tokens.encode` gives them; those past the last whole page do not count. salt: as
        `require_salt` says: only prefixes of one salt share digests. known: digests of the first pages, from an earlier
        call for the same tokens and salt, which are not computed anew. Raises: InvalidArgument.
        """
        page = self._page
        whole = len(key) // page
        digests = list(known[:whole])
        digest = digests[-1] if digests else blake2b(self.fingerprint + encode(salt), digest_size=DIGEST_BYTES).digest()
        for start in range(len(digests) * page, whole * page, page):
            digest = blake2b(digest + key[start : start + page], digest_size=DIGEST_BYTES).digest()
            digests.append(digest)
        return digests


def fingerprint(
    model: str, state: StateLayout | None, kv: StateLayout | None, page_tokens: int, rank: int, ranks: int
) -> bytes:
    """32 bytes that two processes share where one can use the records of the other.

    It stands for the model's name, the planes of a state and of a KV page (names, shapes, dtypes, layers), the tokens
    of a page, the rank, the byte order and the version of the record; neither for the physical order of planes on a
    device nor for their alignment there, which no record has. A model's name should say which weights and which
    quantisation are meant. Raises: InvalidArgument.
    """
    if not isinstance(model, str):
        raise InvalidArgument(f"model {model!r}: expected its name, a text")
    page_tokens, ranks = whole("page_tokens", page_tokens), whole("ranks", ranks)
    if whole("rank", rank, least=0) >= ranks:
        raise InvalidArgument(f"rank {rank}: expected 0 to {ranks - 1}")
    parts = ("memstate", VERSION, sys.byteorder, model, _planes(state), _planes(kv), page_tokens, int(rank), ranks)
    return blake2b(_encode(parts), digest_size=DIGEST_BYTES).digest()


def encode(salt: Hashable) -> bytes:
    """A salt as bytes that mean the same in every process, and that no other salt has: each value carries its type and
    its size. Raises: InvalidArgument.
    """
    return _encode(require_salt(salt))


def _encode(value: Hashable) -> bytes:
    match value:
        case None:
            return b"n"
        case int():
            value = int(value)
            return _sized(b"i", int.to_bytes(value, value.bit_length() // 8 + 1, "little", signed=True))
        case str():
            return _sized(b"s", str.encode(value, "utf-8", "surrogatepass"))
        case bytes():
            return _sized(b"y", value)
        case tuple():
            return _sized(b"t", b"".join(map(_encode, value)))
    raise InvalidArgument(f"{value!r} of {type(value).__name__}: expected None, int, str, bytes, or a tuple of these")


def _sized(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def _planes(layout: StateLayout | None) -> Hashable:
    if layout is None:
        return None
    return (layout.layers, tuple((plane.name, plane.shape, str(plane.dtype)) for plane in layout.planes))

"""Encodes what names a prefix: its tokens, or the keys that an engine has for its own KV blocks."""

import logging
from typing import Any

from memstate import logs
from memstate.checks import is_count, require_kind, require_salt, shown
from memstate.errors import InvalidArgument
from memstate.requests.handles import Request
from memstate.tokens import BYTES, NUMBER, Key, SaltedTokens, encode, encode_keys, ids

SMALL = 24  # bits of the id of a block; a hash of 64 bits is hardly ever so small


class Names:
    """The names of prefixes in one cache. A key stands for all tokens up to the end of its block.

    Args:
        keyed: Whether prefixes are named by keys, one for each page. Otherwise by tokens.
        page: Tokens of a page.

    Attributes:
        word: "keys" or "tokens", for errors.
        size: Tokens that one name stands for: those of a page with keys, else 1.
        last: The slice of encoded keys that has the last key without its padding.

    Example:
        >>> Names(keyed=True, page=16).prompt(Request("a", keys=[7, 9], length=40)).extent
        (40, 32)
    """

    def __init__(self, keyed: bool, page: int) -> None:
        self.keyed, self.size, self.word = keyed, page if keyed else 1, "keys" if keyed else "tokens"
        self.last = slice(0)
        self._width: int | None = None  # bytes of a key, 0 for numbers; None before the first key

    def of(self, tokens: Any, keys: Any) -> Any:
        """Returns the keys if prefixes are named by keys, else the tokens.

        Args:
            tokens: Tokens, or None.
            keys: Keys, or None.

        Raises:
            InvalidArgument: Tokens are given where keys are needed, or keys where tokens are needed.
        """
        if (tokens if self.keyed else keys) is not None:
            raise InvalidArgument(f"this cache takes {self.word}=, because it is built with Prefix(keyed={self.keyed})")
        return keys if self.keyed else tokens

    def encode(self, given: Any) -> Key:
        """Returns tokens or keys as one key: `BYTES` for each token that they stand for.

        Raises:
            InvalidArgument: The tokens or keys are not valid.
        """
        if not self.keyed:
            return encode(given)
        encoded, unit = encode_keys(given, self.size), self.size * BYTES
        width = len(given[0]) if encoded and isinstance(given[0], bytes) else 0
        if encoded and self._width is None:
            self._width, self.last = width, slice(-unit, min((width or NUMBER) - unit, 0) or None)
            numbers = ids(encoded).reshape(-1, self.size)
            if not (numbers[:, 1:].any() or (numbers >> SMALL).any()):
                why = "ids of blocks come back with other tokens; a key is a hash of all tokens up to the block's end"
                logs.event(logs.logger("prefix"), logging.WARNING, "keys like ids", keys=shown(given), why=why)
        elif encoded and width != self._width:
            raise InvalidArgument(f"keys={shown(given)} of {width} bytes, and of {self._width} before; 0: numbers")
        return encoded

    def prompt(self, request: Request, kept: bool = False) -> SaltedTokens:
        """Returns the prompt of a request: its tokens or keys, its salt, its kind and its extent.

        Args:
            request: The request.
            kept: Whether memstate keeps KV: in pages or tiers.

        Raises:
            InvalidArgument: The tokens or keys are not valid, or the cache needs keys where tokens are given, or the
                other way round. `keys`, `length` and `reach` contradict each other, or memstate keeps the KV.
        """
        keys, length, reach, salt, kind = request.keys, request.length, request.reach, request.salt, request.kind
        given = self.of(request.tokens, keys) if self.keyed or keys is not None else request.tokens
        key: Key = b"" if given is None else self.encode(given) if self.keyed else encode(given)
        kind = kind if kind is None else require_kind(kind)
        salt = salt if salt is None else require_salt(salt)
        if keys is None and reach is None:
            return SaltedTokens(key, salt, kind)
        if kept or request.session is not None:
            raise InvalidArgument("keys= or reach= with session=, tiers or Pages(count=): there, memstate keeps the KV")
        named = len(key) // BYTES
        if self.keyed and (not is_count(length) or length < max(1, named)):
            raise InvalidArgument(f"keys of {named} tokens, length={shown(length)}: expected all tokens of the prompt")
        if reach is not None and (not is_count(reach) or reach > named):
            raise InvalidArgument(f"reach={shown(reach)}: expected a number of tokens up to the {named} that are named")
        known = int(length) if self.keyed and length is not None else named
        return SaltedTokens(key, salt, kind, (known, named if reach is None else int(reach)))

    def continued(self, known: Key, given: Any) -> Key:
        """Returns tokens or keys as one key, and encodes only those behind a part that is encoded already.

        Args:
            known: The encoded part. With keys, it is only used if its last key is equal to the given key at the same
                place, because a key stands for all tokens before it.
            given: All tokens or keys.

        Raises:
            InvalidArgument: The tokens or keys are not valid.
        """
        unit = self.size * BYTES
        had = len(known) // unit
        sliced = isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 1
        if not (sliced and 0 < had <= len(given)):
            return self.encode(given)
        if not self.keyed:
            return known + self.encode(given[had:])
        tail = self.encode(given[had - 1 :])
        return known + tail[unit:] if known[-unit:] == tail[:unit] else self.encode(given)

"""Encodes salts as bytes that mean the same in every process and on every machine."""

from collections.abc import Hashable

from memstate.checks import require_salt
from memstate.errors import InvalidArgument


def encode(salt: Hashable) -> bytes:
    """Returns a salt as bytes. Different salts have different bytes, and a salt has the same bytes in every process.

    Raises:
        InvalidArgument: `require_salt` refuses the salt.
    """
    return encode_plain(require_salt(salt))


def encode_plain(value: Hashable) -> bytes:
    """Returns a plain value as bytes, which include its type and its size.

    Args:
        value: None, an int, a text, bytes, or a tuple of these.

    Raises:
        InvalidArgument: The value has another type.
    """
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
            return _sized(b"t", b"".join(map(encode_plain, value)))
    raise InvalidArgument(f"{value!r} of {type(value).__name__}: expected None, int, str, bytes, or a tuple of these")


def _sized(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data

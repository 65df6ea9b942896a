"""Seals and checks records: the bytes of one state or KV page, the same in host memory and in storage.

    header (fixed, crc32 per plane, zeros, crc32 of the header) | body: layer plane [block .. pad]

docs/record-format.md describes the format. Knows no pool, no storage and no device.
"""

import struct
import zlib
from dataclasses import replace
from typing import Literal, get_args

from memstate.errors import InvalidArgument
from memstate.sizes import format_bytes
from memstate.state.layout import MOVE_BYTES, StateLayout
from memstate.tiers.stores.base import Bytes

MAGIC, VERSION = b"memstate", 1
DIGEST_BYTES = 32  # bytes of a key and of a fingerprint
HEADER_UNIT = 64  # the size of a header is a multiple of this number of bytes
Kind = Literal["state", "kv", "row"]
Flaw = Literal["", "truncated", "magic", "version", "header", "foreign", "checksum"]
FLAWS: tuple[str, ...] = get_args(Flaw)[1:]

_FIXED = struct.Struct("<8sHHI32s32sqQI")  # fields: magic version kind header fingerprint key length body planes
_SIZE_AT = 12  # byte at which `_FIXED` has the size of the header
_NUMBER = struct.Struct("<I")
_KINDS: dict[str, int] = {"state": 1, "kv": 2, "row": 4}  # 3 stood for something else once


class RecordFormat:
    """Seals and checks the records of one kind, of one model and one rank.

    Args:
        kind: "state", "kv", or "row" for the memory of a row.
        layout: Layout of a slot, or of a page as if it were a slot, in any order. The body of a record is in slot-major
            order all the same, aligned to 16 bytes.
        fingerprint: 32 bytes that stand for model, layout and ranks, see `memstate.tiers.keys.fingerprint`.

    Attributes:
        nbytes: Bytes of a record, header and body.

    Raises:
        InvalidArgument: There is no such kind, or the fingerprint is not 32 bytes.

    Example:
        >>> import numpy as np, torch
        >>> from memstate.state.layout import Plane, StateLayout
        >>> form = RecordFormat("state", StateLayout((Plane("ssm", (4,), torch.float32),), layers=2), bytes(32))
        >>> record = np.zeros(form.nbytes, np.uint8)
        >>> form.seal(record, key=bytes(32), length=16)
        >>> form.flaw(record, bytes(32), 16), form.flaw(record, bytes(32), 17)
        ('', 'foreign')
    """

    def __init__(self, kind: Kind, layout: StateLayout, fingerprint: bytes) -> None:
        if kind not in _KINDS:
            raise InvalidArgument(f"kind {kind!r}: expected {' or '.join(_KINDS)}")
        self.kind, self.fingerprint = kind, require_digest("fingerprint", fingerprint)
        self.layout = replace(layout, order="slot_major", alignment=MOVE_BYTES)
        unpadded = _FIXED.size + _NUMBER.size * (len(layout.planes) + 1)
        self.header_bytes = -(-unpadded // HEADER_UNIT) * HEADER_UNIT
        self.body_bytes = self.layout.bytes_per_slot
        self.nbytes = self.header_bytes + self.body_bytes
        self._crcs = struct.Struct(f"<{len(layout.planes)}I")
        self._blocks: list[list[slice]] = []  # for each plane: where its layers are in a record
        self._padding: list[slice] = []
        for plane, row in zip(layout.planes, self.layout.table(), strict=True):
            size, first = row.payload + row.padding, self.header_bytes + row.offset
            starts = [first + n * row.layer_stride for n in range(layout.layers_of(plane))]
            self._blocks.append([slice(start, start + size) for start in starts])
            self._padding += [slice(start + row.payload, start + size) for start in starts if row.padding]

    def __repr__(self) -> str:
        return f"RecordFormat({self.kind}, {format_bytes(self.nbytes)} with {self.header_bytes} B header)"

    def name(self, key: bytes) -> str:
        """Returns the name of a key's record in storage.

        Raises:
            InvalidArgument: The key is not 32 bytes.
        """
        return f"{self.kind}-{require_digest('key', key).hex()}"

    def seal(self, buffer: Bytes, key: bytes, length: int) -> None:
        """Writes the header and the padding of a record whose body is filled.

        Equal bodies, keys and lengths give equal bytes.

        Args:
            buffer: The record, `nbytes` contiguous bytes, uint8 `byte`. Its body must be complete.
            key: Digest of the tokens that the record stands for.
            length: Number of tokens that the record stands for.

        Raises:
            InvalidArgument: The buffer has not the size of a record, or the key or the length is not valid.

        Syncs: no.
        """
        if not 1 <= length < 2**63:
            raise InvalidArgument(f"length={length}: a record stands for one token or more")
        if buffer.dtype != "uint8" or buffer.shape != (self.nbytes,) or not buffer.flags.c_contiguous:
            raise InvalidArgument(
                f"buffer of {buffer.dtype} {buffer.shape}: expected {self.nbytes} contiguous bytes, the whole record"
            )
        head = bytearray(self.header_bytes)
        _FIXED.pack_into(head, 0, *self._fixed(require_digest("key", key), length))
        for padding in self._padding:  # zeros, because reused memory still has the bytes of an older record
            buffer[padding] = 0
        self._crcs.pack_into(head, _FIXED.size, *self._checksums(buffer.data))
        _NUMBER.pack_into(head, len(head) - _NUMBER.size, zlib.crc32(memoryview(head)[: -_NUMBER.size]))
        buffer.data[: self.header_bytes] = head

    def flaw(self, buffer: Bytes, key: bytes, length: int) -> Flaw:
        """Returns in what way bytes are not the record that was asked for.

        Args:
            buffer: uint8 `byte`, contiguous, of any size and contents.
            key: Digest that was asked for.
            length: Tokens that the record should stand for.

        Returns:
            One word of `FLAWS`, "" if the record is sound.

        Syncs: no.
        """
        if buffer.size != self.nbytes:
            return "truncated"
        data = buffer.data
        magic, version = struct.unpack_from("<8sH", data)
        if magic != MAGIC:
            return "magic"
        if version != VERSION:
            return "version"
        # The size comes from the header itself, so that a sound header of another layout is "foreign", not "header".
        (size,) = _NUMBER.unpack_from(data, _SIZE_AT)
        if not _FIXED.size + _NUMBER.size <= size <= len(data):
            return "header"
        if zlib.crc32(data[: size - _NUMBER.size]) != _NUMBER.unpack_from(data, size - _NUMBER.size)[0]:
            return "header"
        if _FIXED.unpack_from(data) != self._fixed(key, length):
            return "foreign"
        return "checksum" if self._crcs.unpack_from(data, _FIXED.size) != self._checksums(data) else ""

    def _fixed(self, key: bytes, length: int) -> tuple[bytes | int, ...]:
        sizes = (length, self.body_bytes, len(self.layout.planes))
        return (MAGIC, VERSION, _KINDS[self.kind], self.header_bytes, self.fingerprint, key, *sizes)

    def _checksums(self, record: memoryview) -> tuple[int, ...]:
        """Returns a crc32 of each plane over all layers, padding included."""
        sums = []
        for blocks in self._blocks:
            value = 0
            for block in blocks:
                value = zlib.crc32(record[block], value)
            sums.append(value)
        return tuple(sums)


def require_digest(what: str, digest: bytes) -> bytes:
    """Returns the digest unchanged, after a check.

    Raises:
        InvalidArgument: The digest is not 32 bytes.
    """
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise InvalidArgument(f"{what} {digest!r}: expected {DIGEST_BYTES} bytes")
    return digest

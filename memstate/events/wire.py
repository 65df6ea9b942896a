"""Defines the messages: the schema that vLLM and SGLang publish, in MessagePack. Knows no cache and no socket.

    batch    [time, [event, ..], data-parallel rank]
    event    {"type": "BlockStored" | "BlockRemoved" | "AllBlocksCleared", field: value, ..}

A block is a page. Group 0 has the KV of pages, group 1 the states at the ends of pages. The hash of a block is a digest
of the salt and of all tokens up to the block's end. It is cut to 63 bits, because hashes are whole numbers of 64 bits
in vLLM, and signed ones in SGLang.
"""

from collections.abc import Hashable
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from memstate.errors import InvalidArgument
from memstate.salts import encode

KV, STATES = 0, 1  # numbers of the groups
KINDS = ("full_attention", "mamba")  # vLLM's names of the groups
RECURRENT = frozenset(("mamba",))  # kinds of groups that need only the last block of a prefix
DEVICE = "GPU"  # `medium` of blocks on the device
SEQUENCE = 8  # bytes of the number of a batch
END = (-1).to_bytes(SEQUENCE, "big", signed=True)  # number of the message that ends an answer
HASH_BYTES = 8  # number of first bytes of a digest from which the hash of its block comes

Hash = int | bytes
Token = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Size = Annotated[int, msgspec.Meta(ge=1)]


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """An event: blocks that can be read from now on.

    Attributes:
        block_hashes: Hashes of the blocks.
        parent_block_hash: Hash of the block before them, None at the start of a prompt.
        token_ids: Tokens of the blocks.
        block_size: Tokens of one block.
        lora_id: None; a field of vLLM.
        medium: Where the blocks are, such as "GPU".
        lora_name: None; a field of vLLM.
        extra_keys: For each block, what its hash depends on besides tokens: for the first block of a prompt, the tag of
            the salt.
        group_idx: Group of the blocks.
        kv_cache_spec_kind: Kind of the group, one of `KINDS`.
        cache_salt: The tag of the salt; in events of SGLang, the salt itself.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[Token]
    block_size: Size
    lora_id: int | None = None
    medium: str | None = DEVICE
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, gc=False):
    """An event: blocks that cannot be read any more.

    Attributes:
        block_hashes: Hashes of the blocks.
        medium: Where the blocks were; None for all media.
        group_idx: Group of the blocks, None for all.
    """

    block_hashes: list[Hash]
    medium: str | None = DEVICE
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """An event: no block can be read any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """The events of one message.

    Attributes:
        ts: Seconds since 1970.
        events: The events, in order.
        data_parallel_rank: The worker's rank, None for none.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(EventBatch)


def pack(batch: EventBatch) -> bytes:
    """Returns a batch as bytes."""
    return _encoder.encode(batch)


def unpack(payload: bytes) -> EventBatch:
    """Returns the batch in a message of memstate, vLLM or SGLang, without fields that memstate does not know.

    Raises:
        InvalidArgument: The bytes are not a batch.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{len(payload)} bytes that are no batch of events: {error}") from error


def shorten(digest: bytes) -> int:
    """Returns the first 63 bits of a digest: the hash of a block."""
    return int.from_bytes(digest[:HASH_BYTES], "big") >> 1


def salt_tag(salt: Hashable) -> str | None:
    """Returns the tag that stands for a salt in events, None without a salt. The tag does not reveal the salt.

    Args:
        salt: The salt of requests, as in `ms.Request(salt=)`.

    Raises:
        InvalidArgument: The value is not a valid salt.

    Example:
        >>> salt_tag("tenant") == salt_tag(b"tenant"), salt_tag(None)
        (False, None)
    """
    return None if salt is None else blake2b(encode(salt), digest_size=16, person=b"memstate salt").hexdigest()

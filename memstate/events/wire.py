"""Messages in the schema that vLLM and SGLang publish, in MessagePack. Knows no cache and no socket.

    batch    [time, [event, ..], data-parallel rank]
    event    {"type": "BlockStored" | "BlockRemoved" | "AllBlocksCleared", field: value, ..}

A block is a page. Group 0 has the KV of pages, group 1 the states at their ends. A block's hash is a digest of all
tokens up to its end and of the salt, cut to 63 bits: vLLM's hashes are whole numbers of 64 bits, SGLang's have a sign.
"""

from collections.abc import Hashable
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from memstate.errors import InvalidArgument
from memstate.salts import encode

KV, STATES = 0, 1  # groups
KINDS = ("full_attention", "mamba")  # what vLLM calls them
RECURRENT = frozenset(("mamba",))  # kinds of which the last block alone is read
DEVICE = "GPU"
SEQUENCE = 8  # bytes of a batch's number
END = (-1).to_bytes(SEQUENCE, "big", signed=True)  # instead of a number: a replay is over
HASH_BYTES = 8

Hash = int | bytes
Token = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Size = Annotated[int, msgspec.Meta(ge=1)]


class BlockStored(msgspec.Struct, tag=True, gc=False):
    """Blocks that can be read from now on.

    Attributes:
        block_hashes: The blocks.
        parent_block_hash: The block before them, None for the start of a prompt.
        token_ids: Their tokens.
        block_size: Tokens of a block.
        lora_id: None; vLLM's.
        medium: Where they are.
        lora_name: None; vLLM's.
        extra_keys: For each block what else is in its hash: of the first block of a prompt the tag of its salt.
        group_idx: Their group.
        kv_cache_spec_kind: What the group has.
        cache_salt: The tag of the salt, where SGLang has the salt.
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
    """Blocks that cannot be read any more.

    Attributes:
        block_hashes: The blocks.
        medium: Where they were.
        group_idx: Their group, None for all.
    """

    block_hashes: list[Hash]
    medium: str | None = DEVICE
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """No block can be read any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """The events of one call.

    Attributes:
        ts: Seconds since 1970.
        events: The events, in order.
        data_parallel_rank: The worker's rank, None for none.
    """

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Batch)


def pack(batch: Batch) -> bytes:
    """Returns a batch as bytes."""
    return _encoder.encode(batch)


def unpack(payload: bytes) -> Batch:
    """Returns the batch in a message of memstate, vLLM or SGLang. Fields that it does not know are left out.

    Raises:
        InvalidArgument: The bytes are no batch.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{len(payload)} bytes that are no batch of events: {error}") from error


def shorten(digest: bytes) -> int:
    """Returns a digest as a block's hash: its first 63 bits."""
    return int.from_bytes(digest[:HASH_BYTES], "big") >> 1


def salt_tag(salt: Hashable) -> str | None:
    """Returns what stands for a salt in events, None for no salt. It does not say what the salt is.

    Args:
        salt: The salt of requests, as `ms.Request(salt=)` takes it.

    Raises:
        InvalidArgument: It is no salt.

    Example:
        >>> salt_tag("tenant") == salt_tag(b"tenant"), salt_tag(None)
        (False, None)
    """
    return None if salt is None else blake2b(encode(salt), digest_size=16, person=b"memstate salt").hexdigest()

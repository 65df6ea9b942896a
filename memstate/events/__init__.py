"""Tells other processes which prefixes a manager can resume, and finds the worker that resumes a prompt.

wire         the messages: the schema of vLLM and SGLang, in MessagePack
feed         what comes to the prefix cache and goes, as messages
publisher    sends them over ZMQ, numbered, and again on request
subscriber   receives the messages of many workers in order
index        "which worker can resume this prompt, and how far?"

`pip install '.[events]'` brings msgspec and pyzmq. Nothing here is imported by the rest of memstate. Readers load
no torch: `Feed` and `Publisher` are loaded when they are first used.
"""

from typing import TYPE_CHECKING

try:
    import msgspec as _msgspec  # noqa: F401
    import zmq as _zmq  # noqa: F401
except ImportError as error:
    raise ImportError("events need msgspec and pyzmq: pip install '.[events]' in a checkout of memstate") from error

from memstate.events.index import Index, Resumable
from memstate.events.subscriber import Subscriber
from memstate.events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, salt_tag
from memstate.lazy import exports

if TYPE_CHECKING:
    from memstate.events.feed import Feed as Feed
    from memstate.events.publisher import Publisher as Publisher

_later: list[str] = []
if not TYPE_CHECKING:  # a type checker reads the imports above
    __getattr__, _later = exports(__name__)
__all__ = [
    "AllBlocksCleared", "Batch", "BlockRemoved", "BlockStored", "Index", "Resumable", "Subscriber", "salt_tag", *_later,
]  # fmt: skip

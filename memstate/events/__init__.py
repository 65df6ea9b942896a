"""Tells other processes which prefixes a manager can resume, and finds the worker that resumes a prompt.

wire         the messages: the schema of vLLM and SGLang, in MessagePack
feed         what comes to the prefix cache and goes, as messages
publisher    sends them over ZMQ, numbered, and again on request
subscriber   receives the messages of many workers in order
index        "which worker can resume this prompt, and how far?"

`pip install memstate[events]` brings msgspec and pyzmq. Nothing here is imported by the rest of memstate.
"""

try:
    import msgspec as _msgspec  # noqa: F401
    import zmq as _zmq  # noqa: F401
except ImportError as error:
    raise ImportError("events need msgspec and pyzmq: pip install memstate[events]") from error

from memstate.events.feed import Feed
from memstate.events.index import Index, Resumable
from memstate.events.publisher import Publisher
from memstate.events.subscriber import Subscriber
from memstate.events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, salt_tag

__all__ = [
    "AllBlocksCleared",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "Feed",
    "Index",
    "Publisher",
    "Resumable",
    "Subscriber",
    "salt_tag",
]

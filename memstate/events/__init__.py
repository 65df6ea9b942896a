"""Tells other processes which prefixes a manager can resume, and finds the worker that resumes a prompt.

wire         defines the messages: the schema of vLLM and SGLang, in MessagePack
feed         turns changes of the prefix cache into messages
publisher    sends numbered messages over ZMQ, and sends them again on request
subscriber   receives the messages of many workers in order
index        answers which worker can resume a prompt, and how far

`pip install '.[events]'` brings msgspec and pyzmq. The rest of memstate imports nothing from this folder. A process
that only reads events loads no torch, because `Feed` and `Publisher` are loaded when they are first used.
"""

from typing import TYPE_CHECKING

try:
    import msgspec as _msgspec  # noqa: F401
    import zmq as _zmq  # noqa: F401
except ImportError as error:
    raise ImportError("events need msgspec and pyzmq: pip install '.[events]' in a checkout of memstate") from error

from memstate.events.index import Index, Resumable
from memstate.events.subscriber import Subscriber
from memstate.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, salt_tag
from memstate.lazy import exports

if TYPE_CHECKING:
    from memstate.events.feed import Feed as Feed
    from memstate.events.publisher import Publisher as Publisher

_later: list[str] = []
if not TYPE_CHECKING:  # type checkers see the imports above instead
    __getattr__, _later = exports(__name__)
__all__ = [
    "AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "Index", "Resumable", "Subscriber", "salt_tag",
    *_later,
]  # fmt: skip

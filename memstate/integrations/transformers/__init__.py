"""Runs hybrid models of Transformers on the slots of a StateManager.

probe       finds what a model keeps in its own cache: windows, recurrent states, KV
layout      the planes of a state, and which layer has its state where
weights     names the weights of a model
binding     makes the manager of a model
states      hands states to layers: copies, or references with which on_slots runs memstate's kernels in place
trial       tries whether a model can decode on slots
reading     `layout`: calls probe, then trial
cache       `StateCache`, for `generate`: watch tells when a forward begins, lengths counts tokens, prefill reads
            prompts and starts from cached states
kv, paged   KV of attention layers in pages
batch       one forward over any rows
server      continuous batching for requests of any thread: line orders waiting requests, running refuses those that
            cannot run, steps runs rows; prompts has requests and answers, sampling chooses tokens, text decodes them,
            drafts guesses tokens, speculation checks guesses
chats       prompts of chats, and the lengths up to which later prompts are equal to them
serving     `serve` and `stream`
"""

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError("this needs Transformers: pip install '.[transformers]' in a checkout of memstate") from error

if tuple(map(int, _transformers.__version__.split(".")[:2])) < (5, 23):
    raise ImportError(f"Transformers {_transformers.__version__}: 5.23 is the first with the caches that this needs")

from memstate.integrations.transformers.binding import manager
from memstate.integrations.transformers.cache import StateCache
from memstate.integrations.transformers.chats import chat
from memstate.integrations.transformers.layout import ModelLayout, StatePlace
from memstate.integrations.transformers.prompts import Event, Prompt, Served, Token
from memstate.integrations.transformers.reading import layout
from memstate.integrations.transformers.server import Server
from memstate.integrations.transformers.serving import serve, stream

__all__ = [
    "Event",
    "ModelLayout",
    "Prompt",
    "Served",
    "Server",
    "StateCache",
    "StatePlace",
    "Token",
    "chat",
    "layout",
    "manager",
    "serve",
    "stream",
]

"""Runs hybrid models of Transformers on the slots of a StateManager.

probe       what a model keeps in its own cache: windows, recurrent states, KV
layout      the planes of a state, and which layer has its state where
weights     tells the weights of models apart
binding     one manager for one model
states      hands states to layers: copies, or references on which on_slots runs memstate's kernels where they are
trial       whether a model can decode on slots
reading     `layout`: probe, then a trial
cache       `StateCache`, for `generate`: watch says when a forward begins, lengths which tokens count, prefill reads
            prompts from cached states
kv, paged   KV of attention layers in pages
batch       one forward over any rows
server      continuous batching: what threads ask for. line says who is next, running who is refused, steps runs rows;
            prompts says what goes in and out, sampling chooses tokens, text decodes them, drafts guesses tokens,
            speculation checks them
chats       prompts of chats, and where later ones part from them
serving     `serve` and `stream`; progress shows it all
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
from memstate.integrations.transformers.layout import ModelLayout, Place
from memstate.integrations.transformers.prompts import Event, Prompt, Served, Token
from memstate.integrations.transformers.reading import layout
from memstate.integrations.transformers.server import Server
from memstate.integrations.transformers.serving import serve, stream

__all__ = [
    "Event",
    "ModelLayout",
    "Place",
    "Prompt",
    "Served",
    "Server",
    "StateCache",
    "Token",
    "chat",
    "layout",
    "manager",
    "serve",
    "stream",
]

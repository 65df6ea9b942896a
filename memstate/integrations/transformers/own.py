"""How a model takes a cache: under which name, and which cache is its own.

Nothing here knows a family of models by name, except to say why one cannot work.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache

from memstate.errors import ConfigurationError

TOKENS: Final = 4  # of each of the two forwards of a probe

# Families whose state is not where others have it, so `manager` cannot hand them a slot.
ELSEWHERE: Final = {
    "rwkv": "takes and returns a list of tensors, `state=`",
    "xlstm": "has a cache class of its own, xLSTMCache, which is a dict of tensors",
    "recurrent_gemma": "keeps its states as attributes of its modules, so a model has room for one batch",
    "deepseek_v4": "keeps the windows of its compressors as attributes of cache layers of its own; for a "
    "StateManager of yours, presets.from_config has the planes",
    "minimax": "accepts only its own MiniMaxCache, which has its states in a list beside the layers",
}

OTHERS: Final = ("input_ids", "position_ids", "use_cache")  # what a trial gives beside the cache


@torch.no_grad()
def cache_argument(model: Any) -> str:
    """Returns the name under which a model's forward takes a cache.

    It is the one argument whose type is a cache. Where the types do not say it, the model runs with its own cache under
    each name, until one of them fills it.

    Args:
        model: a model of Transformers.

    Raises:
        ConfigurationError: its state is not in a cache, or it takes none.

    Syncs: no.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind in ELSEWHERE:
        raise ConfigurationError(
            f"{kind} {ELSEWHERE[kind]}: memstate can hand out slots only for states in cache layers that families share"
        )
    parameters = inspect.signature(model.forward).parameters
    names = [
        name
        for name, one in parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) and name not in OTHERS
    ]
    typed = [name for name in names if re.search(r"Cache\b", str(parameters[name].annotation))]
    if len(typed) == 1:
        return typed[0]
    failed: Exception | None = None
    for name in typed or names:
        cache = own_cache(model)
        empty = _tensors(cache)
        try:
            with unchanged(model):
                read(model, name, cache, sample(model)[:, :TOKENS])
        except Exception as error:  # whatever a model raises that gets a cache for something else
            failed = error
        if _tensors(cache) > empty:
            return name
    why = "if its **kwargs pass a cache on, name it"
    if hasattr(model, "_orig_mod"):
        why = "torch.compile(model) hides them, so call model.compile() and give the model itself"
    raise ConfigurationError(
        f"{type(model).__name__}.forward fills no cache under any of its {len(names)} arguments {names}: {why}"
    ) from failed


def _tensors(cache: DynamicCache) -> int:
    """How many tensors the layers hold: a window's size is one even before a forward."""
    held = [one for layer in cache.layers for one in vars(layer).values()]
    return sum(
        isinstance(tensor, Tensor) for one in held for tensor in (one.values() if isinstance(one, dict) else (one,))
    )


def own_cache(model: Any, copies: Sequence[int] = ()) -> DynamicCache:
    """Returns the cache that Transformers would make for a model.

    Args:
        model: the model.
        copies: what `copied` returned, for a cache with the layers that the model adds by itself.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers += [deepcopy(cache.layers[number]) for number in copies]
    return cache


def copied(model: Any, cache: DynamicCache) -> tuple[int, ...]:
    """Returns of which layers of its cache a model has added copies: one that runs layers again keeps more states.

    Args:
        model: the model.
        cache: its own, which it has filled.

    Raises:
        ConfigurationError: it has added a layer that is like none of the others.
    """
    kinds = [_kind(layer) for layer in own_cache(model).layers]
    added = cache.layers[len(kinds) :]
    for number, layer in enumerate(added, len(kinds)):
        if _kind(layer) not in kinds:
            raise ConfigurationError(
                f"{type(model).__name__} adds layer {number} to its cache of {len(kinds)} layers, and none of "
                f"them is a {type(layer).__name__} like it: memstate can serve only copies of layers"
            )
    return tuple(kinds.index(_kind(layer)) for layer in added)


def _kind(layer: Any) -> tuple[type, Any, Any]:
    """What two layers have in common of which one can be a copy of the other."""
    return type(layer), getattr(layer, "sliding_window", None), getattr(layer, "number_of_states", None)


def read(model: Any, argument: str, cache: Any, ids: Tensor, start: int = 0, **given: Any) -> Any:
    """Returns what a forward gives. It gets positions, or a model may take those of another batch that it has kept.

    Args:
        model: the model.
        argument: the name under which its forward takes a cache.
        cache: the cache.
        ids: the tokens, `1 token`.
        start: tokens before them.
        **given: what the forward gets beside; positions among it come first.

    Syncs: no.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        given.setdefault("position_ids", torch.arange(start, start + ids.shape[1], device=ids.device)[None])
    return model(input_ids=ids, use_cache=True, **given, **{argument: cache})


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Puts back what forwards set on a model and its parts: attributes, buffers, and whether it trains.

    Args:
        model: the model.
    """
    before = [(held, dict(held)) for part in model.modules() for held in (vars(part), part._buffers)]
    try:
        yield
    finally:
        for held, was in before:
            for name in [name for name in held if name not in was]:
                del held[name]
            held.update(was)


def vocabulary(model: Any) -> int:
    """Returns how many tokens a model knows."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def sample(model: Any) -> Tensor:
    """Returns 8 tokens of one request, `1 token`."""
    return (torch.arange(3, 3 + 2 * TOKENS, device=model.device) % vocabulary(model))[None]

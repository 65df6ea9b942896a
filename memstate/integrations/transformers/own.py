"""Finds how a model takes a cache: the name of the argument, and the cache that Transformers makes for the model.

No code here depends on the name of a model family. Names are only used in errors that say why a family cannot work.
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

TOKENS: Final = 4  # tokens of each of the two forwards of a probe

# family -> where it keeps its states; they are not in cache layers, so `manager` cannot give them slots
ELSEWHERE: Final = {
    "rwkv": "takes and returns a list of tensors, `state=`",
    "xlstm": "has a cache class of its own, xLSTMCache, which is a dict of tensors",
    "recurrent_gemma": "keeps its states as attributes of its modules, so a model has room for one batch",
    "deepseek_v4": "keeps the windows of its compressors as attributes of cache layers of its own; for a "
    "StateManager of yours, presets.from_config has the planes",
    "minimax": "accepts only its own MiniMaxCache, which has its states in a list beside the layers",
}

OTHERS: Final = ("input_ids", "position_ids", "use_cache")  # arguments that a trial passes besides the cache


@torch.no_grad()
def cache_argument(model: Any) -> str:
    """Returns the name of the argument of a model's forward that takes a cache.

    It is the only argument whose type is a cache. If no argument has such a type, the model runs with its own cache in
    one argument after the other, until it fills the cache.

    Args:
        model: a model of Transformers.

    Raises:
        ConfigurationError: the model's state is not in a cache, or the forward takes no cache.

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
        except Exception as error:  # any error: the argument may be for something else than a cache
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
    """Counts the tensors in the layers. Values that exist before a forward, such as a window's size, do not count."""
    held = [one for layer in cache.layers for one in vars(layer).values()]
    return sum(
        isinstance(tensor, Tensor) for one in held for tensor in (one.values() if isinstance(one, dict) else (one,))
    )


def own_cache(model: Any, copies: Sequence[int] = ()) -> DynamicCache:
    """Returns the cache that Transformers would make for a model.

    Args:
        model: the model.
        copies: the result of `copied`. For each of its entries, a copy of this layer is added at the end.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers += [deepcopy(cache.layers[number]) for number in copies]
    return cache


def copied(model: Any, cache: DynamicCache) -> tuple[int, ...]:
    """Returns, for each layer that a model has added to its cache, the number of the layer that it copies.

    Models that run some of their layers twice add such copies.

    Args:
        model: the model.
        cache: the model's own cache, which it has filled.

    Raises:
        ConfigurationError: the model has added a layer that is not a copy of another one.
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
    """Returns properties by which a copy of a layer is recognised."""
    return type(layer), getattr(layer, "sliding_window", None), getattr(layer, "number_of_states", None)


def read(model: Any, argument: str, cache: Any, ids: Tensor, start: int = 0, **given: Any) -> Any:
    """Runs a forward and returns its output. Passes positions, because some models otherwise use those of an old batch.

    Args:
        model: the model.
        argument: name of the argument of the forward that takes the cache.
        cache: the cache.
        ids: the tokens, `1 token`.
        start: number of tokens before them.
        **given: other arguments of the forward. Positions among them are used instead of computed ones.

    Syncs: no.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        given.setdefault("position_ids", torch.arange(start, start + ids.shape[1], device=ids.device)[None])
    return model(input_ids=ids, use_cache=True, **given, **{argument: cache})


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """At the end of a block, restores what forwards change on a model: attributes, buffers and training mode.

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
    """Returns the number of tokens in a model's vocabulary."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def sample(model: Any) -> Tensor:
    """Returns 8 tokens of one request, `1 token`."""
    return (torch.arange(3, 3 + 2 * TOKENS, device=model.device) % vocabulary(model))[None]

"""Lets `generate` of a model take assistants while a cache is open that can forget wrong guesses."""

import weakref
from typing import Any

NO_WAY_BACK = (
    "a recurrent state has no way back to an earlier token, unless tails keep the tokens behind it: give prompt=, "
    "kernels='slots' and a manager with forward=ms.Forward(tail=16)"
)
_CACHES: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()  # model -> ids of its open caches


def allow_assistants(model: Any, cache: object) -> None:
    """Lets a model take assistants until `disallow_assistants` of this cache, or longer if another cache allows it."""
    _CACHES.setdefault(model, set()).add(id(cache))
    model._is_stateful = False  # set on the instance: generate takes assistants, and the class is unchanged


def disallow_assistants(model: Any, cache: object) -> None:
    """Takes back `allow_assistants`. Does nothing if it was not called, or on a second call."""
    if model not in _CACHES:
        return
    _CACHES[model].discard(id(cache))
    if not _CACHES[model]:
        vars(model).pop("_is_stateful", None)
        del _CACHES[model]

"""Lets `generate` of a model use assistants, as long as a cache is open that can forget wrong guesses."""

import weakref
from typing import Any

NO_WAY_BACK = (
    "a recurrent state has no way back to an earlier token, unless tails keep the tokens behind it: give prompt=, "
    "kernels='slots' and a manager with forward=ms.Forward(tail=16)"
)
_CACHES: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()  # model -> ids of its open caches


def allow_assistants(model: Any, cache: object) -> None:
    """Lets a model use assistants until all caches that allow it have called `disallow_assistants`."""
    _CACHES.setdefault(model, set()).add(id(cache))
    model._is_stateful = False  # so `generate` accepts assistants; set on the instance, not on the class


def disallow_assistants(model: Any, cache: object) -> None:
    """Takes back `allow_assistants` of a cache, if the cache has called it and not taken it back yet."""
    if model not in _CACHES:
        return
    _CACHES[model].discard(id(cache))
    if not _CACHES[model]:
        vars(model).pop("_is_stateful", None)
        del _CACHES[model]

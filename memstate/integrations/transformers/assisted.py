"""Whether `generate` of a model takes assistants: as long as a cache is open that can go back by wrong guesses."""

import weakref
from typing import Any

NO_WAY_BACK = (
    "a recurrent state has no way back to an earlier token, unless tails keep the tokens behind it: give prompt=, "
    "kernels='slots' and a manager with forward=ms.Forward(tail=16)"
)
_CACHES: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()  # of a model, that are open


def allow_assistants(model: Any, cache: object) -> None:
    """Lets a model take assistants until `disallow_assistants`, or longer for another cache."""
    _CACHES.setdefault(model, set()).add(id(cache))
    model._is_stateful = False  # of this instance, so that generate takes assistants; its class keeps its own


def disallow_assistants(model: Any, cache: object) -> None:
    """Takes back `allow_assistants`, if it was called; a second time nothing happens."""
    if model not in _CACHES:
        return
    _CACHES[model].discard(id(cache))
    if not _CACHES[model]:
        vars(model).pop("_is_stateful", None)
        del _CACHES[model]

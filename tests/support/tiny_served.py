"""Makes managers for tiny Transformers models, and the models' answers with their own cache."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import memstate as ms

NEW = 6
TEXT = [5, 17, 40, 9, 33, 71, 8, 60, 4, 12, 88, 23, 51, 30, 7, 19, 90, 3, 66, 21, 44, 38, 75, 52, 10, 81, 29]

Known = dict[tuple[int, ...], Tensor]


def managed(model: Any, **settings: Any) -> ms.StateManager:
    import memstate.integrations.transformers as mst

    pages = ms.Pages(size=4, count=60, per_row=16) if mst.layout(model).attended else ms.Pages(size=4)
    given = {"slots": 16, "max_requests": 3, "tracking": ms.Redirect(every=4), "pages": pages, "prefix": ms.Prefix(),
             "backend": "reference"}  # fmt: skip
    return mst.manager(model, **{**given, **settings})


@torch.no_grad()
def alone(model: Any, tokens: Sequence[int], known: Known, new: int = NEW) -> list[int]:
    """Returns the answer to a prompt with the model's own cache. Adds prefix -> logits to `known`."""
    from memstate.integrations.transformers.own import cache_argument, own_cache

    cache, argument, so_far, given = own_cache(model), cache_argument(model), list(tokens), list(tokens)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    for _ in range(new):
        inputs = {"input_ids": torch.tensor([given]), "use_cache": True, argument: cache}
        if takes_positions:  # as in `generate`; without positions, Bamba would count from 0 again
            inputs["position_ids"] = torch.arange(len(so_far) - len(given), len(so_far))[None]
        logits = model(**inputs).logits[0, -1]
        known[tuple(so_far)] = logits
        given = [int(logits.argmax())]
        so_far += given
    return so_far[len(tokens) :]

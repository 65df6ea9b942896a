"""Reads the layout of a model: what its cache holds, and by a trial whether decode can run on slots."""

import logging
from statistics import median
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.integrations.transformers.layout import ModelLayout, layout_of
from memstate.integrations.transformers.probe import own_cache, probe, sample
from memstate.integrations.transformers.states import States
from memstate.requests.handles import Request
from memstate.requests.tracking import NoTracking

LOG: Final = logging.getLogger("memstate.transformers")
DECODED: Final = 3  # steps of a trial
KNOWN: Final[WeakKeyDictionary[Any, dict[Any, ModelLayout]]] = WeakKeyDictionary()  # by model, then dtype and device
NEAR: Final = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the largest logit; other dtypes: 0.1


def layout(model: Any) -> ModelLayout:
    """Returns what one state of a model is made of, read off its own cache.

    The model runs on a few tokens, some ten times; the result is remembered. States of equal shape and dtype are one
    plane. So no list of families is needed, and dtypes and window widths are those that the model really uses.

    Then a trial decides whether memstate's kernels can decode on slots. If they can, windows are one input shorter than
    in the model's own cache, which keeps one that no layer reads.

    Args:
        model: a model of Transformers with its weights, on the device where it is going to run.

    Returns:
        The layout, with a map from layers to planes.

    Raises:
        ConfigurationError: the model keeps no recurrent state in a cache.

    Syncs: yes.
    """
    known = KNOWN.setdefault(model, {})
    if (key := (model.dtype, model.device)) not in known:
        known[key] = _read(model)
    return known[key]


def _read(model: Any) -> ModelLayout:
    found = probe(model)
    short = layout_of(found, on_slots=True)
    try:
        difference = _trial(model, short)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        LOG.info("%s decodes on copies of its states: %s", type(model).__name__, error)
        return layout_of(found)
    if difference > NEAR.get(model.dtype, 0.1):
        LOG.info("%s decodes on copies of its states: logits differ by %.1e", type(model).__name__, difference)
        return layout_of(found)
    return short


@torch.no_grad()
def _trial(model: Any, found: ModelLayout) -> float:
    """How far logits are apart if decode runs on slots, as a part of the largest logit: the median of the steps.

    In a low precision a router may choose another expert for one token, and that step says nothing.
    """
    ids, training = sample(model), model.training
    chunks = [ids[:, :-DECODED], *ids[:, -DECODED:].split(1, 1)]
    model.eval()
    try:
        own, ours = own_cache(model), own_cache(model)
        backend = "reference" if model.device.type == "cpu" else "auto"  # the interpreter would take long
        mem = StateManager(
            found.state, slots=1, max_requests=1, tracking=NoTracking(), overlap=False, device=model.device,
            backend=backend,
        )  # fmt: skip
        states, rows = States(model, mem, found, ours.layers, "slots"), mem.admit([Request("trial")])
        apart = []
        for chunk in chunks:
            expected = _logits(model, chunk, found.argument, own)
            step = mem.plan(rows, chunk.shape[1])
            states.begin(step, chunk.shape[1])
            logits = _logits(model, chunk, found.argument, ours)
            states.end(step)
            mem.settle(step)
            apart.append(float((logits - expected).abs().max() / expected.abs().max()))
        return median(apart[1:])
    finally:
        model.train(training)


def _logits(model: Any, ids: Tensor, argument: str, cache: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=True, **{argument: cache})[0]
    return logits.float()

"""Reads the layout of a model: what its cache holds, and by a trial whether decode can run on slots."""

import logging
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.amp import is_autocast_available

from memstate.integrations.transformers.layout import ModelLayout, layout_of
from memstate.integrations.transformers.own import unchanged
from memstate.integrations.transformers.probe import probe
from memstate.integrations.transformers.trial import tried

LOG: Final = logging.getLogger("memstate.transformers")
KNOWN: Final[WeakKeyDictionary[Any, dict[Any, ModelLayout]]] = WeakKeyDictionary()  # by model, then dtype and device


def layout(model: Any) -> ModelLayout:
    """Returns what one state of a model is made of, read off its own cache.

    The model runs on a few tokens, some twenty times; the result is remembered. States of equal shape and dtype
    are one plane. So no list of families is needed, and dtypes and window widths are those that the model really uses.

    Then a trial decides whether memstate's kernels can decode on slots: each must give what the model's own function
    gives, on the same inputs. If they can, windows are one input shorter than in the model's own cache, which keeps one
    that no layer reads.

    Args:
        model: a model of Transformers with its weights, on the device where it is going to run.

    Returns:
        The layout, with a map from layers to planes.

    Raises:
        ConfigurationError: the model keeps no recurrent state in a cache, or is on a CPU with kernels for a GPU.

    Syncs: yes.
    """
    known = KNOWN.setdefault(model, {})
    if (key := (model.dtype, model.device)) not in known:
        known[key] = _read(model)
    return known[key]


def _read(model: Any) -> ModelLayout:
    kind = model.device.type if is_autocast_available(model.device.type) else "cpu"
    # states of the model's own dtypes hold what it rounds; a compiled model would be compiled for each trial
    with torch.autocast(kind, enabled=False), torch.compiler.set_stance("force_eager"):
        found = probe(model)
        short = layout_of(found, on_slots=True)
        tested: ModelLayout | str
        try:
            with unchanged(model):
                model.eval()
                tested = tried(model, short)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            tested = f"a layer does with a state what no kernel does: {error}"
    if isinstance(tested, ModelLayout):
        return tested
    LOG.info("%s decodes on copies of its states: %s", type(model).__name__, tested)
    return layout_of(found, why=tested)

"""Finds the layout of a model: by a probe of its cache, then by a trial that shows whether decode can run on slots."""

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
KNOWN: Final[WeakKeyDictionary[Any, dict[Any, ModelLayout]]] = WeakKeyDictionary()  # model -> (dtype, device) -> layout


def layout(model: Any) -> ModelLayout:
    """Returns the layout of one state of a model, read from the model's own cache.

    The first call runs the model about twenty times, on a few tokens. Later calls return the same layout. States of
    equal shape and dtype form one plane. So no list of model families is needed, and the layout has the dtypes and
    window widths that the model uses.

    Then a trial decides whether memstate's kernels can decode on slots: on the same inputs, each kernel must return
    what the model's own function returns. If they can, windows are one input shorter than in the model's own cache,
    which also keeps an input that no layer reads.

    Args:
        model: a model of Transformers with its weights, on the device where it will run.

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
    # Autocast would change the dtypes of states. A compiled model would be compiled again for each forward here.
    with torch.autocast(kind, enabled=False), torch.compiler.set_stance("force_eager"):
        probed = probe(model)
        short = layout_of(probed, on_slots=True)
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
    return layout_of(probed, why=tested)

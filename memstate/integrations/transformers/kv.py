"""KV of attention layers in the pages of a StateManager: tensors `page token ..` for keys, values and an index."""

from collections.abc import Sequence

import torch
from torch import Tensor

from memstate.errors import ConfigurationError
from memstate.integrations.transformers.layout import ModelLayout, grouped
from memstate.integrations.transformers.probe import ProbedState
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes

KEYS, VALUES, INDEX = "keys", "values", "index"


class KvPages:
    """The KV of all pages. Page 0 is the null page, which no request owns.

    Args:
        model_layout: the model's layout, which names the layers that attend.
        count: number of pages.
        size: tokens of a page.
        backend: backend that runs the kernels that copy pages.

    Attributes:
        planes: the memory. A slot of it is a page, so that tiers can save pages like states.
        axes: layer -> number of axes of the positions that the layer keeps beside its index; 0 if it keeps none.

    Raises:
        ConfigurationError: no layer attends.
        InvalidArgument: there is too little memory.
    """

    def __init__(self, model_layout: ModelLayout, count: int, size: int, backend: Backend) -> None:
        if not model_layout.attended:
            raise ConfigurationError("no layer of this model attends, so there is no KV to keep")
        held = []
        for kv in model_layout.attended:
            held += [ProbedState(kv.layer, KEYS, 0, (size, *kv.keys), kv.dtype)]
            held += [ProbedState(kv.layer, VALUES, 0, (size, *kv.values), kv.dtype)]
            if kv.indexed is not None:
                held += [ProbedState(kv.layer, INDEX, 0, (size, kv.indexed[0]), kv.indexed[1])]
        layout, places = grouped(held)
        self.size = size
        self.planes = Planes(layout, count, backend)
        self._places = {(place.layer, place.kind): place for place in places}
        self.axes = {kv.layer: kv.axes for kv in model_layout.attended}

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages.

        Args:
            pairs: (new page, old page) for each copy, in the form in which forks return them.

        Syncs: no.
        """
        if pairs:
            new, old = torch.tensor(pairs, dtype=torch.int32, device=self.planes.device).t().contiguous()
            self.planes.copy(new, old)

    def has(self, layer: int) -> bool:
        """Returns whether a layer keeps KV."""
        return (layer, KEYS) in self._places

    def plane(self, layer: int, kind: str) -> Tensor:
        """Returns the keys, values or index of a layer in all pages, `page token ..`."""
        place = self._places[layer, kind]
        return place.of(self.planes[place.plane])

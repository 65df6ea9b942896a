"""KV of attention layers in the pages of a StateManager: one tensor `page token head value` for keys and for values."""

from typing import Final

from torch import Tensor

from memstate.errors import ConfigurationError
from memstate.integrations.transformers.layout import ModelLayout, grouped
from memstate.integrations.transformers.probe import Held
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes

KEYS, VALUES = "keys", "values"
INDEXED: Final = (
    "layer {} keeps an index beside its KV, which pages do not hold: run this model with generate and StateCache"
)


class KvPages:
    """The KV of all pages. Page 0 is the null page, which no request has.

    Args:
        found: which layers attend.
        count: number of pages.
        size: tokens of a page.
        backend: runs the launches of the planes.

    Attributes:
        planes: the bytes, with a page as a slot, so that tiers can save them.

    Raises:
        ConfigurationError: a layer keeps more than keys and values, or no layer attends.
        InvalidArgument: the memory is too small.
    """

    def __init__(self, found: ModelLayout, count: int, size: int, backend: Backend) -> None:
        if not found.attended:
            raise ConfigurationError("no layer of this model attends, so there is no KV to keep")
        held = []
        for kv in found.attended:
            if not kv.plain:
                raise ConfigurationError(INDEXED.format(kv.layer))
            held += [Held(kv.layer, KEYS, 0, (size, *kv.keys), kv.dtype)]
            held += [Held(kv.layer, VALUES, 0, (size, *kv.values), kv.dtype)]
        layout, places = grouped(held)
        self.size = size
        self.planes = Planes(layout, count, backend)
        self._places = {(place.layer, place.kind): place for place in places}

    def has(self, layer: int) -> bool:
        """Returns whether a layer keeps KV."""
        return (layer, KEYS) in self._places

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all pages of a layer, each `page token head value`."""
        places = (self._places[layer, KEYS], self._places[layer, VALUES])
        keys, values = (place.of(self.planes[place.plane]) for place in places)
        return keys, values

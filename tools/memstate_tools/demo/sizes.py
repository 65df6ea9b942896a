"""Sizes of the demo's model. Knows no weights and no kernel."""

from dataclasses import dataclass

import torch

from memstate.state.layout import Plane, StateLayout


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model; all but the counts of layers and heads are channels.

    key: of a head's keys, or Mamba's states; value: of a head's values, or Mamba's channels.
    """

    recurrent_layers: int = 3
    width: int = 32
    key: int = 16
    value: int = 16
    heads: int = 2
    taps: int = 4
    hidden: int = 64

    def page_layout(self, page_size: int) -> StateLayout:
        """What one KV page holds: `page_size` tokens of the attention layer."""
        shape = (page_size, self.heads, self.value)
        return StateLayout(
            tuple(Plane(name, shape, torch.float32, rewritten_each_step=False) for name in ("key", "value")), 1
        )

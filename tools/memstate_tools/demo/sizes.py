"""Sizes of the demo's model."""

from dataclasses import dataclass

import torch

from memstate.state.layout import Plane, StateLayout


@dataclass(frozen=True)
class ModelSize:
    """Sizes of the model: numbers of layers and heads, and channels.

    Attributes:
        recurrent_layers: Number of recurrent layers.
        width: Channels between the layers.
        key: Channels of a head's keys, or Mamba's states.
        value: Channels of a head's values, or Mamba's channels.
        heads: Number of heads.
        taps: Taps of the convolution.
        hidden: Channels inside the MLP.
    """

    recurrent_layers: int = 3
    width: int = 32
    key: int = 16
    value: int = 16
    heads: int = 2
    taps: int = 4
    hidden: int = 64

    def page_layout(self, page_size: int) -> StateLayout:
        """Returns the layout of one KV page: `page_size` tokens of the attention layer."""
        shape = (page_size, self.heads, self.value)
        return StateLayout(
            tuple(Plane(name, shape, torch.float32, rewritten_each_step=False) for name in ("key", "value")), 1
        )

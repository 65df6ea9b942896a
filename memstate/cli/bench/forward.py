"""The recurrent layers of a model on its slots, without what lies between them: a decode step's state traffic.

Knows no row and no strategy: it reads, writes and snapshots where a step record says.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import StepRecord


class Forward:
    """Convolution and gated delta rule, layer by layer, over the planes conv `channel tap-1` and ssm `head key value`.

    Inputs are random and stay as they are. Keys have norm 1, decays are negative and gates lie between 0 and 1, so that
    states stay bounded however often a step is repeated.

    Args:
        ops: Carries out the two operations.
        planes: The planes.
        batch: Rows, of one token each.
    """

    def __init__(self, ops: Backend, planes: Mapping[str, Tensor], batch: int) -> None:
        conv, ssm = planes["conv"], planes["ssm"]
        channels, taps = conv.shape[2], conv.shape[3] + 1
        heads, key, value = ssm.shape[2:]
        key_heads = (channels - heads * value) // (2 * key)  # what is left of the channels are queries and keys
        device = ssm.device
        self.ops, self.planes = ops, planes

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        def half(values: Tensor) -> Tensor:
            return values.to(torch.bfloat16)

        norm = torch.nn.functional.normalize
        self.x, self.weight = half(random(batch, 1, channels)), half(random(channels, taps))
        self.q, self.k = (half(norm(random(batch, 1, key_heads, key), dim=-1)) for _ in range(2))
        self.v = half(random(batch, 1, heads, value))
        self.decay, self.beta = -random(batch, 1, heads).abs(), random(batch, 1, heads).sigmoid()
        self.mixed, self.out = torch.empty_like(self.x), torch.empty_like(self.v)

    def __call__(self, record: StepRecord) -> None:
        """Runs one decode step of all layers. Changes planes, `mixed` and `out`; allocates nothing.

        Syncs: no.
        """
        for layer in range(len(self.planes["ssm"])):
            self.layer(layer, record)

    def layer(self, layer: int, record: StepRecord) -> None:
        """Runs one layer; the output of the last one run is in `mixed` and `out`."""
        where = (record.read, record.write, record.snapshot, record.tokens)
        ops = self.ops
        ops.conv_step(self.x, self.weight, None, self.planes["conv"][layer].transpose(1, 2), *where, "silu", self.mixed)
        ops.gated_delta_step(
            self.q, self.k, self.v, self.decay, self.beta, self.planes["ssm"][layer], *where, None, self.out
        )

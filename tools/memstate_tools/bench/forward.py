"""The recurrent layers of a model on its slots, without what lies between them: a decode step's state traffic.

Knows no row and no strategy: it reads, writes and snapshots where a step record says.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import StepRecord
from memstate_tools.workload import delta_inputs


class Forward:
    """Convolution and gated delta rule, layer by layer, over the planes conv `channel tap-1` and ssm `head key value`.

    Inputs are random and stay as they are.

    Args:
        ops: Carries out the two operations.
        planes: The planes.
        batch: Rows, of one token each.
    """

    def __init__(self, ops: Backend, planes: Mapping[str, Tensor], batch: int) -> None:
        self.ops, self.planes = ops, planes
        conv, ssm = planes["conv"], planes["ssm"]
        channels, taps = conv.shape[2], conv.shape[3] + 1
        self.x, self.weight = (
            torch.randn(of, dtype=torch.float32, device=ssm.device).bfloat16()
            for of in ((batch, 1, channels), (channels, taps))
        )
        self.q, self.k, self.v, self.decay, self.beta = delta_inputs(ssm.shape[2:], channels, batch, ssm.device)
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

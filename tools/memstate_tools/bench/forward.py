"""Runs the recurrent layers of a model on its slots, without the other layers: the state traffic of a decode step.

The module knows no rows and no strategy. It reads, writes and snapshots the slots of a step record.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import StepRecord
from memstate_tools.maker import Maker
from memstate_tools.workload import delta_inputs


class BenchForward:
    """Convolution and gated delta rule, layer by layer, over the planes conv `channel tap-1` and ssm `head key value`.

    The inputs are random and never change. q, k and v are the outputs of the convolution.

    Args:
        backend: Backend that runs the operation.
        planes: The planes `conv` and `ssm`.
        batch: Number of rows; each has one token.
    """

    def __init__(self, backend: Backend, planes: Mapping[str, Tensor], batch: int) -> None:
        self.backend, self.planes = backend, planes
        conv, ssm = planes["conv"], planes["ssm"]
        channels, taps = conv.shape[2], conv.shape[3] + 1
        self.x, self.weight = (
            torch.randn(of, dtype=torch.float32, device=ssm.device).bfloat16()
            for of in ((batch, 1, channels), (channels, taps))
        )
        make = Maker(ssm.device, int(torch.randint(2**31, (), device="cpu")))
        *_, v, self.decay, self.beta = delta_inputs(ssm.shape[2:], channels, batch, make)
        self.mixed, self.out = torch.empty_like(self.x), torch.empty_like(v)

    def __call__(self, record: StepRecord) -> None:
        """Runs one decode step of all layers. It changes planes, `mixed` and `out`, and allocates nothing.

        Syncs: no.
        """
        for layer in range(len(self.planes["ssm"])):
            self.layer(layer, record)

    def layer(self, layer: int, record: StepRecord) -> None:
        """Runs one layer. Its output is in `mixed` and `out` until the next layer runs."""
        self.backend.conv_delta_step(*self.given(layer, record))

    def given(self, layer: int, record: StepRecord) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the arguments of both steps of a layer."""
        where = (record.read, record.write, record.snapshot, record.tokens)
        windows, states = self.planes["conv"][layer].transpose(1, 2), self.planes["ssm"][layer]
        heads, key, value = states.shape[1:]
        keys = (self.mixed.shape[2] - heads * value) // 2
        q, k, v = self.mixed.split((keys, keys, heads * value), -1)
        q, k, v = q.unflatten(2, (-1, key)), k.unflatten(2, (-1, key)), v.unflatten(2, (heads, value))
        conv = self.x, self.weight, None, windows, *where, "silu", self.mixed
        return conv, (q, k, v, self.decay, self.beta, states, *where, None, self.out, None, None, None, False, True)

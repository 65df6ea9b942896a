"""Models on whose states kernels are checked and timed: the presets, the rules of their states, and toys of them."""

from dataclasses import replace
from typing import NamedTuple

import torch

from memstate.errors import InvalidArgument
from memstate.kernels.tables import TILE_BYTES
from memstate.state.layout import Plane, StateLayout
from memstate.state.presets import CHECKPOINTS, from_config

RULES = {  # type of a model -> rule of its state
    "qwen3_next": "delta", "qwen3_5_text": "delta", "kimi_linear": "kda", "nemotron_h": "mamba2",
    "falcon_h1": "mamba2", "granitemoehybrid": "mamba2", "bamba": "mamba2", "mamba2": "mamba2", "mamba": "mamba1",
    "falcon_mamba": "mamba1", "mamba3": "mamba3",
}  # fmt: skip
AXES = {"delta": 2, "kda": 2, "mamba2": 1}  # rule -> axis of a state along which values share an int8 scale
MAMBA3 = {  # no checkpoint exists yet: these are the defaults of flash-linear-attention
    "model_type": "mamba3", "hidden_size": 2048, "expand": 2, "head_dim": 64, "state_size": 128, "rope_fraction": 0.5,
    "num_hidden_layers": 48,
}  # fmt: skip
CONFIGS = CHECKPOINTS | {"mamba3": MAMBA3}
NEEDS = {
    "gated_delta": ("delta", "kda"),
    "selective": ("mamba2", "mamba1"),
    "pack_int8": tuple(AXES),
    "mamba3": ("mamba3",),
}
TOY_SSM = {"delta": (2, 16, 40), "kda": (2, 16, 40), "mamba2": (2, 40, 16), "mamba1": (40, 16)}
TOY_MAMBA3 = {"hidden_size": 16, "head_dim": 16, "state_size": 16, "num_hidden_layers": 1}
TOY_CHANNELS = 112  # channels of a toy's conv: the values, and two more heads (q and k, or b and c)


class Model(NamedTuple):
    """A layout, and the rule of its states: "delta", "kda", "mamba2", "mamba1", "mamba3"; "" without such states."""

    layout: StateLayout
    rule: str

    def has(self, kernel: str) -> bool:
        """Returns whether a kernel runs on states of this model."""
        if kernel == "conv":
            return "conv" in self.names
        return self.rule in NEEDS[kernel] if kernel in NEEDS else True

    @property
    def names(self) -> list[str]:
        """Names of the planes."""
        return [plane.name for plane in self.layout.planes]

    def plane(self, name: str) -> Plane:
        """Returns a plane by its name."""
        return self.layout.planes[self.names.index(name)]


def model_of(name: str, ranks: int = 1, ssm_dtype: torch.dtype | None = None) -> Model:
    """Returns a preset.

    Args:
        name: Name of the preset.
        ranks: Number of tensor-parallel ranks; the layout is that of one rank.
        ssm_dtype: Dtype of the states; None: the one that `from_config` chooses.

    Raises:
        InvalidArgument: There is no such preset. The message names the presets.
    """
    if name not in CONFIGS:
        raise InvalidArgument(f"model {name!r}: expected one of {', '.join(CHECKPOINTS)}")
    config = CONFIGS[name]
    return Model(from_config(config, ranks=ranks, ssm_dtype=ssm_dtype), RULES.get(config["model_type"], ""))


def toy_of(model: Model, kernel: str) -> Model:
    """Returns a model of the same kind, so small that an interpreter can run it.

    For kernels that move bytes, a plane has little more than one tile (the bytes that a program moves at a time), and
    there are at most two layers. For the other kernels, heads are small.
    """
    layout = model.layout
    if kernel == "mamba3":
        return Model(from_config(MAMBA3 | TOY_MAMBA3, ssm_dtype=model.plane("ssm").dtype), model.rule)
    if kernel not in ("gated_delta", "selective", "conv", "pack_int8"):
        planes = [
            Plane(plane.name, (min(plane.elements, (TILE_BYTES + 1200) // plane.dtype.itemsize),), plane.dtype)
            for plane in layout.planes
        ]
        return Model(replace(layout, planes=tuple(planes), layers=min(layout.layers, 2)), model.rule)
    shapes = {"ssm": TOY_SSM.get(model.rule, ())}
    if "conv" in model.names:
        first, last = model.plane("conv").shape
        shapes["conv"] = (TOY_CHANNELS, last) if first > last else (first, TOY_CHANNELS)
    planes = [Plane(plane.name, shapes[plane.name], plane.dtype) for plane in layout.planes]
    return Model(replace(layout, planes=tuple(planes), layers=1), model.rule)

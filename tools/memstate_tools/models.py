"""Models on whose states kernels are checked and timed, the rules of their states, and toys of them."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from memstate.errors import InvalidArgument
from memstate.kernels.tables import TILE_BYTES
from memstate.state.layout import Plane, StateLayout, scales_in
from memstate.state.presets import CHECKPOINTS, from_config

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


def model_of(states: object, ranks: int = 1, ssm_dtype: torch.dtype | None = None) -> Model:
    """Returns the states of a model.

    Args:
        states: Name of a preset, a configuration or the path of a config.json as `from_config` takes it, or a layout.
        ranks: Number of tensor-parallel ranks; the layout is that of one rank.
        ssm_dtype: Dtype of the states; None: the one that `from_config` chooses, or that of the layout.

    Raises:
        InvalidArgument: There is no such preset or file (the message names the presets), or states are whole numbers.
    """
    model = _model_of(states, ranks, ssm_dtype)
    if scales_in(model.layout.planes):
        raise InvalidArgument(
            f"{model.layout}: sweeps and benchmarks take states of floats; steps on whole numbers have defaults"
        )
    return model


def _model_of(states: object, ranks: int, ssm_dtype: torch.dtype | None) -> Model:
    if isinstance(states, StateLayout):
        layout = states.shard(ranks)
        if ssm_dtype:
            planes = [replace(plane, dtype=ssm_dtype) if plane.name == "ssm" else plane for plane in layout.planes]
            layout = replace(layout, planes=tuple(planes))
        return Model(layout, _rule(layout))
    config = CONFIGS.get(states, states) if isinstance(states, str) else states
    if isinstance(config, str) and not Path(config).exists():
        presets = ", ".join(CHECKPOINTS)
        raise InvalidArgument(f"model {states!r}: expected one of {presets}, the path of a config.json, or a layout")
    layout = from_config(config, ranks=ranks, ssm_dtype=ssm_dtype)
    try:
        ringed = from_config(config, tail=1)
    except InvalidArgument:  # steps of this model have no tail
        ringed = layout
    return Model(layout, _rule(ringed))


def _rule(layout: StateLayout) -> str:
    """Returns the rule of a layout's states, from the rings of its tails, or else from the parts of its windows.

    Without rings, the delta rule and that of KDA look alike; then it is "delta".
    """
    shapes = {plane.name: plane.shape for plane in layout.planes}
    rings = {plane.name: plane.shape for plane in layout.rows.planes} if layout.rows else {}
    if "angle" in shapes:
        return "mamba3"
    if "ssm" not in shapes or "conv" not in shapes or "ssm_a" in rings:
        return ""
    if "ssm_gate" in rings:
        return "kda" if len(rings["ssm_gate"]) > len(rings["ssm_beta"]) else "delta"
    parts = next(plane.parts for plane in layout.planes if plane.name == "conv")
    if not rings and parts[:1] and parts[0].name == "q":
        return "delta"
    return "mamba1" if len(shapes["ssm"]) == 2 else "mamba2"


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

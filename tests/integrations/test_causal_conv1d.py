"""Tests causal-conv1d on slots: with CUDA its own update of slots, without CUDA its reference on gathered windows."""

from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.decode_case import same_bits
from tests.support.peers import CHANNELS, CONV, CUDA, EVERY, WIDTH, Inputs, Loop, inner_module, normal, on_cpu

BUILT = CUDA and find_spec("causal_conv1d_cuda") is not None


def test_causal_conv1d_update(backend: Backend, generator: torch.Generator) -> None:
    """causal-conv1d updates windows in place and skips negative slots."""
    package = inner_module("causal_conv1d.causal_conv1d_interface", built="causal_conv1d_cuda")

    def forward(plane: Tensor, step: ms.Step, x: Inputs, weights: Inputs) -> Tensor:
        if BUILT:
            given = {"activation": "silu", "conv_state_indices": step.write}
            return package.causal_conv1d_update(x["x"][:, 0], plane, **weights, **given)
        windows = plane.new_empty(1, len(step.read), *plane.shape[1:])
        backend.gather_slots(plane[None], step.read, windows)
        out = package.causal_conv1d_update_ref(x["x"][:, 0], windows[0], **weights, activation="silu")
        backend.scatter_slots(plane[None], step.write, windows)
        return out

    loop = Loop(backend, generator, CONV, forward, ms.Redirect(EVERY), in_place=BUILT, pad=-1).run()
    assert bool(loop.copied) is BUILT
    assert not loop.null_written


def test_windows_behind_packed_prompts(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`causal_conv1d_varlen_states` returns the windows that memstate's kernel stores, for prompts in one chunk."""
    package = inner_module("causal_conv1d.causal_conv1d_varlen", built="causal_conv1d_cuda")
    on_cpu(monkeypatch)
    layout = ms.StateLayout((ms.Plane("conv", CONV.shape, torch.float32),), layers=1)
    mem, lengths = on(backend, layout, slots=4, max_requests=3), [5, 1, 3]
    step = mem.plan(mem.admit([ms.Request(name) for name in "abc"]), lengths)
    starts = torch.tensor([0, 5, 6, 9], dtype=torch.int32, device=backend.device)
    packed = normal(generator, 9, CHANNELS).to(backend.device)
    (plane,) = mem.planes["conv"]
    plane[step.write] = package.causal_conv1d_varlen_states(packed, starts, WIDTH - 1)
    theirs = plane.clone()
    x = torch.full((3, 5, CHANNELS), torch.nan, device=backend.device)
    for i, (start, end) in enumerate(pairwise(starts.tolist())):
        x[i, : end - start] = packed[start:end]
    weights = {name: tensor.to(backend.device) for name, tensor in CONV.weights(generator).items()}
    vectors = step.read, step.write, step.snapshot, step.tokens
    plane[step.read] = 0
    backend.conv_step(x, *weights.values(), plane.transpose(1, 2), *vectors)
    assert same_bits(plane[1:], theirs[1:])
    mem.settle(step)

"""Tests `Planes.scatter_states`: which planes share a launch, and what planes without a source store at marks."""

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes
from tests.kernels.test_decode_marks import columns

LAYERS, SLOTS = 2, 6
SSM, WIDE, CHANNELS, TAPS = (2, 3, 4), (2, 4, 3), 10, 3
MARKS = [(0, 2, 3), (0, 4, 4), (1, 3, 5)]  # (entry, offset, slot): inside row 0, and at the ends of both rows


def planes(backend: Backend, *, channel_major: bool, apart: bool) -> Planes:
    """Returns a plane of states and one of windows, in memstate's memory or in an engine's tensors for each layer."""
    conv = (CHANNELS, TAPS) if channel_major else (TAPS, CHANNELS)
    layout = ms.StateLayout(
        [ms.Plane("conv", conv, torch.bfloat16), ms.Plane("ssm", SSM, torch.float32)], layers=LAYERS
    )  # fmt: skip
    if not apart:
        held = Planes(layout, SLOTS, backend)
    else:
        device = backend.device
        given = {
            plane.name: [torch.zeros(SLOTS + 1, *plane.shape, dtype=plane.dtype, device=device) for _ in range(LAYERS)]
            for plane in layout.planes
        }
        held = Planes.from_tensors(layout, given, backend)
    for name in held:
        for layer in range(LAYERS):
            held[name][layer][1:] = torch.randn(held[name][layer][1:].shape).to(held[name][layer])
    return held


def whole(held: Planes, name: str) -> Tensor:
    return torch.stack([held[name][layer].clone() for layer in range(LAYERS)])


def ints(held: Planes, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=held.device)


def scatter(held: Planes, sources: dict[str, Tensor], transposed: bool = False) -> None:
    rows = {"starts": ints(held, 0, 4, 7), "read": ints(held, 0, 2), "write": ints(held, 1, 2)}
    given = columns(MARKS, ints(held, 0))
    held.scatter_states(sources, given, **rows, first=ints(held, 0, 2, 4), chunk=2, transposed=transposed)


@pytest.mark.parametrize("apart", [False, True], ids=["arena", "tensors of layers"])
@pytest.mark.parametrize("channel_major", [False, True], ids=["tap channel", "channel tap"])
def test_states_and_windows_share_a_launch(backend: Backend, channel_major: bool, apart: bool) -> None:
    """If an engine has one tensor per layer, there is one launch per layer."""
    held = planes(backend, channel_major=channel_major, apart=apart)
    ssm, conv = whole(held, "ssm"), whole(held, "conv")
    h = torch.randn(LAYERS, 4, *WIDE).to(held.device)
    inputs = torch.randn(LAYERS, 7, CHANNELS).bfloat16().to(held.device)
    scatter(held, {"ssm": h, "conv": inputs}, transposed=True)
    assert held.backend.counts.launches == {"scatter_states": LAYERS if apart else 1}
    ssm[:, 3], ssm[:, 4], ssm[:, 5] = h[:, 1].mT, ssm[:, 1], ssm[:, 2]
    old = conv[:, 2:3] if not channel_major else conv[:, 2:3].mT
    windows = [torch.cat([torch.zeros_like(inputs[:, :1]), inputs[:, :2]], 1), inputs[:, 1:4], inputs[:, 4:7]]
    assert old.shape[2:] == (TAPS, CHANNELS)
    for (_, _, slot), window in zip(MARKS, windows, strict=True):
        conv[:, slot] = window.mT if channel_major else window
    assert torch.equal(whole(held, "ssm"), ssm) and torch.equal(whole(held, "conv"), conv)


def test_planes_without_a_source_keep_ends_alone(backend: Backend) -> None:
    """If a forward gives out no states, planes can be stored only at the ends of rows. Both planes share a launch."""
    held = planes(backend, channel_major=True, apart=False)
    ssm, conv = whole(held, "ssm"), whole(held, "conv")
    scatter(held, {})
    for plane in (ssm, conv):
        plane[:, 4], plane[:, 5] = plane[:, 1].clone(), plane[:, 2].clone()
    assert torch.equal(whole(held, "ssm"), ssm) and torch.equal(whole(held, "conv"), conv)
    assert held.backend.counts.launches == {"scatter_states": 1}


def test_sources_that_do_not_fit_are_refused(backend: Backend) -> None:
    held = planes(backend, channel_major=False, apart=False)
    before = whole(held, "ssm")
    h = torch.randn(LAYERS, 4, *SSM, device=held.device)
    for sources, told in (({"kv": h}, "no plane 'kv'"), ({"ssm": h[:1]}, "expected 2 layers first")):
        with pytest.raises(InvalidArgument, match=told):
            scatter(held, sources)
    for wrong in (h[:, :, :1], h.int(), h[0]):
        with pytest.raises(InvalidArgument, match=r"scatter_states of Plane\(ssm\[2,3,4\] float32"):
            scatter(held, {"ssm": wrong})
    held.sleep(keep=False)
    with pytest.raises(ms.Asleep):
        scatter(held, {})
    held.wake()
    assert before.shape == whole(held, "ssm").shape

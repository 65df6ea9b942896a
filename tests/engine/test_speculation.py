"""Speculative steps: what is accepted of a window becomes the state, and a boundary inside leaves its snapshot."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside
from tests.support.build import build, on
from tests.support.loops import Speculator
from tests.support.planes import MAKERS, I, every_strategy
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


def zeros(loop: Speculator, batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Windows of a step."""
    planes = loop.mem.layout.planes
    return {
        plane.name: torch.zeros((2, batch, tokens, *plane.shape), dtype=plane.dtype, device=loop.mem.backend.device)
        for plane in planes
    }


@every_strategy
def test_B41_the_accepted_state_is_the_row_s(backend: Backend, name: str) -> None:
    loop = Speculator(backend, MAKERS[name]())
    a, b = (loop.admit(ms.Request(x))[0] for x in "ab")
    loop.window([a, None, b], [1, 0, 5])
    step = loop.window([a, None, b], [3, 0, 0])  # nothing accepted: b stays where it was
    assert step.after.tolist() == [4, 0, 5]
    assert (
        (loop.mem.info(a).length, loop.mem.info(b).length)
        == (loop.mem.info(a).confirmed, loop.mem.info(b).confirmed)
        == (4, 5)
    )
    for row in (a, b):
        assert loop.holds(loop.slot(row), row, loop.mem.info(row).length)
    assert not loop.planes.touched([s for s in scan(loop.mem).free if s > 12])
    loop.advance([a, b])  # plain steps and windows follow each other
    loop.window([a, b], [6, 6])
    for row in (a, b):
        assert loop.holds(loop.slot(row), row, loop.mem.info(row).length)
    scan(loop.mem)


@every_strategy
@pytest.mark.parametrize("how", ["abort", "cancel"])
def test_B29_a_window_given_up_leaves_nothing(backend: Backend, name: str, how: str) -> None:
    loop = Speculator(backend, MAKERS[name]())
    (row,) = loop.admit()
    loop.window([row], [3])
    step = loop.mem.plan([row, None], 2, window=True)
    if how == "cancel":
        loop.mem.cancel(step)
    else:
        loop.mem.end([row])
        (tenant,) = loop.admit()  # in the same row
        slots = [loop.slot(tenant, part) for part in range(3)]
        scan(loop.mem)
        loop.mem.accept(step, [2, 0], zeros(loop, 2, 2))  # the row is another request's
        assert loop.mem.info(tenant).length == 0 and slots[1:] == [loop.slot(tenant, part) for part in (1, 2)]
        loop.advance([tenant, None], 2)
        assert loop.holds(loop.slot(tenant), tenant, 2)
        loop.mem.end([tenant])
    loop.mem.audit().raise_if_leaking()
    assert loop.mem.free_slots == 16


def test_what_a_step_of_windows_asks_of_the_device(backend: Backend) -> None:
    loop = Speculator(backend, ms.PingPong(I))
    (row,) = loop.admit()
    loop.window([row], [1])
    counts = loop.mem.backend.counts
    counts.reset()
    loop.window([row], [5])
    assert dict(counts.launches) == {"plan": 1, "accept": 1, "scatter_accepted": 2}  # two planes
    assert (counts.uploads, counts.syncs) == (1, 0)  # the batch repeats; only `accepted` goes up


def conv_manager(backend: Backend, order: str) -> ms.StateManager:
    shape = (3, 5) if order == "tap channel" else (5, 3)
    planes = (ms.Plane("conv", shape, torch.bfloat16), ms.Plane("ssm", (2, 4), torch.float32))
    return on(
        backend, ms.StateLayout(planes, 2), slots=4, max_requests=2, tracking=ms.PingPong(I), overlap=False,
        speculation=True,
    )  # fmt: skip


def test_conv_inputs_that_do_not_reach_are_refused(backend: Backend) -> None:
    mem = conv_manager(backend, "channel tap")
    (row,) = mem.admit([ms.Request("a")])
    step = mem.plan([row], 4, window=True)
    ssm = torch.zeros((2, 1, 4, 2, 4), device=backend.device)
    for shape in ((2, 1, 6, 5), (2, 1, 7, 6), (2, 2, 7, 5), (1, 1, 7, 5), (2, 1, 7)):
        conv = torch.zeros(shape, dtype=torch.bfloat16, device=backend.device)
        with pytest.raises(ms.InvalidArgument, match="conv"):
            mem.accept(step, [4], {"conv": conv, "ssm": ssm})
    mem.accept(step, [4], {"conv": torch.ones((2, 1, 7, 5), dtype=torch.bfloat16, device=backend.device), "ssm": ssm})
    assert mem.info(row).length == 4


BAD_WINDOWS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "elsewhere": (lambda window: window.to("meta"), "window of plane short on"),
    "none": (lambda window: None, "window of plane short on"),
    "numpy": (lambda window: window.numpy(force=True), "window of plane short on"),
    "a list": (lambda window: [window], "window of plane short on"),
    "fewer tokens": (lambda window: window[:, :, :2], "short"),
    "another type": (lambda window: window.long(), "short"),
    "no batch": (lambda window: window[0], "short"),
    "another batch": (lambda window: window.repeat(1, 2, 1, 1), "short"),
}


def test_misuse_of_windows_is_named_and_changes_nothing(backend: Backend) -> None:
    loop = Speculator(backend, ms.Redirect(I))
    (row,) = loop.admit()
    mem = loop.mem
    plain = on(backend, mem.layout, slots=2, max_requests=1)
    with pytest.raises(ms.InvalidArgument, match="speculation=True"):
        plain.plan([None], window=True)
    with pytest.raises(ms.ConfigurationError, match="overlap=False"):
        build(mem.layout, slots=2, max_requests=1, speculation=True)
    step = mem.plan([row], 3, window=True)
    good = zeros(loop, 1, 3)
    mem.submit()
    before = inside.registers(mem).cells.clone()
    wrong: list[tuple[Any, Any, str]] = [
        ([4], good, "accepted"), ([1, 1], good, "accepted"), ([1], None, "expected a mapping"),
        ([1], {"long": good["long"]}, "every plane"), ([1], good | {"other": good["long"]}, "every plane"),
        *(([1], good | {"short": spoil(good["short"])}, says) for spoil, says in BAD_WINDOWS.values()),
    ]  # fmt: skip
    for accepted, windows, says in wrong:
        with pytest.raises(ms.InvalidArgument, match=says):
            mem.accept(step, accepted, windows)
        assert torch.equal(inside.registers(mem).cells, before) and not mem.planes["long"][:, step.write.long()].any()
    with pytest.raises(ms.InvalidArgument, match="accept"):
        mem.settle(step)
    mem.accept(step, [2], good)
    with pytest.raises(ms.StaleHandle):
        mem.accept(step, [2], good)
    other = mem.plan([row])
    with pytest.raises(ms.InvalidArgument, match="settle"):
        mem.accept(other, [1], good)
    mem.settle(other)
    assert mem.info(row).length == 3


@every_strategy
def test_a_window_inside_a_prompt_takes_no_snapshot(backend: Backend, name: str) -> None:
    """Boundaries count from the end of the prompt on. Inside it the prefix cache chooses the lengths."""
    loop = Speculator(backend, MAKERS[name](), prefix=ms.Prefix(), ends=True, page_size=1, pages=64, pages_per_row=48)
    mem, prompt = loop.mem, list(range(10 * I))
    (row,) = loop.admit(ms.Request("a", tokens=prompt))
    before, chunk = mem.info(row), mem.chunk(row, 100)
    loop.window([row], [I + 2])
    assert mem.info(row) == before._replace(length=I + 2, confirmed=I + 2)
    assert (mem.chunk(row, 100), mem.stats().snapshots) == (chunk - I - 2, 0)

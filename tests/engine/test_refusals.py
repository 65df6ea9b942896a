"""What cannot be meant is refused by name, and changes nothing: arguments, windows, memory, files, threads."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels import tuned
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from tests.support import owners
from tests.support.build import build
from tests.support.planes import Loop
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend

I = 4  # noqa: E741
PLAIN = StateLayout((Plane("ssm", (4,), torch.float32),), layers=1)


def test_what_sleeps_gives_no_plane_and_no_slot(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I))
    loop.mem.sleep()
    free = loop.mem.free_slots
    for call in (lambda: loop.mem.pool.claim(3), lambda: next(iter(loop.mem.planes.values()))):
        with pytest.raises(ms.Asleep):
            call()
    loop.mem.wake()
    assert loop.mem.free_slots == free and len(loop.mem.pool.claim(3)) == 3


def test_generations_wrap_around(backend: Backend) -> None:
    """A row reused 2^31 times: its generation starts anew at 0, and the handle of before is stale."""
    loop = Loop(backend, ms.Redirect(I))
    mem = loop.mem
    owners.table(mem).generation[:] = 2**31 - 2
    owners.holdings(mem).generation[:] = 2**31 - 1
    mem.reset()
    assert owners.table(mem).generation.max() == 2**31 - 1 and owners.holdings(mem).generation.max() == 0
    for _ in range(2):
        (row,) = loop.admit()
        loop.advance([row], I)
        (snapshot,) = mem.release([row], publish=True)
        assert snapshot
        mem.drop([snapshot])
        for stale in (lambda row=row: mem.length(row), lambda snapshot=snapshot: mem.drop([snapshot])):
            with pytest.raises(ms.StaleHandle):
                stale()
    assert owners.table(mem).generation[1] == 1
    scan(mem)


def test_memory_is_touched_only_when_it_is_taken(backend: Backend) -> None:
    """Slot 0 of an engine's tensors becomes zero with a construction that succeeds, not with one that is refused."""
    tensor = torch.full((1, 5, 4), 7.0, device=backend.device)
    settings: dict[str, Any] = {"max_requests": 1, "backend": backend.name, "device": backend.device}
    with pytest.raises(ms.LayoutMismatch, match=r"5 entries .* expected 10: the null slot and 9 slots"):
        build(PLAIN, slots=9, tensors={"ssm": tensor}, **settings)
    assert (tensor == 7).all()
    build(PLAIN, slots=4, tensors={"ssm": tensor}, **settings)
    assert (tensor[:, 0] == 0).all() and (tensor[:, 1:] == 7).all()


def test_memory_that_is_no_tensor_is_refused(backend: Backend) -> None:
    tensor = torch.zeros(1, 5, 4)
    for given in (None, 3, [None], (x for x in ()), np.zeros((1, 5, 4), np.float32)):
        with pytest.raises(ms.LayoutMismatch, match=r"plane ssm: .* expected a tensor"):
            ms.Planes.from_tensors(PLAIN, {"ssm": given}, backend)  # type: ignore[dict-item]
    with pytest.raises(ms.LayoutMismatch, match="expected a mapping"):
        ms.Planes.from_tensors(PLAIN, [tensor], backend)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="expected a Backend"):
        ms.Planes.from_tensors(PLAIN, {"ssm": tensor}, "reference")  # type: ignore[arg-type]


def test_arenas_that_share_bytes_are_refused(backend: Backend) -> None:
    layout = StateLayout((Plane("a", (4,), torch.float32), Plane("b", (4,), torch.float32)), layers=1)
    whole = torch.empty(1024, dtype=torch.uint8, device=backend.device)
    with pytest.raises(ms.LayoutMismatch, match="share bytes"):
        ms.Planes(layout, 4, backend, allocate=lambda n: whole[:n])


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": "8"}, {"slots": None}, {"slots": True}, {"layout": None}, {"device": "nonsense"}, {"device": 1.5},
        {"overlap": np.array([True, False])}, {"overlap": 1.0}, {"speculation": "yes"}, {"in_place": None},
        {"debug": 0}, {"direct_hits": "no"}, {"tracking": ms.PingPong(I, lane_count=1.0), "overlap": False},
    ],
)  # fmt: skip
def test_settings_of_the_wrong_kind_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ms.ConfigurationError, match=next(iter(settings)) if "tracking" not in settings else "lane"):
        build(**({"layout": PLAIN, "slots": 8, "max_requests": 2, "backend": "reference"} | settings))


@pytest.mark.sample(interpreter=1)
def test_a_tuned_file_that_cannot_be_read_is_found_at_construction(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the first launch, when the packet with its zeros has been taken and would be lost."""
    (tmp_path / tuned.file_name(tuned.device_name(backend.device))).write_text("{")
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path))
    tuned.forget()
    launches = backend.name != "reference"  # which could be tuned
    with pytest.raises(ValueError, match=str(tmp_path)) if launches else nullcontext():
        Loop(backend, ms.Redirect(I))
    monkeypatch.undo()
    tuned.forget()

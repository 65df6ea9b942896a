"""A manager in an engine's memory: bytes beside its planes never change; sleep and wake."""

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from tests.engine.calls import CALLS
from tests.proof.stateful.script import ALL, Play, script
from tests.support.build import on

T = list(range(20))
GIVEN = {"layers": 2, "interleaved": True, "pages": 0, "page_size": 1, "pages_per_row": 0}


@script(strategy=ALL, in_place=(False, True), memory=("tensor", "layers", "fenced"), slots=10, case=GIVEN)
def test_B39_a_manager_in_an_arena_touches_its_planes_only(play: Play) -> None:
    for length in (1, 5, 9):
        (row,) = play.admit(None)
        play.run(row, T[:length])
        play.drop(*play.end(row, how="publish"))


@script(strategy=ALL, case=GIVEN)
def test_G1_calls_are_refused_asleep_and_nothing_is_lost(play: Play) -> None:
    rows = play.admit(None, None)
    play.nap(keep=False)  # it would lose states
    for _ in range(5):
        play.step(rows)
    kept = play.publish(*rows, handles=True)
    play.submit()
    play.sleep()
    assert all(arena.untyped_storage().nbytes() == 0 for arena in play.mem.planes.arenas)
    for name in CALLS.keys() - {"close", "device.wake", "info", "pool.release", "pool.check"}:  # these work asleep
        if not name.startswith(("prefix", "tiers", "match")):  # this manager lacks these parts
            play.refuses(ms.Asleep, lambda call=CALLS[name]: call(play.mem, rows, None, kept), "wake")
    play.wake()
    play.wake()
    play.step(rows, 4)
    play.drop(*kept)
    play.end(*rows, how="release")
    play.nap(keep=False)
    play.reached("InvalidArgument")


PLAIN = StateLayout((Plane("ssm", (4,), torch.float32),), layers=1)


def test_memory_is_touched_only_when_it_is_taken(backend: Backend) -> None:
    """A construction that succeeds sets slot 0 of an engine's tensors to zero; a refused one changes nothing."""
    tensor = torch.full((1, 5, 4), 7.0, device=backend.device)
    with pytest.raises(ms.LayoutMismatch, match=r"5 entries .* expected 10: the null slot and 9 slots"):
        on(backend, PLAIN, slots=9, max_requests=1, tensors={"ssm": tensor})
    assert (tensor == 7).all()
    on(backend, PLAIN, slots=4, max_requests=1, tensors={"ssm": tensor})
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

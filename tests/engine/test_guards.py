"""Guards of a manager: leaks found by close, refused copies, fixed attributes, wrong settings, tensors of autograd."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels import tuned, tuned_files
from memstate.kernels.dispatch import Backend
from tests.support import inside
from tests.support.build import build, on
from tests.support.virtual import MemoryStore

PLAIN = ms.StateLayout((ms.Plane("ssm", (4,), torch.float32),), layers=1)


def manager(**settings: Any) -> ms.StateManager:
    return build(PLAIN, **{"slots": 8, "max_requests": 2, "backend": "reference"} | settings)


def tiered(**settings: Any) -> ms.StateManager:
    tiers = ms.Tiers("a model", host_slots=4, store=MemoryStore())
    return manager(page_size=2, prefix=ms.Prefix(), tiers=tiers, **settings)


# close


@pytest.mark.parametrize("made", [manager, tiered])
def test_close_in_debug_mode_finds_leaks_after_it_has_closed(made: Callable[..., ms.StateManager]) -> None:
    mem = made(debug=True)
    (row,) = mem.admit([ms.Request("a")])
    ids = mem.pool.claim(2)
    with pytest.raises(ms.LeakFound, match="slot 2 leaked"):
        mem.close()
    with pytest.raises(ms.ConfigurationError, match="the manager is closed" if mem.tiers else "prefix=|tiers="):
        mem.prefetch([1, 2, 3])
    mem.pool.release(ids)
    mem.settle(mem.plan([row]))  # requests can go on
    mem.close()  # a running request is no leak


@pytest.mark.parametrize("call", [lambda mem: mem.close(), lambda mem: mem.device.wake()], ids=["close", "wake"])
def test_a_manager_in_debug_mode_belongs_to_its_thread(call: Callable[[ms.StateManager], object]) -> None:
    mem = tiered(debug=True)
    mem.device.sleep()
    with ThreadPoolExecutor(1) as other, pytest.raises(ms.MemstateError, match="one thread"):
        other.submit(call, mem).result()
    with pytest.raises(ms.Asleep):
        mem.close()
    mem.device.wake()
    mem.close()


def test_close_without_debug_reads_nothing_back() -> None:
    mem = manager()
    mem.pool.claim(2)
    before = mem.stats().syncs
    mem.close()
    mem.device.sleep()
    mem.close()
    assert mem.stats().syncs == before + 1


# copies

SHARED: dict[str, Callable[[ms.StateManager], object]] = {
    "StateManager": lambda mem: mem,
    "StatePool": lambda mem: mem.pool,
    "SlotAllocator": lambda mem: mem.pool.allocator,
    "RegisterFile": inside.registers,
    "Planes": lambda mem: mem.planes,
    "TierManager": lambda mem: mem.tiers,
    "PrefixCache": lambda mem: mem.prefix,
}
COPIES: dict[str, Callable[[Any], object]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "within": lambda it: copy.deepcopy({"mem": it}),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", SHARED)
def test_what_shares_memory_on_the_device_is_not_copied(what: str, how: str) -> None:
    mem = tiered()
    with pytest.raises(ms.InvalidArgument, match=rf"a {what} cannot be copied or pickled: .*inspect\(\)"):
        COPIES[how](SHARED[what](mem))
    mem.close()


# attributes


SHOWN = ["planes", "layout", "forward", "overlap", "tracking", "pool", "prefix", "tiers", "backend", "free_slots"]


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_manager_shows_is_not_reassigned(name: str) -> None:
    mem = tiered()
    before = getattr(mem, name)
    with pytest.raises(AttributeError, match=rf"mem\.{name} cannot be reassigned: "):
        setattr(mem, name, before)
    with pytest.raises(AttributeError, match=rf"mem\.{name} cannot be "):
        delattr(mem, name)
    assert getattr(mem, name) is before
    mem.close()


# autograd


def test_tensors_that_require_grad_are_refused_where_they_are_written() -> None:
    tensor, ids = torch.full((1, 9, 4), 7.0, requires_grad=True), torch.tensor([1, 2])
    planes = manager().planes
    for call, says in (
        (lambda: manager(tensors={"ssm": tensor}), r"plane ssm, layer 0: .*requires grad.*detach"),
        (lambda: manager(tensors={"ssm": [tensor[0]]}), r"plane ssm, layer 0: .*requires grad.*detach"),
        (lambda: planes.gather("ssm", ids, torch.zeros(1, 2, 4, requires_grad=True)), r"out: .*requires grad"),
    ):
        with pytest.raises(ms.InvalidArgument, match=says):
            call()
    assert (tensor == 7).all()
    manager(tensors={"ssm": tensor.detach()})
    planes.scatter("ssm", ids, torch.ones(1, 2, 4, requires_grad=True))  # scatter only reads this tensor
    assert planes["ssm"][0, 1:3].tolist() == [[1.0] * 4] * 2 and not planes["ssm"].requires_grad


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": "8"}, {"slots": None}, {"slots": True}, {"layout": None}, {"device": "nonsense"}, {"device": 1.5},
        {"overlap": np.array([True, False])}, {"overlap": 1.0}, {"tail": "yes"}, {"in_place": None},
        {"debug": 0}, {"direct_hits": "no"}, {"tracking": ms.PingPong(4, lane_count=1.0), "overlap": False},
    ],
)  # fmt: skip
def test_settings_of_the_wrong_kind_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ms.ConfigurationError, match=next(iter(settings)) if "tracking" not in settings else "lane"):
        build(**({"layout": PLAIN, "slots": 8, "max_requests": 2, "backend": "reference"} | settings))


@pytest.mark.sample(interpreter=1)
def test_a_tuned_file_that_cannot_be_read_is_found_at_construction(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first launch would be too late: by then the packet, with the slots to set to zero, has been taken, and would
    be lost.
    """
    (tmp_path / tuned_files.file_name(tuned.device_name(backend.device))).write_text("{")
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path))
    tuned.forget()
    launches = backend.name != "reference"  # only kernels can be tuned
    with pytest.raises(ValueError, match=str(tmp_path)) if launches else nullcontext():
        on(backend, PLAIN, slots=4, max_requests=1)
    monkeypatch.undo()
    tuned.forget()

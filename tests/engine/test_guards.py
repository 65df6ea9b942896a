"""A manager guards itself: its close in debug mode, copies of it, its attributes, and tensors of autograd."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support import inside
from tests.support.build import build
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
    mem.close()  # what runs is no leak
    ids = mem.pool.claim(2)
    with pytest.raises(ms.LeakFound, match="slot 2 leaked"):
        mem.close()
    mem.pool.release(ids)
    mem.close()
    mem.settle(mem.plan([row]))  # requests continue
    mem.end([row])
    mem.close()


def test_close_in_debug_mode_ends_the_tiers_before_it_reports() -> None:
    mem = tiered(debug=True)
    mem.pool.claim(1)
    with pytest.raises(ms.LeakFound):
        mem.close()
    with pytest.raises(ms.ConfigurationError, match="the manager is closed"):
        mem.prefetch([1, 2, 3])
    mem.poll()


def test_close_in_debug_mode_finds_a_slot_with_two_owners() -> None:
    mem = manager(debug=True)
    row, other = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.submit()
    mem.device.live_slots[row.index] = mem.device.live_slots[other.index]
    with pytest.raises(ms.LeakFound, match="has 2 owners"):
        mem.close()


@pytest.mark.parametrize("made", [manager, tiered])
def test_close_in_debug_mode_belongs_to_the_thread(made: Callable[..., ms.StateManager]) -> None:
    mem = made(debug=True)
    with ThreadPoolExecutor(1) as other, pytest.raises(ms.MemstateError, match="one thread"):
        other.submit(mem.close).result()
    mem.device.sleep()
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
    "pickle 0": lambda it: pickle.dumps(it, 0),
    "within": lambda it: copy.deepcopy({"mem": it}),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("what", SHARED)
def test_what_shares_memory_on_the_device_is_not_copied(what: str, how: str) -> None:
    mem = tiered()
    with pytest.raises(ms.InvalidArgument, match=rf"a {what} cannot be copied or pickled: .*inspect\(\)"):
        COPIES[how](SHARED[what](mem))
    mem.close()


def test_handles_settings_and_reports_are_copied() -> None:
    mem = tiered()
    rows = mem.admit([ms.Request("a", tokens=[1, 2, 3])])
    plain = [
        rows[0], mem.sessions.open("chat"), ms.Request("b", tokens=[1, 2]), ms.Pages(size=4), ms.Forward(), PLAIN,
        ms.Redirect(), ms.Prefetch(), mem.inspect(), mem.stats(), mem.audit(),
    ]  # fmt: skip
    bare = manager()
    (row,) = bare.admit([ms.Request("a")])
    bare.settle(bare.plan([row], 3))
    plain += [snapshot for snapshot in bare.release([row], publish=True) if snapshot]
    assert isinstance(plain[-1], ms.Snapshot)
    for one in plain:
        assert type(copy.copy(one)) is type(copy.deepcopy(one)) is type(pickle.loads(pickle.dumps(one))) is type(one)
    assert copy.copy(rows) is copy.deepcopy(rows) is rows
    mem.close()


# attributes


@pytest.mark.parametrize(
    "name",
    [
        "planes", "layout", "forward", "overlap", "tracking", "pool", "prefix", "tiers", "backend",
        "page_table", "page_size", "free_slots", "free_pages", "changes",
    ],
)  # fmt: skip
def test_what_a_manager_shows_is_not_reassigned(name: str) -> None:
    for mem in (manager(), tiered()):
        before = getattr(mem, name)
        with pytest.raises(AttributeError, match=rf"mem\.{name} cannot be reassigned: "):
            setattr(mem, name, before)
        with pytest.raises(AttributeError, match=rf"mem\.{name} cannot be "):
            delattr(mem, name)
        after = getattr(mem, name)
        assert after is before or name in ("page_table", "changes", "free_slots", "free_pages", "page_size")
        mem.close()


# autograd


def test_tensors_of_an_engine_that_require_grad_are_refused() -> None:
    tensor = torch.full((1, 9, 4), 7.0, requires_grad=True)
    for tensors in ({"ssm": tensor}, {"ssm": [tensor[0]]}):
        with pytest.raises(ms.InvalidArgument, match=r"plane ssm, layer 0: .*requires grad.*detach"):
            manager(tensors=tensors)
        with pytest.raises(ms.InvalidArgument, match="requires grad"):
            ms.Planes.from_tensors(PLAIN, tensors, ms.Backend("reference"))  # type: ignore[arg-type]
    assert (tensor == 7).all()
    manager(tensors={"ssm": tensor.detach()})


def test_windows_that_require_grad_are_refused() -> None:
    mem = manager(overlap=False, speculation=True)
    (row,) = mem.admit([ms.Request("a")])
    mem.settle(mem.plan([row], 3))
    step = mem.plan([row], 2, window=True)
    window = torch.ones(1, 1, 2, 4, requires_grad=True)
    with pytest.raises(ms.InvalidArgument, match=r"window of plane ssm: .*requires grad"):
        mem.accept(step, [1], {"ssm": window})
    mem.accept(step, [1], {"ssm": window.detach()})
    assert mem.info(row).length == 4


def test_a_gather_into_a_tensor_that_requires_grad_is_refused() -> None:
    mem = manager()
    out = torch.zeros(1, 2, 4, requires_grad=True)
    with pytest.raises(ms.InvalidArgument, match=r"out: .*requires grad"):
        mem.planes.gather("ssm", torch.tensor([1, 2]), out)


def test_a_batch_that_requires_grad_is_only_read() -> None:
    planes = manager().planes
    batch = torch.ones(1, 2, 4, requires_grad=True)
    planes.scatter("ssm", torch.tensor([1, 2]), batch)
    assert planes["ssm"][0, 1:3].tolist() == [[1.0] * 4] * 2 and not planes["ssm"].requires_grad

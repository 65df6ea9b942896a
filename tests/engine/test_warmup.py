"""Warm-up launches everything that serving launches, and changes nothing."""

from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside, warm_runs
from tests.support.build import on
from tests.support.kernel_runs import not_interpreted

LAYOUT = ms.StateLayout(planes=(ms.Plane("ssm", (2, 4), torch.float32),), layers=2)


@pytest.mark.parametrize("tracking", [ms.NoTracking(4), ms.PingPong(4), ms.LazyPingPong(4), ms.Redirect(4)], ids=repr)
def test_warm_up_changes_nothing_in_the_middle_of_a_run(backend: Backend, tracking: ms.Tracking) -> None:
    mem = on(backend, LAYOUT, slots=12, max_requests=40, tracking=tracking)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for _ in range(4):
        mem.settle(mem.plan(rows))
    step = mem.plan(rows)
    with pytest.raises(ms.InvalidArgument, match=r"warm_up .* step 4 is open"):
        ms.warm_up(mem)
    mem.submit(step)
    mem.planes["ssm"].fill_(torch.nan)
    before = [t.clone() for t in (inside.registers(mem).cells, mem.pool.allocator.bitmap, mem.pool.allocator.counters)]
    launched = ms.warm_up(mem)
    after = (inside.registers(mem).cells, mem.pool.allocator.bitmap, mem.pool.allocator.counters)
    assert launched > 4
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    assert mem.planes["ssm"].isnan().all()
    mem.settle(step)
    mem.settle(mem.plan(rows))
    mem.audit().raise_if_leaking()
    mem.device.check()


# -- compiled kernels, by the keys under which Triton stores them ---------------------------------------------------

LAYERS = {"conv", "gated_delta", "selective"}  # kernels of the caller's forward
MANAGER = {
    "registers._ownership", "registers._resolve", "registers._audit", "tracking._plan",
    "bitmap._claim", "bitmap._release", "copy._move", "gather._gather_slots", "scatter._scatter_slots",
    "pack._move_records", "pack_int8._move_int8", "trees._keep_path",
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return not_interpreted(warm_runs.__file__)


@pytest.mark.parametrize("name", warm_runs.KINDS)
def test_nothing_is_compiled_after_warm_up(recorded: dict[str, Any], name: str) -> None:
    """Covers serving, eviction, loads, prefetch, sessions, forks, speculation, sleep, slots by id and handover."""
    run = recorded[name]
    assert isinstance(run, dict), run
    new = {kernel: sorted(set(keys) - set(run["warm"].get(kernel, ()))) for kernel, keys in run["served"].items()}
    assert {kernel: keys for kernel, keys in new.items() if keys} == {}
    assert not run.get("handed over"), "records are moved by the host"


def test_the_managers_above_reach_every_kernel(recorded: dict[str, Any]) -> None:
    served = {kernel for name in warm_runs.KINDS for kernel in recorded[name]["served"]}
    assert served == MANAGER and not {kernel.partition(".")[0] for kernel in served} & LAYERS
    assert "handed over" in recorded["drafts"]

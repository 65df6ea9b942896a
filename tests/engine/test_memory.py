"""What bookkeeping costs in device memory, and that a decode loop allocates nothing of the size of a state."""

import pytest
import torch

from memstate import LazyPingPong, Plane, Redirect, Request, StateLayout
from memstate.kernels.dispatch import Backend
from tests.support import inside
from tests.support.build import on
from tests.support.scan import scan
from tests.support.watch import Watch

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend

LAYOUT = StateLayout([Plane("s", (4,), torch.float32)], layers=1)


def bookkeeping(backend: Backend, slots: int, rows: int, pages_per_row: int = 0) -> int:
    """Device bytes besides states and page table, from the tensors themselves."""
    mem = on(
        backend, LAYOUT, slots=slots, max_requests=rows, max_batch=8, pages=8 if pages_per_row else 0, page_size=1,
        pages_per_row=pages_per_row,
    )  # fmt: skip
    file, slots = inside.registers(mem), mem.pool.allocator
    assert file.nbytes == file.cells.nbytes - mem.device.page_table.nbytes + slots.bitmap.nbytes + slots.counters.nbytes
    return file.nbytes


def test_bookkeeping_is_at_most_64_bytes_a_slot_and_64_a_row(backend: Backend) -> None:
    """Difference quotients: what 4000 more slots, or rows, add; as many snapshots can be kept as there are slots."""
    start = bookkeeping(backend, 1000, 1000)
    per_slot = (bookkeeping(backend, 5000, 1000) - start) / 4000
    per_row = (bookkeeping(backend, 1000, 5000) - start) / 4000
    assert 8 < per_slot <= 64
    assert 24 <= per_row <= 64
    # a constant of a few columns rounded up, no hidden table
    assert start <= 1000 * 64 + 1000 * 64 + 4096


def test_page_tables_are_apart(backend: Backend) -> None:
    assert abs(bookkeeping(backend, 100, 100, pages_per_row=50) - bookkeeping(backend, 100, 100)) <= 256


def test_B13_rows_cost_the_same_whatever_the_number_of_slots(backend: Backend) -> None:
    few = bookkeeping(backend, 100, 5000) - bookkeeping(backend, 100, 1000)
    many = bookkeeping(backend, 10_000, 5000) - bookkeeping(backend, 10_000, 1000)
    assert abs(few - many) <= 1024


class Largest(Watch):
    """The largest tensor that any operation made, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        before = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in before:
            self.made = max(self.made, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("tracking", [LazyPingPong(every=4), Redirect(every=4)], ids=lambda t: type(t).__name__)
def test_no_temporary_of_state_size_anywhere(backend: Backend, tracking) -> None:  # type: ignore[no-untyped-def]
    """States of 1 MiB; admissions with copies and zeros, boundaries, publishing: nothing made is a tenth of one."""
    layout = StateLayout([Plane("s", (2**17,), torch.float32)], layers=2)
    mem = on(backend, layout, slots=9, max_requests=3, tracking=tracking, direct_hits=False)
    for op in ("run_data", "copy_slots") if backend.name == "interpreter" else ():
        # the interpreter copies whatever a kernel is given, so here only what launchers are given is looked at
        setattr(mem.backend, op, lambda *given, **named: None)
    watch, cuda = Largest(), backend.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    with watch:
        rows = mem.admit([Request("a"), Request("b")])
        for tokens in (4, 1, 3, 1):
            mem.settle(mem.plan(rows, tokens))
        snapshots = mem.end(rows, keep="handle")
        mem.plan(mem.admit([Request("c", resume=snapshots[0]), Request("d")]), 1)
        ids = mem.pool.claim(1)
        mem.pool.copy(ids, ids)
    assert layout.bytes_per_slot == 2**20
    assert watch.made < 10**5
    assert not cuda or torch.cuda.max_memory_allocated() - before < 10**5
    scan(mem, ids.tolist())


def test_a_temporary_is_seen(backend: Backend) -> None:
    watch = Largest()
    state = torch.zeros(2**17, device=backend.device)
    with watch:
        state[:10].clone()
        assert watch.made == 40
        state.view(2, -1)[:, :].add(1)
    assert watch.made == 2**19

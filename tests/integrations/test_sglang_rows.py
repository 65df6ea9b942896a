"""Tests memstate's pool beside SGLang's pool; `make engine-proof` runs both under SGLang's scheduler."""

import runpy
from array import array
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.integrations.sglang import MambaSlotAllocator
from memstate_tools.bench.no_torchvision import leave_out_torchvision

pytest.importorskip("sglang", reason="needs SGLang, see docs/sglang.md")
leave_out_torchvision()
theirs = import_module("sglang.srt.mem_cache.memory_pool")
ours = import_module("memstate.integrations.sglang.rows")
decode = import_module("sglang.srt.disaggregation.decode")
batch = import_module("sglang.srt.managers.schedule_batch")

pytestmark = pytest.mark.filterwarnings("ignore")


def make_pool(kind: Any, rows: int, slots: int, *, lazy: bool = False, **named: Any) -> Any:
    """Makes a pool of class `kind` for two layers of a tiny state. With `pre_alloc_size`: that of a decode server."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=2, n_groups=1, num_heads=1, head_dim=2, state_size=2, conv_kernel=2
    )
    settings = {
        "size": rows, "mamba_size": slots, "max_context_len": 4, "device": "cpu", "enable_memory_saver": False,
        "cache_params": Mamba2CacheParams(shape=shape, layers=[0, 2]), "mamba_layer_ids": [0, 2],
        "enable_mamba_extra_buffer": True, "enable_overlap_schedule": True, "speculative_num_draft_tokens": None,
    }  # fmt: skip
    if "pre_alloc_size" not in named:
        settings |= {"mamba_spec_state_size": 0, "enable_mamba_extra_buffer_lazy": lazy}
    return kind(**settings | named)


def requests(n: int) -> list[Any]:
    return [batch.Req(str(i), "", array("q", [1]), theirs_sampling()) for i in range(n)]


def theirs_sampling() -> Any:
    return import_module("sglang.srt.sampling.sampling_params").SamplingParams()


def pools(**named: Any) -> tuple[Any, Any]:
    made = [make_pool(kind.HybridReqToTokenPool, 4, 10, **named) for kind in (theirs, ours)]
    return made[0], made[1]


def test_an_admission_without_enough_slots_changes_nothing() -> None:
    """memstate's admission changes nothing.

    SGLang's own pool fails an assertion after it has given rows and slots away.
    """
    before, pool = pools()
    first = requests(2)
    assert pool.alloc(first) == before.alloc(requests(2))
    more = requests(2)
    with pytest.raises(ms.OutOfSlots):
        pool.alloc(more)
    assert (pool.available_size(), pool.mamba_allocator.available_size()) == (2, 4)
    assert all(req.kv.req_pool_idx is None and not req.kv.holds_mamba for req in more)
    with pytest.raises(AssertionError):
        before.alloc(requests(2))
    assert (before.available_size(), before.mamba_allocator.available_size()) != (2, 4)
    assert pool.alloc(more[:1]) is not None
    assert pool.alloc(requests(3)) is None  # there are too few rows


def test_an_admission_takes_the_slots_of_an_open_group() -> None:
    """Requests of SGLang claim one slot each, and the open group has enough slots."""
    for pool in pools():
        pool.mamba_allocator.alloc_group_begin(3)
        assert pool.alloc(requests(3)) is not None
        pool.mamba_allocator.alloc_group_end()
        assert pool.mamba_allocator.available_size() == 1
    _, pool = pools()
    pool.mamba_allocator.alloc_group_begin(9)
    with pytest.raises(ms.OutOfSlots):
        pool.alloc(requests(4))
    assert pool.mamba_allocator.schedulable_available_size() == 10


def test_wrong_requests_and_slots_change_nothing() -> None:
    _, pool = pools()
    a, b = requests(2)
    with pytest.raises(ms.InvalidArgument, match="each once"):
        pool.alloc([a, b, a])
    assert (pool.available_size(), pool.mamba_allocator.available_size()) == (4, 10)
    pool.alloc([a, b])
    before = pool.req_index_to_mamba_ping_pong_track_buffer_mapping.tolist()
    for at, value in ((0, 7), (0, None), (0, torch.tensor([7, 8])), (0, torch.tensor(7.0)), (-1, -1), (2, -1)):
        with pytest.raises(ms.InvalidArgument):
            pool.set_mamba_ping_pong_slot(a, at, value)
    assert pool.req_index_to_mamba_ping_pong_track_buffer_mapping.tolist() == before
    pool.set_mamba_ping_pong_slot(a, 0, torch.tensor(9, dtype=torch.int32))
    assert pool.req_index_to_mamba_ping_pong_track_buffer_mapping[a.kv.req_pool_idx, 0] == 9
    pool.free_mamba_cache(a)
    with pytest.raises(ms.InvalidArgument, match="entry 0"):
        pool.set_mamba_ping_pong_slot(a, 0, -1)
    with pytest.raises(ms.InvalidArgument, match="no tracked state"):
        pool.donate_mamba_ping_pong_slot(a, torch.tensor([9]))


@pytest.mark.parametrize("keep", [None, 0, 1])
@pytest.mark.parametrize("lazy", [False, True])
def test_the_end_of_a_request(lazy: bool, keep: int | None) -> None:
    """The tree keeps one entry of the track buffer; the slot of this entry stays owned. A second end is refused."""
    for pool in pools(lazy=lazy):
        (req,) = requests(1)
        pool.alloc([req])
        slot = req.kv.mamba_ping_pong_track_buffer.tolist()
        pool.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=keep)
        pool.free(req)
        kept = [] if keep is None or slot[keep] < 0 else [slot[keep]]
        assert sorted({*range(1, 11)} - {*pool.mamba_allocator.free_slots.tolist()}) == kept
        assert (req.kv.mamba_ping_pong_track_buffer, req.kv.mamba_next_track_idx) == (None, None)
    with pytest.raises(ms.InvalidArgument, match="freed before"):
        pool.free_mamba_cache(req)
    pool.alloc([req])
    with pytest.raises(ms.InvalidArgument, match="entry 2"):
        pool.free_mamba_cache(req, 2)
    assert req.kv.holds_mamba


def test_a_track_buffer_that_changes() -> None:
    for pool in pools(lazy=True):
        reqs = requests(2)
        pool.alloc(reqs)
        req, other = reqs
        was = req.kv.mamba_ping_pong_track_buffer.tolist()
        pool.set_mamba_ping_pong_slot(req, 1, pool.mamba_allocator.alloc(1)[0])
        req.kv.mamba_last_track_idx = 1
        assert pool.get_mamba_ping_pong_keep_idx(req) == 1
        new = pool.mamba_allocator.alloc(1)
        donated = pool.donate_mamba_ping_pong_slot(req, new)
        pool.set_mamba_ping_pong_slot(req, 0, -1)
        tracks = pool.req_index_to_mamba_ping_pong_track_buffer_mapping
        assert tracks[req.kv.req_pool_idx].tolist() == [-1, int(new)] == req.kv.mamba_ping_pong_track_buffer.tolist()
        assert tracks[other.kv.req_pool_idx].tolist() == other.kv.mamba_ping_pong_track_buffer.tolist()
        assert (donated.shape, donated.tolist() != was) == ((1,), True)
        pool.mamba_allocator.free(donated)
        pool.clear()
        assert (pool.available_size(), pool.mamba_allocator.available_size()) == (4, 10)


@pytest.mark.parametrize("lazy", [False, True])
def test_requests_that_go_on_keep_their_slots(lazy: bool) -> None:
    """SGLang admits a prompt again for each chunk, alone or among new requests."""
    for pool in pools(lazy=lazy):
        reqs = requests(3)
        rows = pool.alloc(reqs[:2])
        for req in reqs[:2]:
            req.kv.kv_allocated_len = 1
        before = [int(req.kv.mamba_pool_idx) for req in reqs[:2]]
        assert pool.alloc(reqs[:1]) == rows[:1]
        rows = pool.alloc(reqs)
        assert [int(req.kv.mamba_pool_idx) for req in reqs[:2]] == before
        assert pool.get_mamba_indices(torch.tensor(rows)).tolist() == [int(req.kv.mamba_pool_idx) for req in reqs]
        tracks = pool.req_index_to_mamba_ping_pong_track_buffer_mapping[rows].tolist()
        assert tracks == [req.kv.mamba_ping_pong_track_buffer.tolist() for req in reqs]
        assert pool.mamba_allocator.available_size() == 10 - 3 * (2 if lazy else 3)
        for req in reqs:
            pool.free_mamba_cache(req)
        assert pool.mamba_allocator.available_size() == 10


def test_one_launch_for_all_changes_of_a_step() -> None:
    _, pool = pools(lazy=True)
    reqs = requests(3)
    pool.alloc(reqs)
    counts = pool.mamba_allocator.slots.backend.counts
    before = counts.uploads, counts.total_launches
    for req in reqs:
        pool.set_mamba_ping_pong_slot(req, 1, pool.mamba_allocator.alloc(1)[0])
    assert (counts.uploads, counts.total_launches) == before
    assert pool.req_index_to_mamba_ping_pong_track_buffer_mapping[2:].min() > 0
    assert (counts.uploads, counts.total_launches) == (before[0] + 1, before[1])
    pool.free_mamba_cache(reqs[0])
    assert pool.alloc(requests(1)) is not None
    assert counts.uploads == before[0] + 1  # the row of one new request needs no upload


def test_rows_of_a_decode_server() -> None:
    """A decode server has rows for arriving requests besides the running ones."""
    for kind in (decode, ours):
        pool = make_pool(kind.HybridMambaDecodeReqToTokenPool, 2, 12, pre_alloc_size=2)
        reqs = requests(4)
        assert sorted(pool.alloc(reqs)) == [1, 2, 3, 4]
        assert pool.alloc(requests(1)) is None
        rows = torch.tensor([req.kv.req_pool_idx for req in reqs])
        assert pool.get_mamba_indices(rows).tolist() == [int(req.kv.mamba_pool_idx) for req in reqs]
        for req in reqs:
            pool.free_mamba_cache(req)
            pool.free(req)
        assert (pool.available_size(), pool.mamba_allocator.available_size()) == (4, 12)


def test_states_move_as_theirs_do() -> None:
    generator = torch.Generator().manual_seed(1)
    sides = pools()
    for pool in sides:
        cache = pool.mamba_pool.mamba_cache
        for tensor in (*cache.conv, cache.temporal):
            tensor[:, 1:] = torch.randn(tensor[:, 1:].shape, generator=generator.manual_seed(1)).to(tensor.dtype)
    at, to = torch.tensor([1, 4]), torch.tensor([7, 2])
    for slots in (at, torch.tensor(3)):
        saved = [pool.mamba_pool.get_cpu_copy(slots) for pool in sides]
        for left, right in zip(*((*conv, temporal) for conv, temporal in saved), strict=True):
            assert left.shape == right.shape and torch.equal(left, right)
    for pool, copies in zip(sides, saved, strict=True):
        pool.mamba_pool.copy_from(at, to)
        pool.mamba_pool.clear_slots(at)
        pool.mamba_pool.load_cpu_copy(copies, torch.tensor(9))
    caches = [(*pool.mamba_pool.mamba_cache.conv, pool.mamba_pool.mamba_cache.temporal) for pool in sides]
    assert all(torch.equal(left, right) for left, right in zip(*caches, strict=True))


def test_states_whose_scales_lie_elsewhere_are_refused() -> None:
    pool = object.__new__(ours.MambaPool)
    pool.mamba_cache = SimpleNamespace(conv=[], temporal=torch.zeros(1, 2, 3, dtype=torch.int8))
    with pytest.raises(ms.InvalidArgument, match=r"states of torch.int8: .* scales"):
        _ = pool.planes


def test_every_method_replaces_one_of_theirs() -> None:
    mamba = import_module("sglang.srt.mem_cache.allocator.mamba")
    pairs = (
        (MambaSlotAllocator, mamba.MambaSlotAllocator), (ours.MambaPool, theirs.MambaPool),
        (ours.Batched, theirs.HybridReqToTokenPool),
    )  # fmt: skip
    for mine, their in pairs:
        methods = {name for name, member in vars(mine).items() if isfunction(member) and name[0] != "_"}
        assert methods - {"check"} <= set(dir(their))


def test_in_place_of_theirs() -> None:
    in_place = import_module("memstate.integrations.sglang").in_place
    with in_place():
        pool = make_pool(theirs.HybridReqToTokenPool, 2, 6)
        assert isinstance(pool.mamba_allocator.slots, ms.SlotAllocator)
        assert sorted(pool.alloc(requests(2))) == [1, 2]
    assert theirs.HybridReqToTokenPool is not ours.HybridReqToTokenPool


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sglang_pool.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-1] == "MambaSlotAllocator(40 of 40 slots free)"


def test_the_slots_of_a_streaming_session() -> None:
    """A session keeps the record of its first turn, later turns borrow it, and its end frees the slots."""
    sessions = import_module("sglang.srt.session.streaming_session")
    if not hasattr(sessions.StreamingSession, "take"):
        pytest.skip("sessions of older versions take the record at the end of a turn")
    for pool in pools(lazy=True):
        (req,) = requests(1)
        req.session = SimpleNamespace(session_id="chat", streaming=True)
        pool.alloc([req])
        cache = SimpleNamespace(req_to_token_pool=pool, unlock=lambda _: None, free_kv_row=lambda *_: None)
        session = sessions.StreamingSession(cache)
        session.take(req)
        rows = torch.tensor([req.kv.req_pool_idx])
        assert session.borrowed_slot(req) is not None and session.any_holding_kv()
        assert pool.get_mamba_indices(rows).tolist() == [int(req.kv.mamba_pool_idx)]
        pool.set_mamba_ping_pong_slot(req, 1, pool.mamba_allocator.alloc(1)[0])
        assert pool.mamba_allocator.available_size() == 7
        session.release_session("chat")
        assert (pool.available_size(), pool.mamba_allocator.available_size()) == (4, 10)

"""Planned bytes equal allocated bytes: managers on torch's meta device have all tensors, but use no memory."""

import gc
import json
import re
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

import memstate as ms
from memstate import sizes
from memstate.engine.capacity import STRATEGIES
from memstate.engine.figures import Capacity
from memstate.engine.planner import Split, snapshot_bytes
from memstate.sizes import byte_count, token_count
from memstate.state.presets import CHECKPOINTS, from_config

GIB = 2**30
PLAIN = ms.StateLayout((ms.Plane("ssm", (64, 64), torch.float32),), layers=4)


@pytest.fixture
def poison() -> None:
    """Does nothing: tensors on the meta device have no bytes to poison."""


@pytest.fixture(autouse=True)
def memory_of_a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "memory", lambda device: 2**50)


def storages(root: object, kind: str) -> dict[int, int]:
    """Returns address -> bytes of each storage that an object reaches, on devices of one kind."""
    seen, todo, bytes_at = set[int](), [root], dict[int, int]()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | int | str | bytes | None):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if one.device.type == kind:
                bytes_at[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
        elif not (isinstance(one, list) and one and type(one[0]) is int):  # lists of page ids are left out
            todo += gc.get_referents(one)
    return bytes_at


def built(plan: Capacity, split: Split, **more: Any) -> ms.StateManager:
    return ms.StateManager(plan.layout, **split.settings(), backend="reference", device="meta", **more)


def kv_bytes(plan: Capacity, split: Split) -> int:
    if plan.kv is None:
        return 0
    return sum(torch.empty(size, dtype=torch.uint8, device="meta").nbytes for size in plan.kv.arena_bytes(split.pages))


# few pages, so that the page lists are short
COARSE: dict[str, Any] = {"context": 16384, "every": 8192, "page_size": 8192}


def require_exact(plan: Capacity, strategy: str) -> None:
    """Builds the manager that the plan proposes for a strategy; the bytes of its tensors must be those of the plan."""
    split = plan.of(strategy)
    assert split is not None and type(split.tracking) is STRATEGIES[strategy] and split.requests == plan.concurrency
    mem = built(plan, split)
    assert sum(storages(mem, "meta").values()) + kv_bytes(plan, split) == split.nbytes <= plan.memory


@pytest.mark.sample
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_C1_planned_bytes_are_the_bytes_that_a_manager_allocates(name: str, ranks: int) -> None:
    plan = ms.capacity(name, 20 * GIB, concurrency=2, ranks=ranks, **COARSE)
    for strategy in STRATEGIES:
        require_exact(plan, strategy)


@pytest.mark.sample
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_C7_tails_are_planned_to_the_byte(name: str, ranks: int) -> None:
    plan = ms.capacity(name, 20 * GIB, concurrency=2, ranks=ranks, speculate=4, **COARSE)
    for strategy in STRATEGIES:
        require_exact(plan, strategy)
    rows = from_config(CHECKPOINTS[name], ranks=ranks, tail=4).rows
    assert plan.speculation is not None and plan.layout.rows == rows is not None
    assert plan.speculation.tail_bytes_per_request == rows.bytes_per_slot
    assert plan.speculation.state_bytes_per_request == 4 * plan.layout.bytes_per_slot
    assert built(plan, plan.best).forward.tail == 4


def test_C7_a_request_has_a_tail_and_pages_for_its_drafts() -> None:
    plain = ms.capacity("qwen3_next", "40GiB", context="32k")
    tails = ms.capacity("qwen3_next", "40GiB", context="32k", speculate=4)
    assert plain.speculation is None and tails.speculation is not None
    (before, after) = (plan.residency[3].max_requests for plan in (plain, tails))
    assert tails.best.per_row == plain.best.per_row + 1 and tails.speculation.max_requests_with_states < after < before
    turns, ahead = (
        ms.capacity("lfm2", "1GiB", context=60, page_size=1, speculate=4, overlap=is_) for is_ in (False, True)
    )
    assert (turns.best.per_row, ahead.best.per_row) == (64, 68)
    layout = from_config(CHECKPOINTS["lfm2"], tail=8)
    assert ms.capacity(layout, "1GiB", context=64, every=64, speculate=8).best.settings()["forward"] == ms.Forward(
        tail=8
    )


def test_C7_refuses_tails_where_there_are_none() -> None:
    with pytest.raises(ms.ConfigurationError, match="tail=-1: expected a whole number"):
        ms.capacity("qwen3_next", "40GiB", context="32k", speculate=-1)


def test_names_of_the_command_are_refused_with_those_that_are_meant() -> None:
    with pytest.raises(ms.InvalidArgument, match=r"no argument kv_bytes; .* kv_bytes_per_token="):
        ms.capacity("qwen3_next", "40GiB", context="32k", kv_bytes=1)  # type: ignore[arg-type]


def test_a_context_of_one_page_is_refused_as_a_manager_refuses_it() -> None:
    with pytest.raises(ms.InvalidArgument, match="context=64 in pages of 64 tokens"):
        ms.capacity("qwen3_next", "40GiB", context=64)
    assert ms.capacity("qwen3_next", "40GiB", context=65).best.settings()["pages"].per_row == 2


@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
def test_C1_a_layout_of_ones_own_is_planned_to_the_byte(order: Any) -> None:
    planes = (
        ms.Plane("s", (33, 9, 77), torch.float32),
        ms.Plane("empty", (0,), torch.int8),
        ms.Plane("t", (), torch.int8),
        ms.Plane("own", (9,), torch.int16, layers=2, fill=-1),
    )
    rows = ms.StateLayout((ms.Plane("tail", (70,), torch.int16, fill=3),), layers=3, order=order)
    layout = ms.StateLayout(planes, layers=5, order=order, alignment=256, rows=rows)
    plan = ms.capacity(layout, "96MiB", kv_bytes_per_token=1000, concurrency=3, **COARSE)
    for strategy in STRATEGIES:
        require_exact(plan, strategy)
    assert repr(plan).count("\n") == 0 and f"{plan.best.slots} slots" in repr(plan)
    assert sum(part.size for part in plan.sheet().bars[0].parts) == plan.best.nbytes


def test_C1_no_plan_has_more_than_int32_numbers() -> None:
    """The memory would hold more requests than a register file can number."""
    tiny = ms.StateLayout((ms.Plane("s", (1,), torch.int8),), layers=1)
    plan = ms.capacity(tiny, 2**49, context=2**20, every=64, kv_bytes_per_token=1)
    cells = next(part.nbytes for part in plan.best.parts if "registers" in part.name) // 4
    assert 2**31 - 2**17 < cells < 2**31 and plan.best.nbytes < 2**48


def test_C1_memory_with_a_byte_less_holds_less() -> None:
    """The plan fills the memory. With one byte less of memory, one slot, page or request no longer fits."""
    plan = ms.capacity("qwen3_next", "40GiB", context="32k", concurrency=16, page_size=64)
    for split in plan.splits:
        assert 0 <= plan.memory - split.nbytes < plan.kv.bytes_per_slot + 4096
    redirect = plan.residency[3]
    tight = ms.capacity("qwen3_next", "40GiB", context="32k", concurrency=redirect.max_requests)
    assert tight.best.cached_states <= tight.marks and "No room is left" in tight.recommendation
    with pytest.raises(
        ms.ConfigurationError, match=rf"^{redirect.max_requests + 1} requests need .* 32768 tokens .* fit"
    ):
        ms.capacity("qwen3_next", "40GiB", context="32k", concurrency=redirect.max_requests + 1)


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_C2_tiers_allocate_what_is_planned_on_the_device_and_on_the_host(name: str) -> None:
    plan = ms.capacity(name, "400MiB", context=2048, concurrency=3, page_size=256, host_memory="16MiB", ranks=8)
    for split in plan.splits:
        assert split.host is not None and split.host.nbytes <= 16 << 20
        planes = None
        if plan.kv is not None:
            planes = ms.Planes(plan.kv, split.pages, ms.Backend("reference", "meta"))
        # host pages are in proportion to host slots
        mem = built(plan, split, tiers=ms.Tiers("m", host_slots=split.host.states, kv=planes))
        assert sum(storages(mem, "meta").values()) == split.nbytes
        stats = mem.stats().tiers
        assert (stats.host_bytes, stats.host_state_records) == (split.host.nbytes, split.host.states)
        assert stats.host_page_records == split.host.pages
        of_state, of_page = plan.host_records
        assert split.host.states * of_state + split.host.pages * of_page == stats.host_bytes


@pytest.mark.parametrize("overlap", [True, False])
def test_C3_slots_of_a_request_are_those_that_a_manager_gives_it(overlap: bool) -> None:
    plan = ms.capacity(PLAIN, "4MiB", context=32, page_size=8, every=8, overlap=overlap)
    for one in plan.residency:
        mem = ms.StateManager(
            PLAIN, slots=8, max_requests=2, tracking=one.tracking, pages=ms.Pages(size=8), overlap=overlap
        )
        (row,) = mem.admit([ms.Request("a")])
        assert one.slots_per_request == mem.info(row).slots
        assert one.most_slots_per_request == one.tracking.most_slots(overlap)
    assert [one.slots_per_request for one in plan.residency] == [1, 3 if overlap else 2, 2, 1]


def test_C3_a_prompt_keeps_as_many_marks_as_planned() -> None:
    """The plan counts the states that a prompt holds until they are published, for `prefills` prompts at once."""
    given = {"context": 44, "page_size": 8, "placement": ms.Ends(every=16), "kv_bytes_per_token": 4}
    plan = ms.capacity(PLAIN, "4MiB", **given)
    assert plan.marks == 3  # the prompt has marks at 16, 32 and 40
    mem = ms.StateManager(
        PLAIN, slots=8, max_requests=1, pages=ms.Pages(size=8), prefix=ms.Prefix(placement=ms.Ends(every=16)),
        forward=ms.Forward(grid=8),
    )  # fmt: skip
    (row,) = mem.admit([ms.Request("a", tokens=list(range(44)))])
    mem.settle(mem.plan([row], [44]))
    assert mem.info(row).slots <= 1 + plan.marks
    none, one, two = (ms.capacity(PLAIN, "4MiB", **given, prefills=count, concurrency=4) for count in range(3))
    assert all(each.best.slots - each.best.cached_states == 4 for each in (none, one, two))
    assert [each.best.cached_states % 3 for each in (none, one, two)] == [0, 0, 0]
    full = ms.capacity(PLAIN, one.memory, **given, prefills=9, concurrency=plan.concurrency)
    assert full.best.cached_states == plan.best.cached_states < 3  # a plan fits even without slots for marks


def test_C3_what_fits_without_states_at_marks_fits_and_is_served() -> None:
    """Memory has room for two slots and two long prompts. Each prompt keeps fewer states than it has marks."""
    given: dict[str, Any] = {"context": 256, "page_size": 8, "every": 8, "kv_bytes_per_token": 64, "concurrency": 2}
    given |= {"placement": ms.Ends(every=16)}
    with pytest.raises(ms.ConfigurationError, match=r"^2 requests need (\d+) bytes") as refused:
        ms.capacity(PLAIN, "300KiB", **given)
    needed = int(re.search(r"need (\d+) bytes", str(refused.value))[1])  # type: ignore[index]
    plan = ms.capacity(PLAIN, needed, **given, prefills=2)
    assert plan.marks > 2 and (plan.best.slots, plan.best.cached_states, plan.best.nbytes) == (2, 0, needed)
    assert plan.residency[3].max_requests == 2
    mem = ms.StateManager(plan.layout, **plan.best.settings() | {"forward": ms.Forward(grid=8)}, backend="reference")
    prompts = [[k * 1000 + n for n in range(250)] for k in (1, 2)]
    rows = mem.admit([ms.Request(name, tokens=tokens, length=256) for name, tokens in zip("ab", prompts, strict=True)])
    mem.settle(mem.plan(rows, [250, 250]))
    mem.end(rows, keep="cache", tokens=prompts)
    report = mem.audit()
    assert (report.free, report.leaked) == (2, [])


def test_a_stage_of_a_pipeline_has_the_states_and_kv_of_its_layers() -> None:
    fields = CHECKPOINTS["qwen3_next"]  # every fourth layer is attention
    plans = [ms.capacity("qwen3_next", "20GiB", context="4k", layers=part) for part in (range(12), range(12, 48), None)]
    slots, pages = ([getattr(plan, name).bytes_per_slot for plan in plans] for name in ("layout", "kv"))
    assert (slots[0], pages[0]) == (slots[2] // 4, pages[2] // 4) and slots[0] + slots[1] == slots[2]
    assert plans[0].layout.layers == 9 and plans[0].to_json()["layers"] == list(range(12))
    assert "12 layers from 12" not in str(plans[0]) and "36 layers from 12" in str(plans[1])
    assert ms.capacity(fields, "1GiB", context="4k", layers=range(3), concurrency=1).kv is None
    for layers, says in (
        (range(3, 4), "no layer in layers=range(3, 4) holds state"),
        (range(40, 49), "expected a range of the 48 layers"), (range(-1, 4), "of the 48 layers"),
        (range(0), "of the 48 layers"),        (12, "layers=12: expected a range"),
    ):  # fmt: skip
        with pytest.raises(ms.InvalidArgument, match=re.escape(says)):
            ms.capacity(fields, "1GiB", context="4k", layers=layers)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="of a StateLayout: expected the layout of these layers"):
        ms.capacity(PLAIN, "1GiB", context="4k", layers=range(2))
    pattern = CHECKPOINTS["nemotron_h"]
    assert from_config(pattern, layers=range(26)).layers + from_config(pattern, layers=range(26, 52)).layers == 24
    with pytest.raises(ms.InvalidArgument, match="of the 52 layers"):
        from_config(pattern, layers=range(53))


@pytest.mark.sample
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", STRATEGIES)
def test_C4_a_snapshot_writes_the_bytes_that_are_planned(name: str, in_place: bool) -> None:
    """With in-place kernels memstate writes and counts these bytes; otherwise the forward writes them."""
    tracking = STRATEGIES[name](every=8)
    mem = ms.StateManager(
        PLAIN, slots=8, max_requests=1, tracking=tracking, pages=ms.Pages(size=8), forward=ms.Forward(in_place=in_place)
    )
    (row,) = mem.admit([ms.Request("a")])
    written = 0
    for _ in range(17):
        step = mem.plan([row])
        written += int((step.snapshot > 0).sum()) * PLAIN.bytes_per_slot * (not in_place)
        mem.settle(step)
    mem.submit()
    written += mem.stats().copied_bytes
    assert written == 2 * snapshot_bytes(PLAIN, tracking, in_place=in_place)
    plan = ms.capacity(
        PLAIN, "4MiB", context=32, page_size=8, every=8, in_place=in_place, tokens_per_second=800, concurrency=1
    )
    each = {one.strategy: one.snapshot_bytes_per_second for one in plan.residency}
    assert each[name] == 100 * written / 2


def test_C5_the_recommended_split_is_the_balanced_one_without_a_trace_and_the_best_with_one() -> None:
    plan = ms.capacity("qwen3_next", "40GiB", context="32k", concurrency=16)
    assert plan.best.balanced and "conversations with 4 states each" in plan.recommendation
    assert plan.best.cached_states // plan.marks == pytest.approx(plan.best.cached_pages // plan.best.per_row, abs=1)
    rated = plan.with_hit_rates([0.1, 0.2, 0.4, 0.3, 0.25, 0.15])
    assert rated.best == rated.splits[2] and rated.best.hit_rate == 0.4
    assert "0.400" in rated.recommendation and "0.100" in rated.recommendation
    with pytest.raises(ms.InvalidArgument, match="2 hit rates for 6 splits"):
        plan.with_hit_rates([0.1, 0.2])


def test_C5_without_marks_a_conversation_keeps_one_state() -> None:
    plan = ms.capacity("qwen3_next", "40GiB", context="32k", concurrency=16, placement=ms.Nowhere())
    assert (plan.marks, plan.best.slots - plan.best.cached_states) == (0, 16)
    assert plan.best.settings()["prefix"].placement == ms.Nowhere()
    assert f"{plan.best.cached_states} conversations with 1 states each" in plan.recommendation


def test_C5_what_the_recommendation_says_is_in_the_figures() -> None:
    plan = ms.capacity("qwen3_5", "141GB", context="64k", concurrency=8, ranks=4, host_memory="512GiB")
    facts, best = plan.to_json(), plan.best
    assert json.loads(json.dumps(facts)) == facts
    assert facts["arena_bytes"] == sum(plan.layout.arena_bytes(best.slots)) == facts["best"]["bytes_by_part"]["planes"]
    assert f"{best.slots:,} slots and {best.pages:,} KV pages" in facts["recommendation"] in " ".join(str(plan).split())
    assert best.host and f"{best.host.states:,} states" in str(plan)
    assert plan._repr_html_().count("<table>") == 3


def test_a_model_is_a_preset_a_path_a_configuration_or_a_layout(tmp_path: Any) -> None:
    fields = CHECKPOINTS["granite_hybrid"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    plans = [
        ms.capacity(model, "8GiB", context=4096, concurrency=4)
        for model in ("granite_hybrid", "granite-hybrid", str(tmp_path), tmp_path, fields)
    ]
    assert len({json.dumps(plan.to_json()["splits"]) for plan in plans}) == 1
    per_token = plans[0].kv.bytes_per_slot // 64
    given = ms.capacity(from_config(fields), "8GiB", context=4096, concurrency=4, kv_bytes_per_token=per_token)
    assert given.to_json()["splits"] == plans[0].to_json()["splits"]
    bare = ms.capacity("granite_hybrid", "8GiB", context=4096, concurrency=4, kv_bytes_per_token=0)
    assert bare.kv is None and [split.pages for split in bare.splits] == [0]


REFUSED: dict[str, tuple[type[ms.MemstateError], dict[str, Any], str]] = {
    "memory for one request": (
        ms.ConfigurationError, {"memory": "100MiB"},
        r"^1 request needs 961559588 bytes \(917.01 MiB\), and memory=104857600 \(100.00 MiB\), for 32768 .*; 0 fit;",
    ),
    "concurrency": (ms.ConfigurationError, {"concurrency": 500}, r"^500 requests need .*; 48 fit; give more memory"),
    "memory": (ms.InvalidArgument, {"memory": "80G"}, r"memory='80G': unknown unit 'G', expected one of B, KB"),
    "no memory": (ms.InvalidArgument, {"memory": 0}, "memory=0"),
    "context": (ms.InvalidArgument, {"context": "32q"}, r"context='32q': unknown unit 'q', expected one of k, K, M"),
    "ranks": (ms.InvalidArgument, {"ranks": 3}, "for 3 ranks"),
    "a text for every": (ms.ConfigurationError, {"every": "256"}, "every='256': a boundary needs"),
    "placement": (ms.InvalidArgument, {"placement": "ends"}, r"placement='ends': expected a Placement, such as Ends"),
    "infinite rate": (ms.InvalidArgument, {"tokens_per_second": float("inf")}, "tokens_per_second=inf"),
    "page size": (ms.InvalidArgument, {"page_size": 0}, "page_size.*0"),
    "dtype": (ms.InvalidArgument, {"ssm_dtype": "float32"}, "ssm_dtype='float32': expected one of torch.float32"),
    "every": (ms.ConfigurationError, {"every": 100}, "every=100 is no multiple of 64"),
    "rate": (ms.InvalidArgument, {"tokens_per_second": 0}, "tokens_per_second=0: expected a number above 0"),
    "prefills": (ms.InvalidArgument, {"prefills": -1}, "prefills=-1"),
    "a name": (ms.InvalidArgument, {"model": "gpt-2"}, r"'gpt-2': No such file.*, or one of the presets qwen3_next, "),
    "KV": (ms.InvalidArgument, {"kv_bytes_per_token": -1}, "kv_bytes_per_token=-1"),
    "host": (ms.ConfigurationError, {"host_memory": 1000}, r"host_memory=1000: a state .* needs \d+ bytes; give more"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_C6_what_cannot_be_planned_is_refused_with_the_numbers(case: str) -> None:
    error, changes, message = REFUSED[case]
    given: dict[str, Any] = {"model": "qwen3_next", "memory": "40GiB", "context": "32k", "concurrency": 16} | changes
    with pytest.raises(error, match=message):
        ms.capacity(given.pop("model"), given.pop("memory"), **given)


def test_C6_the_bytes_that_an_error_asks_for_are_enough_and_no_byte_too_many() -> None:
    def plan(memory: int) -> Capacity:
        return ms.capacity("qwen3_next", memory, context="32k", concurrency=3)

    with pytest.raises(ms.ConfigurationError) as refused:
        plan(2 * 10**9)
    needed = int(re.search(r"requests need (\d+) bytes", str(refused.value))[1])
    assert plan(needed).best.nbytes == needed
    with pytest.raises(ms.ConfigurationError, match="2 fit"):
        plan(needed - 1)


def test_sizes_are_read_as_they_are_written() -> None:
    assert [byte_count("m", text) for text in ("80GiB", "141GB", "1.5 KiB", "7B", 7)] == [
        80 * GIB, 141 * 10**9, 1536, 7, 7,
    ]  # fmt: skip
    assert [token_count("c", text) for text in ("32k", "128K", "1M", "500", 500)] == [32768, 131072, 2**20, 500, 500]
    for bad in ("40", "1.5", " 42949672960 "):
        said = re.escape(
            f"m={bad!r}: a number without a unit; write {bad.strip()}GiB or {bad.strip()}GB, or for so many"
        )
        with pytest.raises(ms.InvalidArgument, match=said):
            byte_count("m", bad)
    for bad in ("", "GiB", "-1", "1e3", "80 gib", True, 1.5, None, "9" * 30):
        with pytest.raises(ms.InvalidArgument):
            byte_count("m", bad)  # type: ignore[arg-type]

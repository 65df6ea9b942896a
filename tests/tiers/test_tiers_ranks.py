"""Several ranks with their own tiers start every request from the same length, whatever each rank has lost."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memstate as ms
from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.tiers import manager
from memstate.tiers.alike import said
from memstate.tokens import SaltedTokens, encode
from tests.support.build import on
from tests.support.planes import LAYOUT
from tests.support.processes import run_ranks
from tests.support.tiered_small import KV, PAGE, fetch, push_down, tiered, turn, whole
from tests.support.virtual import ByHand, MemoryStore

PROMPT = [*whole(1, 4), 7]


def lives(ranks: int, folder: Path) -> list[list[dict[str, Any]]]:
    """Returns the lines that each rank printed: a refusal of settings, two lives of a manager and, except on the last
    rank, the end of a prefetch.
    """
    outputs = run_ranks("tests.support.tiers_rank", ranks, folder)
    lines = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    assert [len(each) for each in lines] == [4] * (ranks - 1) + [3], "\n".join(error for _, error in outputs)
    return lines


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_start_alike_with_host_memory_and_storage_that_differ(ranks: int, tmp_path: Path) -> None:
    printed = lives(ranks, tmp_path)
    print(printed[0])
    said = f"slots: 6 on rank 0, 7 on rank {', '.join(map(str, range(1, ranks)))}; "
    assert all(said in rank[0]["refused"] for rank in printed)
    for life in (1, 2):
        assert all(rank[life]["starts"] == printed[0][life]["starts"] for rank in printed)
        assert any(start for start, _ in printed[0][life]["starts"])
    assert printed[0][2]["stored"] > 0  # the second life begins with an empty device
    assert [rank[3] for rank in printed[:-1]] == [{"outcome": "lost"}] * (ranks - 1)


def test_ranks_without_a_group_are_refused() -> None:
    with pytest.raises(ms.ConfigurationError, match="init_process_group"):
        manager.Ranks()


# -- settings that ranks must share -----------------------------------------------------------------


class Mine(ms.policies.Lru):
    """A policy of the user's own. Its repr has its address, so it differs in every process."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha

    def __repr__(self) -> str:
        return f"<Mine(alpha={self.alpha}) at {id(self):#x}>"


class Line:
    """Stands in for the exchange of two ranks' settings. Both ranks call it in one thread, rank 0 first.

    Rank 0 gets its own text also as that of rank 1, which has not called yet.
    """

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def gather(self, text: str) -> list[str]:
        self.told.append(json.loads(text))
        return [json.dumps(self.told[0]), json.dumps(self.told[-1] | {"rank": 1})]


def ranked(rank: int, settings: dict[str, Any], below: dict[str, Any]) -> ms.StateManager:
    usual: dict[str, Any] = {
        "slots": 8, "max_requests": 2, "pages": ms.Pages(size=4, count=20, per_row=9), "prefix": ms.Prefix()
    }  # fmt: skip
    kv = ms.Planes(KV, 20, Backend("reference"))
    tiers = ms.Tiers(
        **(
            {
                "model": "toy",
                "host_slots": 9,
                "prefetch": ms.Prefetch(threshold=4),
                "kv": kv,
                "rank": rank,
                "ranks": 2,
                "group": object(),
            }
            | below
        )
    )
    return ms.StateManager(LAYOUT, backend="reference", tiers=tiers, **(usual | settings))


def second(line: pytest.MonkeyPatch, settings: dict[str, Any], below: dict[str, Any]) -> tuple[Line, ms.StateManager]:
    """Returns the exchange, and the second of two ranks; only the second has these settings."""
    ranks = Line()
    line.setattr(manager, "Ranks", lambda group: ranks)
    ranked(0, {}, {})
    return ranks, ranked(1, settings, below)


@pytest.mark.parametrize(
    ("settings", "below", "says"),
    [
        ({"slots": 9}, {}, "slots: 8 on rank 0, 9 on rank 1"),
        ({"max_requests": 3}, {}, "max_requests and preallocated: 2 on rank 0, 3 on rank 1"),
        ({"reserve": 1}, {}, "reserve: 0 on rank 0, 1 on rank 1"),
        ({"snapshots": 4}, {}, "snapshots: 10 on rank 0, 4 on rank 1"),
        ({"max_batch": 1}, {}, "max_batch: 2 on rank 0, 1 on rank 1"),
        ({"overlap": False}, {}, "overlap: True on rank 0, False on rank 1"),
        ({"tracking": ms.Redirect(16)}, {}, r"tracking: Redirect\(every=\d+\) on rank 0, Redirect\(every=16\) on"),
        ({"pages": ms.Pages(size=4, count=20, per_row=8)}, {}, "pages: .*per_row=9.* on rank 0, .*per_row=8.* on"),
        ({"forward": ms.Forward(direct_hits=False)}, {}, "forward: .*direct_hits=True.*direct_hits=False"),
        ({"prefix": ms.Prefix(states=ms.policies.Lru())}, {}, r"states=\): ReturnRate\(\) on rank 0, Lru\(\) on"),
        ({"prefix": ms.Prefix(placement=ms.Ends(32))}, {}, r"placement=\): .*every=8192,.*every=32, .*\) on rank 1"),
        ({"prefix": ms.Prefix(most_states=3)}, {}, r"most_states=\): None on rank 0, 3 on rank 1"),
        ({"prefix": ms.Prefix(evict=False)}, {}, r"evict=\): True on rank 0, False on rank 1"),
        ({"sessions": ms.SessionLimits(share=0.25)}, {}, r"share=\): 0.5 on rank 0, 0.25 on rank 1"),
        ({}, {"model": "other"}, r"model=\): 'toy' on rank 0, 'other' on rank 1"),
        ({}, {"prefetch": ms.Prefetch(threshold=8)}, r"prefetch=\): .*threshold=4.*threshold=8"),
    ],
)  # fmt: skip
def test_ranks_of_other_settings_are_refused_and_told_which(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], below: dict[str, Any], says: str
) -> None:
    """Without the refusal, ranks would differ unnoticed: each decides by its own settings what to evict and to keep."""
    with pytest.raises(ms.ConfigurationError, match=says):
        second(monkeypatch, settings, below)


def test_ranks_may_differ_in_what_they_agree_on_or_decide_nothing_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory limits prefetches. Ranks may have different limits; the smallest one counts for all."""
    below = {"host_slots": 30, "write": "back", "staging": 3, "threads": 1, "reserve": 0.5, "store": MemoryStore()}
    settings = {"slots": np.int64(8), "debug": True, "journal": 5}
    ranks, mem = second(monkeypatch, settings, below)
    assert mem.tiers and mem.tiers.prefetcher
    limits = [told["limit"] for told in ranks.told]
    assert limits[0] < limits[1] and mem.tiers.prefetcher._settings.limit == limits[0]


def test_a_place_that_two_ranks_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same place, each rank would write and read the records of the other."""
    ranks = Line()
    monkeypatch.setattr(ranks, "gather", lambda text: [text, text])
    monkeypatch.setattr(manager, "Ranks", lambda group: ranks)
    with pytest.raises(ms.ConfigurationError, match=r"rank=\) \[0, 0\]: each needs a number of its own"):
        ranked(0, {}, {})


def test_the_text_of_a_setting_is_alike_in_every_process() -> None:
    assert said(Mine()) == said(Mine()) == "<Mine(alpha=1.0)>" != said(Mine(2.0))
    assert said(np.int64(3)) == "3" and said(object()) == said(object()) != said(Line())


@pytest.fixture
def agreed(monkeypatch: pytest.MonkeyPatch) -> ms.StateManager:
    """One of two ranks; the other rank always agrees. Host memory has a prompt of four pages and one token."""
    monkeypatch.setattr(manager, "Ranks", lambda group: None)
    mem = tiered(tiers={"rank": 0, "ranks": 2, "group": object()}, tracking=ms.Redirect(PAGE))
    turn(mem, PROMPT)
    mem.poll()
    mem.prefix.evict_states(99)
    return mem


def begun(mem: ms.StateManager, tokens: Sequence[int], **more: Any) -> int:
    """Returns the length that a request starts from."""
    (row,) = mem.admit([ms.Request("r", tokens=tokens, **more)])
    start = mem.info(row).length
    mem.end([row])
    return start


@pytest.mark.parametrize("gone", [False, True])
def test_what_was_agreed_on_stays_until_its_request_comes(agreed: ms.StateManager, gone: bool) -> None:
    """KV that the device had, and the prefetch left out, may go: every rank sees that, and starts without it."""
    mem, host = agreed, agreed.tiers.host
    if not gone:
        mem.prefix.evict_pages(99)
    one = fetch(mem, PROMPT)
    assert one.length == 4 * PAGE and one.kv_pages == (4 if gone else 0)
    host.states.evict(99)
    host.kv.evict(99)
    if gone:
        mem.prefix.evict_pages(99)
    assert begun(mem, PROMPT, fetch=one) == (0 if gone else 4 * PAGE)


def test_host_memory_without_an_agreement_is_not_used(agreed: ms.StateManager) -> None:
    agreed.prefix.evict_pages(99)
    assert begun(agreed, PROMPT) == 0
    agreed.tiers.cancel(fetch(agreed, PROMPT))  # the cancelled prefetch keeps nothing
    agreed.audit().raise_if_leaking()


def test_the_prefetch_of_another_prompt_or_manager_is_refused(agreed: ms.StateManager) -> None:
    mem, other = agreed, [*whole(2, 4), 7]
    mem.prefix.evict_pages(99)
    mine = fetch(mem, PROMPT)
    assert fetch(mem, PROMPT, "b").length == 0
    storing = tiered(tiers={"store": MemoryStore()})
    plain = on(Backend("reference"), LAYOUT, slots=4, max_requests=2, prefix=ms.Prefix(), page_size=PAGE)
    before = plain.stats()
    for of, given, says in (
        (mem, {"tokens": other, "fetch": mine}, "begun for other tokens"),
        (mem, {"tokens": PROMPT, "salt": "b", "fetch": mine}, "other tokens or another salt"),
        (mem, {"tokens": other, "fetch": "fetch"}, "is not what this manager"),
        (plain, {"tokens": PROMPT, "fetch": mine}, "this manager has no storage to fetch from"),
        (plain, {"fetch": mine}, "this manager has no storage to fetch from"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            of.admit([ms.Request("r", **given)])
    for call in (storing.tiers.ready, storing.tiers.cancel):
        for wrong in (mine, None):
            with pytest.raises(InvalidArgument, match="not what this manager's prefetch"):
                call(wrong)
    assert plain.stats() == before
    mem.tiers.cancel(mine)


def test_what_was_agreed_on_is_nothing_once_a_record_is_gone(agreed: ms.StateManager) -> None:
    agreed.prefix.evict_pages(99)
    host = agreed.tiers.host
    keys = agreed.tiers.keys.of(SaltedTokens(encode(PROMPT), None))
    hit = host.agreed_hit(4 * PAGE, keys, 1)
    assert hit is not None and len(hit.pages) == 3
    host.kv.evict(1)
    assert host.agreed_hit(4 * PAGE, keys, 1) is None
    assert host.agreed_hit(4 * PAGE, keys, 4) is not None, "the device has all KV"
    host.states.evict(99)
    assert host.agreed_hit(4 * PAGE, keys, 4) is None


@pytest.mark.parametrize("late", range(4))
def test_B63_what_was_agreed_on_is_pinned_before_anything_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Storage has two prompts, and host memory room for one.

    Storage answers for the second prompt in any of the polls around the poll that ends the first prefetch.
    """
    monkeypatch.setattr(manager, "Ranks", lambda group: None)
    place = {"rank": 0, "ranks": 2, "group": object(), "store": MemoryStore()}
    first = tiered(tiers=place)
    push_down(first, whole(1), whole(2))
    first.close()
    executor, prompts = ByHand(), ([*whole(1), 1], [*whole(2), 1])
    mem = tiered(tiers=place | {"host_slots": 1, "host_pages": 2, "executor": executor})
    fetches = [mem.prefetch(prompt) for prompt in prompts]
    held = [job for job in executor.jobs if not job.future.done()][1:]
    for poll in range(12):
        for job in [job for job in executor.jobs if not job.future.done()]:
            if (job not in held or poll >= late) and job.begin():
                job.finish()
        mem.poll()
    assert [one.length for one in fetches].count(2 * PAGE) >= 1
    for prompt, one in zip(prompts, fetches, strict=True):
        assert begun(mem, prompt, fetch=one) == one.length
    mem.audit().raise_if_leaking()

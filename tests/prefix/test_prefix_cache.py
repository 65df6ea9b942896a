"""The prefix cache keeps, finds and evicts the right states and pages, down to the bytes.

Pages hold 4 tokens. A turn of whole pages, such as `turn(T[:8])`, leaves one state, at its end (placement `Whole`).
"""

from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix import names
from memstate.prefix.policies import Lru, LruPages
from memstate.slots.journal import Change
from memstate.tokens import Tokens, encode
from tests.support.planes import every_strategy
from tests.support.serving import Server

T = [7 * n % 50 for n in range(60)]
SIZES = {"whole": True, "every": 64, "slots": 12, "rows": 2, "pages": 24}


def server(backend: Backend, name: str = "redirect", tombstones: bool = True, **more: object) -> Server:
    prefix = ms.Prefix(states=Lru(), pages=LruPages(tombstones=tombstones))
    return Server(backend, name, **(SIZES | {"prefix": prefix} | more))  # type: ignore[arg-type]


def matched(at: Server, tokens: list[int], salt: Hashable = None) -> tuple[int, int, dict[str, int], str]:
    match = at.mem.match(tokens, salt)
    assert sum(match.lost.values()) + match.length == match.tokens == len(tokens)
    assert (match.snapshot.length if match.snapshot else 0) == match.length <= match.evicted_length <= match.kv_length
    return match.length, match.kv_length, {why: n for why, n in match.lost.items() if n}, match.reason


@every_strategy
@pytest.mark.parametrize("together", [True, False], ids=["in one call", "in two"])
def test_B42_of_the_same_key_inserted_twice_one_state_stays(name: str, together: bool, backend: Backend) -> None:
    at = server(backend, name)
    rows = at.admit(ms.Request("a", tokens=T[:8]), ms.Request("b", tokens=T[:8]))
    at.run(rows, publish=False)
    first = at.slot(3 * rows[0].index)
    for ended in [rows] if together else [rows[:1], rows[1:]]:
        at.end(ended)
    at.look(idle=True)
    (state,) = at.states().values()
    assert (state.length, at.slot(state.register)) == (8, first)
    figures = at.mem.stats().prefix
    assert figures and (figures.inserted, figures.duplicates, figures.nodes, figures.pages) == (1, 1, 1, 2)
    assert (at.mem.free_slots, at.mem.free_pages) == (12 - 1, 24 - 2)


def test_B43_a_state_is_never_split(backend: Backend) -> None:
    at = server(backend, "none")
    assert at.turn(T[:16]) == 0
    slot = at.slot(at.states()[16].register)
    assert at.turn([*T[:8], *[99] * 4]) == 0  # parts from the first prompt in the middle of it
    at.look(idle=True)
    assert matched(at, [*T[:8], 1, 2])[:2] == (0, 8) and matched(at, [*T[:16], 1])[:2] == (16, 16)
    assert at.slot(at.states_by_prefix()[tuple(T[:16])].register) == slot and at.cache.tree.nodes == 3
    assert at.turn([*T[:16], 1]) == 16


@every_strategy
def test_B44_a_tombstone_is_revived(name: str, backend: Backend) -> None:
    at = server(backend, name)
    at.turn(T[:8])
    assert at.cache.evict_states(1) == 1 and at.mem.free_slots == 12
    assert matched(at, T[:9]) == (0, 8, {"no_sharing": 1, "evicted": 8}, "evicted")
    at.look(idle=True)
    pages = sorted(page for _, node in at.cache.tree.walk() for page in node.pages)
    assert at.turn(T[:8]) == 0  # at most 4 of 8 tokens can be a hit, so the branch point is at 4
    assert matched(at, T[:9]) == (8, 8, {"no_sharing": 1}, "no_sharing")
    assert sorted(page for _, node in at.cache.tree.walk() for page in node.pages) == pages
    assert set(at.states()) == ({8} if name == "none" else {4, 8}) and at.mem.free_pages == 22
    assert at.turn(T[:9]) == 8


def test_B45_a_leaf_that_loses_its_kv_loses_its_state(backend: Backend) -> None:
    at = server(backend)
    at.turn(T[:8])
    at.turn(T[:16])
    assert at.cache.evict_pages(1) == 2  # both pages of the leaf are evicted; its parent stays
    at.look(idle=True)
    assert matched(at, T[:17])[:2] == (8, 8) and at.mem.free_slots == 11
    assert at.cache.evict_pages(9) == 2 and not at.cache.tree.roots and at.mem.free_slots == 12


def test_B47_the_deepest_state_and_why_it_is_not_deeper(backend: Backend) -> None:
    at = server(backend, "none")
    prompt = [*T[:15], *[99] * 5]
    assert matched(at, prompt) == (0, 0, {"no_sharing": 20}, "no_sharing")
    assert [at.turn(T[:4]), at.turn(T[:8]), at.turn(T[:14])] == [0, 4, 8]  # the last turn leaves only KV
    assert matched(at, prompt) == (8, 12, {"no_sharing": 8, "no_snapshot": 4}, "no_snapshot")
    assert str(at.mem.match(prompt)) == "8 of 20 tokens by state, 12 by KV (8 no sharing, 4 no snapshot)"
    assert at.turn(T[:5]) == 4 and at.cache.evict_states(1) == 1
    assert matched(at, prompt) == (4, 12, {"no_sharing": 8, "evicted": 4, "no_snapshot": 4}, "evicted")
    assert at.cache.evict_states(1) == 1
    assert matched(at, prompt) == (0, 12, {"no_sharing": 8, "evicted": 8, "no_snapshot": 4}, "evicted")
    before = at.mem.stats()
    for length in range(1, 16):  # a match has whole pages only, and never the last token
        assert matched(at, T[:length])[:2] == (0, min(12, (length - 1) // 4 * 4))
    assert at.mem.stats() == before


def test_B48_a_hit_refreshes_only_the_state_it_uses(backend: Backend) -> None:
    at = server(backend)
    for end in (4, 8, 12):
        at.turn(T[:end])
    at.turn([99] * 8)
    assert at.turn(T[:13]) == 12  # the turn uses the state at 12, not the states at 4 and 8
    for tokens in (T[:5], T[:9]):
        at.mem.match(tokens)  # a match does not count as a use of the state
    assert at.cache.evict_states(3) == 3
    assert set(at.states_by_prefix()) == {tuple(T[:12])}


@every_strategy
def test_B53_equal_tokens_under_different_salts_never_match(name: str, backend: Backend) -> None:
    at = server(backend, name)
    assert at.turn(T[:8], salt="a") == 0
    for salt in ("b", None, "", ("a",), 1):
        assert matched(at, T[:9], salt) == (0, 0, {"no_sharing": 9}, "no_sharing")
    assert at.turn(T[:16], salt="b") == 0
    row = at.start([*T[:8], 5, 6], salt="b")  # salt "b" has KV at these tokens, but no state
    assert (at.mem.info(row).length, at.mem.info(row).next_boundary) == (0, 64 if name == "none" else 8)
    at.prefill(row)
    at.run([row])
    assert matched(at, T[:9], "a")[:2] == (8, 8) and matched(at, T[:17], "a")[:2] == (8, 8)
    assert matched(at, [*T[:8], 1], "b")[0] == (0 if name == "none" else 8)  # 8: the state at the branch point
    at.mem.end([row], keep="cache", tokens=[at.text[row]])
    assert at.turn([*T[:8], 5, 6], salt="a") == 8
    assert {salt for salt, _ in at.cache.tree.walk()} == {"a", "b"}


@pytest.mark.parametrize("call", ["publish", "end", "cancel"])
def test_tokens_that_are_not_the_rows_are_refused(call: str, backend: Backend) -> None:
    """If they were taken, a state would be found under tokens that it does not stand for."""
    at = server(backend)
    row = at.start(T[:9])
    at.run([row], publish=False)
    others = ([*T[:5], 99, *T[6:12]], T[4:9], [99, *T[:9]])
    step = at.step([row], run=False) if call == "cancel" else None
    before = (at.mem.stats(), at.mem.info(row).length)
    for wrong in others:
        with pytest.raises(ms.InvalidArgument, match="not those of its prompt"):
            if step:
                at.mem.cancel(step, keep="cache", tokens=[wrong])
            else:
                getattr(at.mem, call)([row], keep="cache", tokens=[wrong])
        assert (at.mem.stats(), at.mem.info(row).length) == before and at.mem.rows
    if step:
        at.mem.cancel(step, keep="cache", tokens=[T[:9]])
    else:
        at.end([row])  # the row ends with all its tokens
    assert at.mem.match(T[:9]).kv_length == 8


def test_a_prompt_need_not_be_handed_over_again(backend: Backend) -> None:
    """A publish while the prompt is read needs no tokens. An end right after the prompt needs none either."""
    sides = server(backend), server(backend)
    for side, again in zip(sides, (False, True), strict=True):
        row = side.start(T[:18])
        for end in (8, 16, 18):
            side.mem.settle(side.step_to([row], [end]))
            side.mem.publish([row], keep="cache", tokens=[T[:18]] if again else [None] if end == 8 else None)
        side.mem.end([row], keep="cache", tokens=[T[:18]] if again else None)
    assert matched(sides[0], T[:24]) == matched(sides[1], T[:24]) and matched(sides[0], T[:24])[0] == 16
    assert sides[0].mem.stats() == sides[1].mem.stats()


def plain() -> ms.StateManager:
    layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
    return ms.StateManager(
        layout, slots=8, max_requests=2, pages=ms.Pages(size=4), prefix=ms.Prefix(), backend="reference"
    )


def read_by(mem: ms.StateManager, tokens: Tokens, length: int = 16) -> ms.Row:
    """Returns a row that has read its prompt."""
    (row,) = mem.admit([ms.Request("a", tokens=tokens, length=16)])
    mem.settle(mem.plan([row], length - mem.info(row).length))
    return row


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_what_a_request_was_admitted_with_is_read_once(
    kind: Callable[[list[int]], Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    mem, given, read = plain(), kind(T[:16]), list[int]()
    monkeypatch.setattr(names, "encode", lambda tokens: read.append(len(tokens)) or encode(tokens))
    for tokens in (given, kind(T[:16]), given):
        mem.end([read_by(mem, given)], keep="cache", tokens=[tokens])
    assert read == [16, 0, 16, 16, 16, 0] and mem.match([*T[:16], 1]).length == 16


def test_a_list_that_has_changed_since_its_admission_counts_behind_its_prompt() -> None:
    mem, given = plain(), T[:12]
    row = read_by(mem, given)
    given[:] = [99] * 12 + T[12:16]
    mem.end([row], keep="cache", tokens=[given])
    assert mem.match([*T[:16], 1]).length == 16  # the first twelve tokens are those of the admission
    row = read_by(mem, given)
    del given[8:]
    with pytest.raises(ms.InvalidArgument, match="8 tokens, and 16 are confirmed"):
        mem.end([row], keep="cache", tokens=[given])


def test_what_came_after_a_prompt_must_be_handed_over(backend: Backend) -> None:
    at = server(backend)
    row = at.start(T[:9])
    at.prefill(row)
    at.run([row])
    [nameless] = at.mem.admit([ms.Request("nameless", length=8)])
    before = at.mem.stats()
    for call in (at.mem.end, at.mem.publish):
        with pytest.raises(ms.InvalidArgument, match="9 tokens, and 10 are"):
            call([row], keep="cache")
    for call in (at.mem.end, at.mem.publish):
        with pytest.raises(ms.InvalidArgument, match="needs its tokens, and none are known"):
            call([row, nameless], keep="cache", tokens=[at.text[row], None])
    assert at.mem.stats() == before
    at.mem.end([row], keep="cache", lengths=[9])
    at.mem.end([nameless])
    assert at.mem.match(T[:9]).kv_length == 8


def test_one_page_that_a_handle_has_too_is_no_room(backend: Backend) -> None:
    at = server(backend, pages=8)
    row = at.start(T[:8])
    at.prefill(row, publish=False)
    (handle,) = at.mem.publish([row])
    at.end([row])
    assert handle and list(handle.pages) == [page for _, node in at.cache.tree.walk() for page in node.pages]
    before = (replace(at.mem.stats(), short_of_pages=1), at.cache.tree.total_pages)
    with pytest.raises(ms.OutOfPages):
        at.mem.admit([ms.Request("b", length=28)])  # the request needs seven pages, six are free
    stats, total = before
    assert (at.mem.stats(), at.cache.tree.total_pages) == (replace(stats, short_of_pages=1), total)
    at.mem.drop([handle])
    (row,) = at.mem.admit([ms.Request("b", length=28)])


def test_the_journal_names_every_change_of_owners(backend: Backend) -> None:
    at = server(backend, journal=50, direct_hits=False, overlap=False)
    row = at.start(T[:8])
    live = 3 * row.index
    at.prefill(row, publish=False)
    at.end([row])
    (kept,) = at.states().values()
    at.cache.evict_states(1)
    changes: list[Change] = at.mem.journal.changes
    assert [change.serial for change in changes] == list(range(1, len(changes) + 1))
    told = [(change.what, change.register, change.source, change.label) for change in changes]
    assert told == [("claim", live, 0, 0), ("move", kept.register, live, 8), ("release", kept.register, 0, 8)]
    assert changes[0].owner == changes[1].source_owner == f"row {row.index} (request 'of 8') live"
    assert str(kept.register) in changes[2].owner
    # move and release share the next packet
    assert [change.submit for change in changes] == [1, 2, 2] and at.mem.stats().packets == 1
    for n in range(60):
        at.mem.end([at.start([n])])
    assert len(at.mem.journal.changes) == 50 and at.mem.journal.changes[-1].serial == 3 + 2 * 60

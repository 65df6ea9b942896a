"""The prefix cache keeps, finds and evicts the right states and pages, and who gives way to whom.

The model judges each call: see `tests/proof/stateful/script.py`. Pages hold 4 tokens.
"""

from typing import Any

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.requests.tracking.mirror import Mirror
from tests.proof.stateful.script import ALL, COPIED, Play, script

T = [7 * n % 50 for n in range(60)]
X, Y, Z, W = ([100 * n + i for i in range(9)] for n in range(1, 5))
SNAPSHOTS = ("ping-pong", "lazy", "redirect")
PAGED = {"prefix": True, "every": 64, "page_size": 4, "rows": 2, "pages": 24}
HERE = {**PAGED, "slots": 12}
ROOM = {**PAGED, "every": 8, "rows": 4, "pages": 30}
HITS = {**PAGED, "strategy": (*ALL, COPIED), "rows": 4, "pages": 30}


def fill(play: Play, *texts: list[int]) -> None:
    """Fills the cache with one state of each text, the oldest first."""
    for text in texts:
        play.turn(text[: len(text) // 4 * 4], prompt=1)


@script(strategy=ALL, **HERE, at=("together", "in two"))
def test_B42_of_the_same_key_inserted_twice_one_state_stays(play: Play) -> None:
    rows = play.admit(T[:8], T[:8])
    for row in rows:
        play.run(row, T[:8])
    for ended in [rows] if play.at == "together" else [rows[:1], rows[1:]]:
        play.end(*ended)
    play.reached("duplicates")
    play.turn(T[:10])


@script(strategy=SNAPSHOTS, overlap=(False, True), prefix=True)
def test_B42_of_two_that_publish_the_same_on_their_way_one_gives_its_slot_back(play: Play) -> None:
    rows = play.admit(T[:1], T[:1])
    for row in rows:
        play.run(row, T[:15], publish=True)
    play.reached("duplicates")


@script(strategy=ALL, **HERE)
def test_B43_a_state_is_never_split(play: Play) -> None:
    play.turn(T[:16])
    play.turn([*T[:8], *[99] * 4])  # parts from the first prompt in the middle of it
    play.match([*T[:8], 1, 2])
    play.turn([*T[:17], 1])
    play.turn([*T[:8], 1])
    play.reached("hit_tokens")


@script(strategy=ALL, **HERE, tombstones=(True, False))
def test_B44_a_tombstone_is_revived(play: Play) -> None:
    play.turn(T[:8])
    play.evict(states=2)
    play.match(T[:10])
    play.turn(T[:8])
    play.match(T[:10])
    play.turn(T[:9])
    play.reached("hit_tokens")


@script(strategy="none", **HERE, tombstones=(True, False))
def test_B44_kv_that_never_had_a_state_stays_without_tombstones(play: Play) -> None:
    play.turn(T[:9])
    play.match(T[:10])
    play.turn(T[:10])
    play.reached("lost_no_snapshot")


@script(strategy="redirect", **HERE)
def test_B45_a_leaf_that_loses_its_kv_loses_its_state(play: Play) -> None:
    fill(play, T[:8], T[:16])
    play.evict(pages=1)  # both pages of the leaf are evicted; its parent stays
    play.match(T[:18])
    play.evict(pages=9)
    play.reached("evicted_states", "evicted_pages")


@script(**{**HITS, "strategy": ("redirect", COPIED)}, slots=3)
def test_B46_a_pinned_state_is_never_evicted_and_pins_balance(play: Play) -> None:
    fill(play, X, Y)
    (row,) = play.admit([*X[:8], 1])
    play.reached("hit_tokens")
    bad = ([row, row], [ms.Row(row.index, row.generation - 1)], ["row"])
    for rows in bad:
        play.refuses(ms.MemstateError, lambda rows=rows: play.mem.plan(rows))
    play.admit(*[[n] for n in range(3)])
    play.reached("OutOfSlots")
    for node in play.mem.prefix.stated():
        play.refuses(ms.InvalidArgument, lambda node=node: play.mem.drop([node.snapshot]), "the prefix cache's")
    play.evict(states=9)
    play.step([row], 1)
    play.admit([7])
    play.match(X)


@script(strategy=ALL, **HERE)
def test_B47_the_deepest_state_and_why_it_is_not_deeper(play: Play) -> None:
    prompt = [*T[:15], *[99] * 5]
    play.match(prompt)
    for length in (4, 8, 14, 5):
        play.turn(T[:length])
        play.match(prompt)
    for _ in range(2):
        play.evict(states=1)
        play.match(prompt)
    for length in range(1, 16):  # a match has whole pages only, and never the last token
        play.match(T[:length])
    play.reached("evicted_states", "hit_tokens")


@pytest.mark.script
def test_B47_a_match_says_why_it_is_not_longer(backend: Backend) -> None:
    play = Play(backend, strategy="none", **HERE)
    fill(play, T[:8])
    play.turn(T[:14])
    prompt = [*T[:15], *[99] * 5]
    assert str(play.mem.match(prompt)) == "8 of 20 tokens by state, 12 by KV (8 no sharing, 4 no snapshot)"


@script(strategy=ALL, **HERE)
def test_B48_a_hit_refreshes_only_the_state_it_uses(play: Play) -> None:
    fill(play, T[:4], T[:8], T[:12], [99] * 8)
    play.turn(T[:13])  # the turn uses the state at 12, not the states at 4 and 8
    play.match(T[:5])  # a match does not count as a use of the state
    play.match(T[:9])
    for _ in range(4):
        play.evict(states=1)
    play.reached("evicted_states", "hit_tokens")


@script(strategy=ALL, **HERE)
def test_B53_equal_tokens_under_different_salts_never_match(play: Play) -> None:
    play.turn(T[:8], salt="a")
    for salt in ("b", None, "", ("a",), 1):
        play.match(T[:9], salt)
    play.turn(T[:16], salt="b")
    play.turn([*T[:8], 5, 6], salt="b")  # salt "b" has KV at these tokens, but perhaps no state
    play.match(T[:9], "a")
    play.match([*T[:8], 1], "b")
    play.turn([*T[:8], 5, 6], salt="a")
    play.reached("hit_tokens")


# Marks of a prompt: where another one parts from it, and at its end

CASES = tuple({"every": every, "kv": kv, "length": length} for every, kv, length in (
    (64, 9, 22), (8, 13, 22), (8, 9, 22), (8, 13, 18), (8, 9, 16), (8, 9, 17), (64, 13, 15), (4, 13, 14), (64, 9, 13),
    (64, 9, 16), (64, 9, 12), (64, 0, 3),
))  # fmt: skip


@script(strategy=SNAPSHOTS, overlap=(False, True), **{**HERE, "slots": 14}, of=CASES)
def test_B49_junction_and_prompt_end_are_both_taken(play: Play) -> None:
    kv, length = play.kv, play.length
    if kv:
        play.turn(T[:kv])
        play.evict(states=99)
    (row,) = play.admit(T[:length])
    play.run(row, T[: length + 1], publish=True)
    play.end(row)
    play.turn(T[: length + 2])
    play.reached("hit_tokens")


@script(strategy=SNAPSHOTS, **{**HERE, "slots": 14})
def test_B49_a_row_that_reads_keeps_states_where_another_prompt_parts(play: Play) -> None:
    (row,) = play.admit(T[:30])
    play.step([row], 6)
    play.refuses(
        ms.InvalidArgument, lambda: play.mem.snapshot_at(row, [-4]), r"snapshot_at=\[-4\]: expected lengths in tokens"
    )
    play.ask(row, [4, 12, 20])  # 4 is too late
    play.run(row, T[:31], publish=True)
    for tokens in ([*T[:12], 1], [*T[:23], 1], [*T[:11], 1]):
        play.match(tokens)


# Room: requests get it first, then due snapshots, then cached states; no more is evicted than is missing


@script(strategy=SNAPSHOTS, **{**HERE, "pages": 8, "every": 4})
def test_one_page_that_a_handle_has_too_is_no_room(play: Play) -> None:
    (row,) = play.admit(T[:8])
    play.run(row, T[:9])
    snaps = play.publish(row, handles=True)
    play.end(row)
    play.admit(None, length=32)
    play.reached("OutOfPages", snapshots=len(snaps))
    play.drop(*snaps)
    play.admit(None, length=32)


@script(strategy="redirect", **{**HERE, "pages": 10, "rows": 4})
def test_pages_come_from_the_leaves_that_were_followed_least_recently(play: Play) -> None:
    fill(play, X[:8], Y[:8], Z[:8])
    play.match(X)  # a match does not count as a use
    play.turn([*X[:8], 1])
    play.end(*play.admit([*Y[:4], 1]), how="release")  # a prompt that ends inside of a leaf is a use of the leaf
    (row,) = play.admit(range(500, 517))
    for length in (20, 28, 44):
        play.extend(row, length)
    play.admit([*X[:8], *range(3)])  # this row shares two pages, which its lease keeps
    play.extend(row, 32)
    play.reached("OutOfPages", "evicted_pages")


@script(strategy="redirect", **HERE)
def test_what_is_left_of_a_leaf_is_as_old_as_before(play: Play) -> None:
    fill(play, X, Y)
    play.evict(states=2)
    for _ in range(4):
        play.evict(pages=1)
        play.match(X)
        play.match(Y)
    play.reached("evicted_states", "evicted_pages")


@script(strategy="redirect", **HERE)
def test_a_leaf_that_loses_its_child_is_as_old_as_its_last_use(play: Play) -> None:
    fill(play, T[:8], T[:16], X)
    play.turn([*T[:8], 99])
    play.evict(states=9)
    for _ in range(3):
        play.evict(pages=2)
        play.match(T[:17])
        play.match(X)
    play.reached("evicted_states", "evicted_pages", "hit_tokens")


@script(**ROOM, of=({"strategy": "lazy", "slots": 5}, {"strategy": "redirect", "slots": 4}))
def test_B24a_one_cached_state_goes_for_the_snapshot_that_is_due(play: Play) -> None:
    fill(play, X, Y, Z)
    (row,) = play.admit([9] * 3)
    play.run(row, [9] * 18)
    play.reached("evicted_states", "snapshots")
    play.end(row)


@script(strategy="lazy", slots=5, **ROOM, evict=(True, False))
def test_B24b_nothing_cached_goes_where_that_is_not_wanted(play: Play) -> None:
    fill(play, X, Y, Z)
    (row,) = play.admit([9] * 3)
    while play.mem.info(row).length < 17:
        play.step([row], 1 if play.mem.info(row).length else 7, limit=0 if play.settings.evict else 5)
    play.land()
    play.reached("refused_claims")


@pytest.mark.script
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_step_without_a_boundary_does_not_ask_what_a_full_pool_lacks(
    name: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache the pool is nearly always full, so only steps that may take snapshots count the missing slots."""
    play = Play(backend, **{**PAGED, "every": 8}, strategy=name, slots={"ping-pong": 2, "lazy": 2, "redirect": 1}[name])
    (row,) = play.admit([900], length=20)
    assert play.mem.free_slots == 0
    asked: list[int] = []
    claims = Mirror.claims

    def counted(mirror: Mirror, rows: Any, length: Any, *more: Any) -> int:
        asked.extend(length.tolist())
        return claims(mirror, rows, length, *more)

    monkeypatch.setattr(Mirror, "claims", counted)
    for _ in range(16):
        play.mem.settle(play.mem.plan([row]))
    assert asked == ([8] if name == "redirect" else [7, 15])


@script(strategy="none", prefix=True, slots=6, pages=0, pages_per_row=0, snapshots=1)
def test_a_node_stays_while_a_register_is_freed_for_its_state(play: Play) -> None:
    """The only register holds the state of a lower node.

    Once that state is evicted, nothing else keeps the upper node.
    """
    (row,) = play.admit([1, 2, 3, 4])
    play.run(row, [1, 2, 3, 4])
    play.turn([1, 2, 3, 4, 5, 6, 7, 8])
    play.end(row)
    play.match([1, 2, 3, 4, 9])
    play.reached("evicted_states")


# Hits: a state is read directly or copied, and is not evicted meanwhile


@script(**HITS, slots=(4, 5))
def test_B50_the_source_of_a_hit_is_not_evicted_for_it(play: Play) -> None:
    fill(play, X, Y, Z, W)
    (row,) = play.admit([*X[:8], 5, 6])
    for length in (9, 10, 12):
        play.run(row, [*X[:8], 5, 6, 7, 8][:length])
    play.end(row, how="release")
    play.turn([*X[:8], 7])


@script(**{**HITS, "strategy": ("redirect", COPIED)}, slots=2)
def test_B50_a_state_that_two_requests_start_from_is_not_taken_over(play: Play) -> None:
    fill(play, X)
    play.admit([*X[:8], 1], [*X[:8], 2])
    play.reached("OutOfSlots")
    play.admit(None)
    (row,) = play.admit([*X[:8], 1])
    play.reached(taken_over=not play.mem.prefix.states)
    play.step([row], 1)


@script(**HITS, slots=6)
def test_B50_a_row_given_up_before_its_first_step_lets_go(play: Play) -> None:
    fill(play, X, Y)
    row, other = play.admit([*X[:8], 1], [*X[:8], 2])
    play.end(row, how="release")
    play.evict(states=9)
    play.end(other)
    (row,) = play.admit([*X[:8], 3])
    play.cancel(play.step([row], run=False))
    play.turn([*X[:8], 4])
    play.reached("evicted_states", "hit_tokens")


REFUSED = {"OutOfRows": ([*X, 1], [*Y, 2], [*X, 3], [*Z, 3], [4], [5]),
           "OutOfSlots": ([*X, 1], [*Y, 2], [*Z, 3], *([n] for n in range(6))),
           "OutOfPages": ([*X, *range(40)], [*Y, *range(33)])}  # fmt: skip


@script(**{**HITS, "pages": 24, "rows": 6}, slots=8, at=("OutOfRows", {"at": "OutOfSlots", "rows": 11}, "OutOfPages"))
def test_B50_a_refusal_gives_pin_and_lease_and_slot_back(play: Play) -> None:
    """If evictions would free too little, nothing is evicted."""
    fill(play, X, Y, Z)
    (running,) = play.admit([*Z, 5])
    play.step([running], 1)
    for _ in range(2):
        play.admit(*REFUSED[play.at])
    for row in play.admit(REFUSED[play.at][0]):
        play.step([row, running], 1)
    play.reached("hit_tokens", play.at)


# A request that hits the cache, or shares a batch, has the states and tokens that it has alone

NEAR = sorted({n + d for n in (4, 6, 8, 16, 24) for d in (-1, 0, 1)})  # lengths around pages, chunks and boundaries
ALIKE = {**PAGED, "every": 8, "rows": 5, "pages": 200}


@script(strategy=ALL, **ALIKE, slots=60)
def test_B51_every_length_around_pages_chunks_and_boundaries(play: Play) -> None:
    """Serves prompts with the same beginning, one of each length, one after the other. There is room for everything."""
    for length in NEAR:
        for goal in (1, 2):
            play.match(T[:length])
            play.turn(T[: length + goal], prompt=length, most=6)
    play.reached("hit_tokens")


@script(strategy=ALL, overlap=(False, True), **ALIKE, slots=20)
def test_B52_prompts_packed_into_one_batch_have_the_states_they_have_alone(play: Play) -> None:
    """The batch mixes hits and misses, equal and different prompts, chunks of different lengths, and padding."""
    play.turn(T[:16])
    texts = [[*T[:16], 1, 2, 3], T[:11], T[:11], [n + 1 for n in T[:23]], [*T[:16], 4]]
    rows = play.admit(*texts)
    play.reached("hit_tokens")
    play.run_all(rows, texts, most=6)
    play.end(*rows)


@pytest.mark.script
def test_a_state_that_recover_loses_counts_as_evicted(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """No packet has told the device of the state when a call is interrupted."""
    play = Play(backend, strategy="redirect", **{**HERE, "slots": 1})
    fill(play, X)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(play.mem.prefix.settings.states, "victims", lambda: 1 / 0)
        play.mem.admit([ms.Request("a")])
    play.mem.recover()
    match = play.mem.match(X)
    assert (match.length, match.evicted_length) == (0, 8)

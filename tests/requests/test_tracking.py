"""When each strategy takes a snapshot, and what requests leave when they end. A boundary is every 4 tokens."""

from collections.abc import Callable

import pytest

import memstate as ms
from tests.proof.stateful.script import ALL, Play, script
from tests.support.build import build
from tests.support.planes import LAYOUT

T = list(range(1, 40))
TRACKING = ALL[1:]
BARE = {"pages": 0, "page_size": 1, "pages_per_row": 0}  # the engine keeps the KV


@script(strategy=ALL, case=BARE | {"pages": 4, "pages_per_row": 2})
def test_B15_a_request_of_one_token_is_no_padding(play: Play) -> None:
    (row,) = play.admit(None, length=1)
    play.step([None, row], ended=[row])
    play.end(row, how="publish")


@script(strategy=ALL, pad=(0, -1), case=BARE)
def test_D30_pad_stands_where_there_is_no_slot(play: Play) -> None:
    a, b = play.admit(None, None)
    for _ in range(5):
        play.step([None, a, None, b])


@pytest.mark.parametrize("pad", [1, -2, True, 0.0, None, "0"])
def test_D30_pad_is_null_or_minus_one(pad: object) -> None:
    with pytest.raises(ms.ConfigurationError, match=r"pad=.*expected 0, the null slot, or -1"):
        ms.Forward(pad=pad)  # type: ignore[arg-type]


@script(strategy=ALL, every=16, slots=6, case=BARE)
def test_B18_chunks_of_a_prefill_keep_slots_and_claim_nothing(play: Play) -> None:
    (row,) = play.admit(None)
    for chunk in (5, 1, 6, 3):
        play.step([row], chunk)


@script(strategy=ALL, direct_hits=(False, True), case=BARE)
def test_B20_a_fresh_state_is_zero_and_a_resumed_one_is_not_zeroed(play: Play) -> None:
    (row,) = play.admit(None)
    play.run(row, T[:5])
    (snap,) = play.end(row, how="publish")
    rows = play.admit(None, None, resume=snap)
    play.drop(snap)  # it stays until its last reader has read it
    play.drop(snap)
    for row in rows:
        play.step([row])
    play.reached("StaleHandle", "zeroed")


@script(strategy=TRACKING, overlap=(False, True), slots=12, rows=2, case=BARE)
def test_B21_B23_lanes_are_claimed_at_boundaries_and_given_back(play: Play) -> None:
    rows = play.admit(None, None)
    for _ in range(17):
        play.step(rows)
    play.reached("snapshots")


@script(strategy="ping-pong", lane_count=2, case=BARE)
def test_B22_ping_pong_alternates_and_touches_lanes_at_boundaries_only(play: Play) -> None:
    (row,) = play.admit(None)
    for _ in range(17):
        play.step([row])
    play.reached("snapshots")


@script(strategy=TRACKING, slots=16, rows=2, overlap=True, case=BARE)
def test_B26_overlap_loses_nothing_and_overwrites_nothing_published(play: Play) -> None:
    rows = play.admit(None, None)
    for _ in range(17):
        play.step(rows)
        play.publish(*rows, handles=True)
    play.reached("published")


@script(strategy=ALL, overlap=True, tokens=(2, 6, 7), late=(False, True), case=BARE)
def test_B27_B28_a_dead_step_leaves_the_newest_snapshot_that_is_real(play: Play) -> None:
    (row,) = play.admit(None)
    play.run(row, T[: play.tokens])
    play.step([row])
    play.step([row], ended=[row])
    if play.late:
        play.settle()
    play.end(row, how="publish")


@script(strategy=ALL, page_size=4, pages=6)
def test_B28_nothing_shorter_than_a_page_is_published(play: Play) -> None:
    (row,) = play.admit(None, length=3)
    play.run(row, T[:3])
    play.publish(row, handles=True)
    play.end(row, how="publish")


@script(strategy=ALL, overlap=(False, True), how=("release", "publish"), slots=8, rows=2, pages=14)
def test_B29_a_request_can_end_at_any_point(play: Play) -> None:
    """The pages hold 2 tokens. A later request goes on from what the ended one has published, in the same row."""
    for steps in (0, 1, 4, 5, 6, 8, 9):
        (row,), (other,) = play.admit(None, length=12, snapshot_at=[6]), play.admit(None, length=2)
        for _ in range(steps):
            play.step([None, row])
        snaps = play.end(row, how=play.how)
        (again,) = play.admit(None, length=12, resume=snaps[0] if snaps else None)
        play.step([other, again])
        play.end(again, other, how="release")
        play.drop(*snaps)


@script(strategy=TRACKING, case=BARE)
def test_B29a_a_wanted_length_is_a_boundary_once(play: Play) -> None:
    (row,) = play.admit(None, snapshot_at=[6])
    for _ in range(9):
        play.step([row])
        play.publish(row, handles=True)
    play.reached("snapshots", "published")


@script(dead=(False, True), strategy="lazy", overlap=True, slots=2, case=BARE)
def test_B25_an_overwritten_lane_counts_only_if_its_step_was_real(play: Play) -> None:
    (row,) = play.admit(None)
    play.run(row, T[:6])
    play.step([row])
    play.step([row], ended=[row] if play.dead else [])
    play.settle([row])
    play.end(row, how="publish")


@script(strategy="lazy", slots=8, case=BARE)
def test_B30_a_row_that_is_at_no_boundary_claims_nothing(play: Play) -> None:
    decoding, filling, waiting = play.admit(None, None, None)
    for _ in range(7):
        play.step([decoding, waiting])
    play.step([filling], 4)
    play.step([filling, decoding], [3, 1])


@script(strategy=TRACKING, case=BARE)
def test_B31_the_cache_gets_the_tracked_slot_and_the_row_goes_on_with_another(play: Play) -> None:
    (row,) = play.admit(None)
    play.publish(row, handles=True, strict=True)
    play.run(row, T[:5])
    play.publish(row, handles=True, strict=True)
    play.publish(row, handles=True, strict=True)
    play.publish(row, handles=True)
    play.run(row, T[:9])
    play.reached("InvalidArgument", "published")


@script(strategy=TRACKING, in_place=(False, True), overlap=(False, True), case=BARE)
def test_B32_B36_a_snapshot_costs_one_copy_in_place_and_none_under_redirect(play: Play) -> None:
    a, b = play.admit(None, None)
    for _ in range(9):
        play.step([a, None, b])
    play.land()
    play.publish(a, b, handles=True)
    play.reached("snapshots")


@script(strategy=TRACKING, every=8, case=((6, 4), (6, 1), (8, 1)))
def test_B33_accepted_tokens_that_cross_a_multiple_leave_a_snapshot_of_it(play: Play) -> None:
    before, more = play.case
    (row,) = play.admit(None)
    play.run(row, T[:before])
    play.run(row, T[: before + more])
    play.publish(row, handles=True)


@script(strategy=ALL, overlap=(False, True), most=(6, 99), case=BARE)
def test_B34_a_key_below_the_newest_snapshot(play: Play) -> None:
    """A length above the newest real state changes nothing: with overlap, the last step is dead."""
    (row,) = play.admit(None)
    play.run(row, T[:10])
    play.step([row])
    play.step([row], ended=[row])
    play.end(row, how="publish", lengths=play.most)


@script(strategy="redirect", direct_hits=(False, True), overlap=(False, True), case=BARE)
def test_B36a_redirect_takes_no_snapshot_of_what_it_was_given(play: Play) -> None:
    (row,) = play.admit(None)
    play.run(row, T[:5])
    (snap,) = play.end(row, how="publish", lengths=4)
    (again,) = play.admit(None, resume=snap)
    for _ in range(5):
        play.step([again])
    play.reached("snapshots")


@script(strategy=ALL, overlap=(False, True), tokens=(6, 7, 8), case=BARE)
def test_B36b_a_cancelled_step_leaves_no_label(play: Play) -> None:
    a, b = play.admit(None, None)
    play.step([a, b], 2)
    play.run(a, T[: play.tokens])
    play.cancel(play.step([a, None, b], run=False), how="publish")


@script(strategy=ALL, case=BARE)
def test_G4_no_answer_depends_on_fresh_or_freed_memory(play: Play) -> None:
    for _ in range(3):
        play.turn(T[:8], how="publish")
        play.drop(*play.machine.snaps)
        play.submit()  # every slot is free, and the model fills it with rubbish


@script(strategy=("ping-pong", "lazy"), tail=3, tails=True, overlap=True, slots=5, rows=6, case=BARE)
def test_T9_a_lane_of_a_late_step_is_nobody_elses_before_its_forward(play: Play) -> None:
    (row,) = play.admit(None)
    play.step([row], 3)
    play.land()
    play.step([row], 3, drafts=2, accepted=[3])
    late = play.step([row], 1, run=False)
    play.settle(written=True)
    snaps = play.publish(row, handles=True)
    play.drop(*snaps)
    others = play.admit(*[None] * (play.mem.free_slots // 2))
    play.submit()
    play.launch(late)
    play.settle()
    play.step(others)
    play.reached("published")


@script(strategy=("lazy", "redirect"), overwrite=False, dropped=(False, True), slots=9, rows=8, case=BARE)
def test_B24_boundaries_proceed_whose_shortfall_was_dropped(play: Play) -> None:
    rows, snaps = play.admit(None, None), []
    for _ in range(4 if play.settings.strategy == "redirect" else 7):
        play.step(rows)
    while more := play.admit(None):  # until snapshots of other requests fill the pool
        play.step(more)
        snaps += play.end(*more, how="publish")
    play.lacks(rows)
    play.drop(*snaps[: play.mem.shortfall(rows) if play.dropped else 0])
    play.lacks(rows)
    play.step(rows)
    play.reached("OutOfSlots", "snapshots" if play.dropped else "refused_claims")


CONFIGURATIONS: dict[str, tuple[Callable[[], ms.Tracking], dict[str, int]]] = {
    "every=6 is no multiple of 4: a snapshot fills whole KV pages": (
        lambda: ms.Redirect(6),
        {"page_size": 4, "pages": 8, "pages_per_row": 4},
    ),
    "every=0": (lambda: ms.PingPong(0), {}),
    "every=-4": (lambda: ms.NoTracking(-4), {}),
    "every=2.5": (lambda: ms.Redirect(2.5), {}),  # type: ignore[arg-type]
    "one lane with overlap": (lambda: ms.PingPong(4, lane_count=1), {"overlap": True}),
    "lane_count=3": (lambda: ms.PingPong(4, lane_count=3), {}),
    "lane_count=0": (lambda: ms.PingPong(4, lane_count=0), {"overlap": False}),
    "depth": (lambda: ms.LazyPingPong(4), {"overlap": 2}),
    "expected NoTracking": (lambda: "redirect", {}),  # type: ignore[return-value, dict-item]
    "max_requests=0": (lambda: ms.Redirect(4), {"max_requests": 0}),
    "preallocated=-1": (lambda: ms.Redirect(4), {"preallocated": -1}),
    "max_batch=0": (lambda: ms.Redirect(4), {"max_batch": 0}),
    "snapshots=-1": (lambda: ms.Redirect(4), {"snapshots": -1}),
    "size=0": (lambda: ms.Redirect(4), {"page_size": 0}),
    "give count and per_row": (lambda: ms.Redirect(4), {"pages": 8}),
}


@pytest.mark.parametrize("reason", CONFIGURATIONS)
def test_B35_what_cannot_work_is_refused_at_construction(reason: str) -> None:
    maker, settings = CONFIGURATIONS[reason]
    with pytest.raises(ms.ConfigurationError, match=reason):
        build(LAYOUT, tracking=maker(), **({"slots": 16, "max_requests": 4, "backend": "reference"} | settings))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "tracking",
    [ms.PingPong(4, lane_count=2), ms.NoTracking(4), ms.PingPong(4), ms.LazyPingPong(4), ms.Redirect(4)], ids=repr,
)  # fmt: skip
def test_B35_what_works_is_accepted(tracking: ms.Tracking, overlap: bool) -> None:
    mem = build(LAYOUT, slots=16, max_requests=4, tracking=tracking, overlap=overlap, backend="reference")
    (row,) = mem.admit([ms.Request("a")])
    assert mem.info(row).slots <= tracking.most_slots(overlap)

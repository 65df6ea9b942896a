"""In the gap between the plan of a step and its forward, no call changes the owner of a slot that the step names."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.script import ALL, Play, script
from tests.support.planes import every_strategy
from tests.support.tiered import Tiered, settle, whole

CALLS = ("submit", "check", "audit", "picture", "poll")  # calls that send a packet or look at the device
BARE = {"pages": 0, "page_size": 1, "pages_per_row": 0}  # the engine keeps the KV


def given_up(play: Play, *more: None) -> tuple[object, list[object]]:
    """Returns an open step whose only row was ended after the plan, and further rows, which are in no step."""
    a, *others = play.admit(None, *more)
    step = play.step([a], run=False)
    play.end(a, how="release", land=False)
    return step, others


@script(strategy=ALL, call=CALLS, overlap=True, slots=7, case=BARE)
def test_G1_a_row_given_up_in_the_gap_keeps_its_slot_until_the_forward(play: Play) -> None:
    step, _ = given_up(play)
    call = getattr(play, play.call)
    call()
    b, c = play.admit(None, None)
    play.read_slots(b, c)
    call()
    play.end(c, how="release", land=False)
    call()
    play.launch(step)
    play.step([b])
    play.reached("zeroed")


@script(strategy="redirect", how=("plan", "settle", "cancel", "tell"), overlap=(False, True), slots=2, case=BARE)
def test_G1_what_waits_is_sent_once_the_forward_is_in_order(play: Play) -> None:
    step, (b,) = given_up(play, None)
    play.submit()
    play.read_slots(b)
    if play.how == "cancel":
        play.cancel(step)
        return
    play.launch(step, tell=play.how == "tell")
    if play.how == "plan" and play.overlap:
        play.step([b])
    play.land()


@script(strategy="redirect", overlap=True, case=BARE)
def test_G1_an_older_step_that_is_settled_says_nothing_of_the_newest(play: Play) -> None:
    (a,) = play.admit(None)
    first = play.step([a])
    second = play.step([a], run=False)
    play.settle([a])
    play.end(a, how="release", land=False)
    play.submit()
    play.refuses(ms.StaleHandle, lambda: play.mem.submit(first.step))
    play.launch(second, tell=True)
    play.refuses(ms.InvalidArgument, lambda: play.mem.submit("step"))
    play.settle()
    (b,) = play.admit(None)
    first, second = play.step([b]), play.step([b], run=False)
    play.refuses(ms.InvalidArgument, lambda: play.mem.submit(first.step), r"comes first \(newest unsettled\)")
    play.launch(second)


@script(strategy="redirect", overlap=True, case=BARE)
def test_G1_a_slot_that_is_not_waited_for_is_read_back_at_once(play: Play) -> None:
    a, b = play.admit(None, None)
    step = play.step([a], run=False)
    play.read_slots(a, b)
    play.end(b, how="release", land=False)
    play.submit()
    play.launch(step)


@script(strategy="redirect", overlap=True, slots=3, case=BARE)
def test_B1_ids_in_hand_do_not_hang_on_a_release_that_waits(play: Play) -> None:
    step, _ = given_up(play, None)
    play.claim(2)
    play.claim(1)
    (c,) = play.admit(None)
    play.claim(1)
    play.check()
    play.launch(step, tell=True)
    play.read_slots(c)
    play.reached("OutOfSlots")


@script(strategy="ping-pong", overlap=True, slots=9, case=BARE)
def test_B36b_a_step_is_not_cancelled_once_what_it_computes_was_published(play: Play) -> None:
    (a,) = play.admit(None)
    step = play.step([a], 4, run=False)
    play.publish(a, handles=True)
    play.cancel(step)
    play.launch(step)
    play.land()
    (b,) = play.admit(None)
    play.step([b], 4)
    second = play.step([b], run=False)
    play.settle()
    play.publish(b, handles=True)
    play.cancel(second)  # nothing that this step computes was published
    play.reached("InvalidArgument", "published")


@script(strategy="redirect", overlap=True, pages=20, page_size=4, pages_per_row=8)
def test_B17_a_fork_that_copies_a_page_is_refused_while_changes_wait(play: Play) -> None:
    (b,) = play.admit(None, length=4)
    play.step([b], 2)
    play.land()
    step, _ = given_up(play)
    play.fork(b, "c")
    play.launch(step, tell=True)
    play.fork(b, "c")
    play.reached("InvalidArgument")


@script(strategy=ALL[1:], overlap=True, direct_hits=False, slots=9, case=BARE)
def test_B31_a_snapshot_published_in_the_gap_is_used_behind_the_forward(play: Play) -> None:
    """The open step writes the snapshot (ping-pong, lazy) or reads it (redirect)."""
    (a,) = play.admit(None)
    if play.settings.strategy == "redirect":
        play.step([a], 4)
        play.land()
    step = play.step([a], 1 if play.settings.strategy == "redirect" else 4, run=False)
    (snap,) = play.publish(a, handles=True)
    (b,) = play.admit(None, resume=snap)
    play.drop(snap)
    play.submit()
    (c,) = play.admit(None)  # it gets the slot that the snapshot had
    play.submit()
    play.launch(step)
    play.step([a, b, c])
    play.reached("published")


@script(strategy="redirect", call=CALLS, overlap=True, slots=2, case=BARE)
def test_B31_an_arrival_in_the_gap_waits_with_what_is_before_it(play: Play) -> None:
    step, _ = given_up(play)
    b, c = play.admit(None, None)
    play.arrive([b], [3])
    getattr(play, play.call)()
    play.launch(step, tell=True)
    play.step([b, c])


# tiers

ONE = whole(1)


@every_strategy
def test_a_state_published_and_evicted_in_the_gap_goes_down_behind_the_forward(name: str) -> None:
    at = Tiered(Backend("reference"), name, pages=0, every=4, slots=9)
    row = at.start(ONE)
    while at.mem.info(row).length + 4 < len(ONE):
        at.run([row], 4, publish=False)
    length = at.mem.info(row).length
    step = at.step([row], 4, run=False)
    at.mem.end([row], keep="cache", tokens=[at.text[row]])
    evicted = at.cache.evict_states(9)
    assert evicted or name == "none"
    for refused in (at.mem.tiers.flush, at.mem.tiers.clear, at.mem.close):  # type: ignore[union-attr]
        with pytest.raises(ms.InvalidArgument, match="wait for the newest step's forward"):
            refused()
    text = at.text.pop(row)
    at.planes.forward(step, [tuple(text[length : length + 4])])
    at.mem.submit(step)
    settle(at)
    assert all(entry.length in (4, 8) for entry in at.mem.tiers.host.states.entries())  # type: ignore[union-attr]
    at.look(idle=True)


@pytest.mark.parametrize("cleared", [False, True], ids=["", "cleared"])
def test_kv_that_the_forward_has_still_to_write_does_not_go_down(cleared: bool) -> None:
    """In the open step, row x fills a page and publishes it. Row y ends, and leaves a state of the same tokens in the
    cache; this state is then evicted.
    """
    at = Tiered(Backend("reference"), "none", prefix=ms.Prefix())
    x, y = at.admit(ms.Request("x", tokens=[*ONE, 1]), ms.Request("y", tokens=[*ONE, 1]))
    at.run([x, y], 4, publish=False)
    at.run([y], 4, publish=False)
    step = at.step([x], 4, run=False)
    at.publish([x])
    if cleared:
        at.below.clear()
    at.mem.end([y], keep="cache", tokens=[at.text[y][:8]])
    assert at.mem.match([*ONE, 1]).length == 8
    assert at.cache.evict_states(1) == 1
    assert at.tiers.refused == 1 and not len(at.mem.tiers.host.states)  # type: ignore[union-attr]
    at.mem.settle(step)
    at.mem.end([x])
    at.mem.audit().raise_if_leaking()

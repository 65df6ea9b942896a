"""In the gap between the plan of a step and its forward, no call changes the owner of a slot that the step names."""

import memstate as ms
from tests.proof.stateful.script import ALL, Play, script

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


@script(strategy=ALL, prefix=True, tiered=True, host_slots=8, case=BARE)
def test_G1_a_state_published_and_evicted_in_the_gap_goes_down_behind_the_forward(play: Play) -> None:
    text = list(range(8))
    (row,) = play.admit(text)
    play.run(row, text[:4])
    step = play.step([row], 4, run=False)
    play.end(row, how="told", land=False)
    play.evict(states=9)
    for call in (play.mem.tiers.flush, play.mem.tiers.clear, play.mem.close):
        play.refuses(ms.InvalidArgument, call, "wait for the newest step's forward")
    play.launch(step, tell=True)
    play.drain()
    play.match([*text, 1])
    play.reached("state out")


@script(strategy="none", prefix=True, tiered=True, host_slots=8, host_pages=40, page_size=4, cleared=(False, True))
def test_kv_that_the_forward_has_still_to_write_does_not_go_down(play: Play) -> None:
    """In the open step, row x fills a page and publishes it. Row y ends, and leaves a state of the same tokens in the
    cache; this state is then evicted.
    """
    text = list(range(9))
    x, y = play.admit(text, text)
    play.run_all([x, y], [text[:4], text[:4]])
    play.run(y, text[:8])
    step = play.step([x], 4, run=False)
    play.publish(x)
    if play.cleared:
        play.empty_host()
    play.end(y, how="told", land=False)
    play.match(text)
    play.evict(states=1)
    play.reached("refused")
    play.launch(step, tell=True)

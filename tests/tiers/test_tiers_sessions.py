"""Sessions of managers with host memory, also if host memory is too small or its records are pinned."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.tiers import FileStore
from tests.support import inside
from tests.support.planes import every_strategy
from tests.support.scan import row_problems, scan_registers
from tests.support.tiered import NEEDS, T, Tiered, settle, whole

pytestmark = pytest.mark.sample


def check(at: Tiered) -> None:
    """Does the checks of `look`, and counts the slots and pages that sessions hold."""
    at.mem.submit()
    assert scan_registers(inside.registers(at.mem)).problems + row_problems(at.mem) == []
    at.mem.audit().raise_if_leaking()
    at.mem.device.check()
    at.look_below()


def test_a_prompt_s_own_pages_do_not_make_room_for_it(plain: Backend) -> None:
    """Host memory has two pages of the prompt; a third does not fit, and may replace neither of them."""
    at = Tiered(plain, slots=8, tiers={"host_slots": 2, "host_pages": 2, "write": "back"})
    at.pass_down(T[:8])
    at.cache_prompts(T[:12])
    settle(at)  # records that have been loaded are no longer pinned
    at.give_up(pages=60)
    assert at.keeps_pages() == {tuple(T[:4]), tuple(T[:8])} and at.tiers.refused == 1
    assert at.turn([*T[:12], 1], publish=False) == 8


@every_strategy
@pytest.mark.parametrize("write", ["back", "through"])
def test_S7_an_idle_session_s_state_goes_down_for_a_request_and_comes_up_by_its_tokens(
    name: str, write: str, plain: Backend
) -> None:
    """Each of three sessions with little room finds its state again: in the session, in the cache or in host memory."""
    at = Tiered(plain, name, slots=NEEDS[name] + 1, tiers={"write": write})
    sessions = [at.mem.sessions.open(n) for n in range(1, 4)]
    for n, session in enumerate(sessions, 1):
        at.cache_prompts(whole(n), session=session)
        settle(at)
    assert at.tiers.states_out >= 1 and at.mem.stats().held_by_sessions <= NEEDS[name] + 1
    check(at)
    for n, session in enumerate(sessions, 1):
        row = at.hit(8, [*whole(n), 1], session=session)
        at.run([row], publish=False)
        at.end([row])
        settle(at)
        check(at)
    assert at.tiers.states_in >= 1


@every_strategy
@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("stored", [False, True], ids=["host", "storage"])
def test_S16_a_session_that_rests_travels_down_and_its_turn_or_a_prefetch_brings_it_back(
    name: str, write: str, stored: bool, plain: Backend, store: FileStore
) -> None:
    """While the session rests, other requests take its slots and pages."""
    at = Tiered(plain, name, slots=NEEDS[name] + 1, tiers={"write": write, "store": store if stored else None})
    session = at.mem.sessions.open("agent")
    at.cache_prompts(whole(1), session=session)
    at.mem.sessions.rest(session)
    settle(at)
    assert at.mem.stats().held_by_sessions == 0 and at.mem.match([*whole(1), 1]).length == 8
    at.cache_prompts(whole(2), whole(3))
    settle(at)
    assert at.mem.match([*whole(1), 1]).length == 0 and tuple(whole(1)) in at.keeps()
    if stored:
        at.mem.tiers.flush()  # type: ignore[union-attr]
        at.mem.tiers.clear()  # type: ignore[union-attr]
        fetch = at.mem.prefetch([*whole(1), 1], session=session)
        while not fetch.done:
            at.mem.poll()
    row = at.hit(8, [*whole(1), 1], session=session)
    at.run([row], publish=False)
    at.end([row])
    settle(at)
    check(at)
    assert at.tiers.states_in == 1 and at.mem.stats().sessions_emptied == 0


def test_S7_a_load_makes_idle_sessions_give_way(plain: Backend) -> None:
    """A load needs a register and a slot, but idle sessions hold all of them."""
    at = Tiered(plain, "none", slots=3, snapshots=2, sessions=ms.SessionLimits(share=1.0))
    at.cache_prompts(T[:16])
    settle(at)
    at.give_up(pages=60)
    for n in (1, 2):
        at.cache_prompts(whole(n), session=at.mem.sessions.open(n))
    settle(at)
    assert at.mem.stats().held_by_sessions == 2
    row = at.hit(16, T[:17])
    at.run([row], publish=False)
    check(at)

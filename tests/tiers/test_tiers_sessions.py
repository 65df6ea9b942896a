"""Host memory under conversations, and host memory that is too small or held by others."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import inside
from tests.support.planes import every_strategy
from tests.support.scan import row_problems, scan_registers
from tests.support.tiered import NEEDS, T, Tiered, settle, whole

pytestmark = pytest.mark.sample


def check(at: Tiered) -> None:
    """As `look`, where sessions hold slots and pages too."""
    at.mem.submit()
    assert scan_registers(inside.registers(at.mem)).problems + row_problems(at.mem) == []
    at.mem.audit().raise_if_leaking()
    at.mem.device.check()
    at.look_below()


def test_a_prompt_s_own_pages_do_not_make_room_for_it(plain: Backend) -> None:
    """Two of its pages are there, a third does not fit: none of the two goes for it."""
    at = Tiered(plain, slots=8, tiers={"host_slots": 2, "host_pages": 2, "write": "back"})
    at.pass_down(T[:8])
    at.cache_prompts(T[:12])
    settle(at)  # what came up is no longer pinned for that
    at.give_up(pages=60)
    assert at.keeps_pages() == {tuple(T[:4]), tuple(T[:8])} and at.tiers.refused == 1
    assert at.turn([*T[:12], 1], publish=False) == 8


@every_strategy
@pytest.mark.parametrize("write", ["back", "through"])
def test_S7_an_idle_session_s_state_goes_down_for_a_request_and_comes_up_by_its_tokens(
    name: str, write: str, plain: Backend
) -> None:
    """Of three sessions on little room, each finds its state again: in its session, on the device or below."""
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


def test_S7_a_load_makes_idle_sessions_give_way(plain: Backend) -> None:
    """Loads need registers and slots, and sessions hold all of them."""
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

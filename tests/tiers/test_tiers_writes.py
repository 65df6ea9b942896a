"""When each write policy saves states to host memory, and that the saved bytes are those that were cached."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.placement import Nowhere
from memstate.prefix.policies import Lru, LruPages
from tests.support import inside
from tests.support.planes import every_strategy
from tests.support.tiered import PAGE, Tiered, settle, whole
from tests.support.ways import every_order_and_strategy

pytestmark = pytest.mark.sample

ONE, TWO = tuple(whole(1)), tuple(whole(2, 3))


def make(backend: Backend, name: str, write: str, **more: object) -> Tiered:
    return Tiered(backend, name, slots=14, tiers={"write": write, **more.pop("tiers", {})}, **more)  # type: ignore


@every_strategy
def test_through_copies_a_state_once_it_is_sent_and_never_again(name: str, backend: Backend) -> None:
    at = make(backend, name, "through")
    at.cache_prompts(ONE, poll=False)
    at.mem.poll()
    assert at.moved == (0, 0, 0, 0), "its move has not been sent: the device does not know where it is"
    at.mem.submit()
    assert at.moved == (0, 0, 0, 0)
    at.mem.poll()
    assert at.moved == (1, 0, 2, 0) and at.keeps() == {ONE}
    at.look(idle=True)
    at.mem.poll()
    at.give_up(pages=60)
    assert at.moved == (1, 0, 2, 0), "host memory has it already"
    at.look(idle=True)
    assert at.turn([*ONE, 1]) == 8


@every_order_and_strategy
def test_through_saves_what_is_evicted_before_its_turn(name: str, overlap: bool, plain: Backend) -> None:
    at = make(plain, name, "through", overlap=overlap)
    at.cache_prompts(ONE, TWO, poll=False)
    at.cache.evict_states(1)  # evicted before any submit or poll
    assert at.moved == (1, 0, 2, 0) and at.keeps() == {ONE}
    settle(at)
    assert at.moved == (2, 0, 5, 0) and at.keeps() == {ONE, TWO}


@every_order_and_strategy
def test_back_copies_when_the_device_gives_up(name: str, overlap: bool, plain: Backend) -> None:
    at = make(plain, name, "back", overlap=overlap)
    at.cache_prompts(ONE, TWO)
    settle(at)
    assert at.turn([*ONE, 1], publish=False) == at.turn([*ONE, 2], publish=False) == 8
    settle(at)
    assert at.moved == (0, 0, 0, 0)
    at.give_up(1)
    assert at.moved == (1, 0, 3, 0) and at.keeps() == {TWO}
    at.look(idle=True)
    at.give_up(0, pages=99)  # this evicts leaves with their states
    assert ONE in at.keeps() and at.mem.free_pages == 60


@every_order_and_strategy
def test_selective_copies_with_the_second_hit(name: str, overlap: bool, plain: Backend) -> None:
    at = make(plain, name, "selective", overlap=overlap)
    at.cache_prompts(ONE)
    for hits in (1, 2, 3):
        row = at.start([*ONE, hits])
        assert at.mem.info(row).length == 8 and at.moved == ((0, 0, 0, 0) if hits < 3 else (1, 0, 2, 0))
        at.run([row], publish=False)
        at.mem.poll()
        assert at.moved == ((0, 0, 0, 0) if hits < 2 else (1, 0, 2, 0))
        at.mem.end([row])
    at.look(idle=True)
    at.give_up()
    assert at.moved == (1, 0, 2, 0) and at.keeps() == {ONE}


@every_order_and_strategy
def test_a_state_that_is_published_and_evicted_in_one_packet_is_saved(name: str, overlap: bool, plain: Backend) -> None:
    at = make(plain, name, "back", overlap=overlap)
    row = at.start(ONE)
    at.prefill(row, publish=False)
    at.mem.submit()
    at.end([row])
    submits = at.mem.stats().packets
    assert bool(inside.commands(at.mem).queue) and at.cache.evict_states(1) == 1
    assert at.mem.stats().packets == submits + 1, "the move goes first, and nothing else is needed"
    rows = at.admit(*[ms.Request(i, tokens=[50 + i]) for i in range(4)])  # one of these requests gets the slot of ONE
    at.run(rows, publish=False)
    assert at.keeps() == {ONE}
    at.look()
    at.mem.end(rows)
    settle(at)
    assert at.turn([*ONE, 1]) == 8


def test_kv_goes_down_at_once_although_its_state_waits_for_a_forward(plain: Backend) -> None:
    """KV is saved first, since its pages may get other owners before the forward is launched."""
    at = make(
        plain, "redirect", "back", every=PAGE, prefix=ms.Prefix(Lru(), LruPages(), placement=Nowhere()), ends=True
    )
    row = at.start(ONE[:PAGE])
    while at.mem.info(row).length < 2 * PAGE:
        at.run([row], publish=False)
    text = at.text[row]
    step = at.step([row], run=False)  # the plan keeps a state in a lane, which the packet moves on
    at.note(text)
    at.mem.publish([row], keep="cache", tokens=[text[: 2 * PAGE]])
    assert at.cache.evict_states(1) == 1 and at.moved == (0, 0, 2, 0)
    at._forward(step, [text[2 * PAGE :]])
    at.mem.submit(step)
    settle(at)
    assert at.moved == (1, 0, 2, 0) and at.keeps() == {tuple(text[: 2 * PAGE])}
    at.mem.settle(step)
    at.mem.end([row])
    at.look(idle=True)


def test_kv_of_the_caller_stays_the_caller_s(backend: Backend) -> None:
    """Under every write policy, only states are saved, and hits need no KV."""
    for write in ("through", "back"):
        at = Tiered(backend, pages=0, slots=6, every=64, tiers={"write": write})
        at.cache_prompts(ONE, TWO)
        at.give_up()
        settle(at)
        assert at.moved == (2, 0, 0, 0) and at.keeps() == {ONE, TWO}
        assert at.turn([*ONE, 1], publish=False) == 8 and at.turn([*TWO, 1], publish=False) == 12
        assert at.moved == (2, 2, 0, 0)
        at.look(idle=True)

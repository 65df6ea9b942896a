"""Room counted to the last slot and page, and what is kept while room is made."""

import pytest

import memstate as ms
from memstate import InvalidArgument
from memstate.integrations.sglang.prefix import PrefixPart
from memstate.kernels.dispatch import Backend
from tests.support.planes import every_strategy
from tests.support.talks import Talks
from tests.support.ways import with_and_without_cache

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend

AT_ADMISSION = {"none": 1, "ping-pong": 3, "lazy": 2, "redirect": 1}  # slots that a new row takes


def other(n: int, length: int) -> list[int]:
    """Tokens of another conversation."""
    return [100 * n + at for at in range(length)]


@with_and_without_cache
def test_the_last_page_that_can_be_freed_counts_and_no_more(backend: Backend, cache: bool) -> None:
    """Of 18 pages a request has 2, idle sessions have 10, and 6 are free."""
    talks = Talks(backend, "none", cache=cache, slots=9, pages=18, pages_per_row=18)
    sessions = [talks.mem.sessions.open(name) for name in "ab"]
    for n, session in enumerate(sessions, 1):
        talks.whole(other(n, 9), session)
    talks.run(talks.turn(other(3, 3)), other(3, 3))
    assert talks.mem.free_pages == 6
    with pytest.raises(ms.OutOfPages) as refused:
        talks.turn(other(4, 2 * 16 + 1))
    assert (refused.value.requested, refused.value.free) == (17, 6)
    assert [talks.kept(session)[0] for session in sessions] == [9, 9], "a refusal changes nothing"
    talks.turn(other(4, 2 * 16))
    assert talks.mem.free_pages == 0
    talks.look()


def test_the_last_cached_page_that_can_be_evicted_counts_and_no_more(backend: Backend) -> None:
    """Of 9 cached pages a row leases 2, and a handle has 3 as well; the others are a trunk with two ends."""
    talks = Talks(backend, "none", slots=12, pages=16, pages_per_row=14)
    talks.whole(other(1, 6))
    row = talks.turn(other(1, 8))
    talks.run(row, other(1, 8))
    talks.mem.end([row], keep="handle")
    for end in (50, 60):
        talks.whole([*other(2, 4), end, end])
    talks.run(row := talks.turn(other(3, 4)), other(3, 4))
    talks.mem.publish([row], keep="cache", tokens=[talks.known(row)])
    assert (talks.mem.free_pages, talks.cached()) == (6, [6, 6, 6])
    with pytest.raises(ms.OutOfPages):
        talks.turn(other(4, 2 * 10 + 1))
    assert talks.cached() == [6, 6, 6], "a refusal changes nothing"
    talks.turn(other(4, 2 * 10))
    assert talks.mem.free_pages == 0
    talks.look()


@pytest.mark.parametrize("beyond", [False, True], ids=["the last", "beyond it"])
@pytest.mark.parametrize("edited", [False, True], ids=["continued", "edited"])
@every_strategy
def test_the_last_slot_of_a_turn_counts_and_no_more(backend: Backend, name: str, edited: bool, beyond: bool) -> None:
    """A turn gives slots of its session back, and needs those of a new row less the states that it goes on with."""
    talks = Talks(backend, name, cache=False, slots=12, pages=120, rows=16)
    session = talks.mem.sessions.open("a")
    talks.whole(text := other(1, 10), session)
    kept, each, free = talks.kept(session), AT_ADMISSION[name], talks.mem.free_slots
    start = max((length for length in kept if length <= (8 if edited else 10)), default=0)
    moved = sum(length <= start for length in kept)
    spare = free + len(kept) - max(each, moved)  # slots for other requests of the call
    prompt = [*text[: start or 8], 1, 2]

    def admit(more: int) -> int:
        turn = ms.Request("turn", tokens=prompt, session=session)
        row, *others = talks.mem.admit([turn, *map(ms.Request, range(more))])
        talks.fed |= {row: prompt[: talks.mem.info(row).length], **{other: [] for other in others}}
        return talks.mem.info(row).length

    if not beyond:
        assert admit(spare // each) == start, "it needs not make way for its own turn"
        assert talks.mem.free_slots == spare % each
    elif moved > each:
        assert admit(spare // each + 1) == 0, "it makes way for its own turn"
    else:
        with pytest.raises(ms.OutOfSlots) as refused:
            admit(spare // each + 1)
        assert (refused.value.requested, refused.value.free) == (each * (spare // each + 2), free)
        assert talks.kept(session) == kept
    talks.mem.audit().raise_if_leaking()


def test_a_node_stays_while_a_register_is_freed_for_its_state(backend: Backend) -> None:
    """The only register is that of a state below it; once that has gone, nothing else would keep the node."""
    talks = Talks(backend, "none", overlap=False, slots=6, pages=0, pages_per_row=0, snapshots=1)
    talks.run(row := talks.turn([1, 2, 3, 4]), [1, 2, 3, 4])
    talks.whole([1, 2, 3, 4, 5, 6, 7, 8])
    assert talks.cached() == [8]
    talks.end(row)
    assert talks.cached() == [4]
    assert talks.mem.match([1, 2, 3, 4, 9]).length == 4
    talks.look()


def test_a_hit_is_not_locked_whose_state_has_another_owner_by_now() -> None:
    """The engine uses the id of the state again, and the cache gets it for another prompt."""
    cache = PrefixPart(2)
    cache.insert([1, 2, 3, 4], [10, 11], 7)
    hit = cache.match([1, 2, 3, 4, 5])
    assert cache.evict(states=1).states == [7]
    cache.insert([5, 6, 7, 8], [12, 13], 7)
    with pytest.raises(InvalidArgument, match="has been evicted since it was matched"):
        cache.lock(hit)
    assert cache.evict(states=1).states == [7], "nothing is locked"

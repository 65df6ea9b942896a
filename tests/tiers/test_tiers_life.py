"""What happens to tiers in resets, clears, sleep and wake, at the end of a manager, and with threads."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.planes import every_strategy
from tests.support.tiered import T, Tiered, below, settle, whole
from tests.support.virtual import MemoryStore

pytestmark = pytest.mark.sample

ONE = whole(1)
BOTH, ONE_GONE = (ONE, T[:16]), {"states": 1, "kv_stays": True, "slots": 12}


@every_strategy
def test_a_reset_empties_host_memory_and_leaves_storage(name: str, plain: Backend) -> None:
    store = MemoryStore()
    at = below(plain, name, *BOTH, **ONE_GONE, tiers={"store": store})
    at.start([*ONE, 1])
    at.below.flush()
    there = len(store.records)
    at.mem.recover(keep=False)
    at.text.clear()
    at.look(idle=True)
    assert at.keeps() == set() and at.mem.free_slots == 12 and len(store.records) == there == 2 + 6
    assert at.turn([*ONE, 1], publish=False) == 0
    at.fetch([*T[:16], 1])
    assert at.turn([*T[:16], 1], publish=False) == 16
    at.look(idle=True)
    at.mem.close()


@pytest.mark.parametrize("keep", [True, False])
@every_strategy
def test_host_memory_outlives_sleep(name: str, keep: bool, plain: Backend) -> None:
    at = below(plain, name, *BOTH, **ONE_GONE)
    at.give_up()
    row = at.start([*ONE, 1]) if keep else None  # the load of the row is on its way
    at.mem.submit()
    at.mem.device.sleep(keep=keep)
    for call in (at.mem.poll, lambda: at.mem.match([*ONE, 1]), lambda: at.mem.prefetch([*ONE, 1])):
        with pytest.raises(ms.Asleep):
            call()
    assert at.tiers.leaked_records == 0 and at.keeps() == {tuple(ONE), tuple(T[:16])}
    at.mem.device.wake()
    if row:
        at.run([row], publish=False)
        at.mem.end([row])
    assert at.turn([*T[:16], 1], publish=False) == 16 and at.turn([*ONE, 1], publish=False) == 8
    at.give_up()
    settle(at)
    at.look(idle=True)
    at.cache_prompts(whole(5))
    settle(at)
    assert tuple(whole(5)) in at.keeps(), "addresses may be others: records are right all the same"


def test_states_are_written_for_good_once_nothing_is_pending(plain: Backend) -> None:
    """KV is written first, so that a reader that finds the state also finds its KV."""
    store = MemoryStore()
    at = Tiered(plain, slots=12, tiers={"store": store})
    at.cache_prompts(T[:16])
    at.mem.submit()
    at.below.flush()
    kinds = [name.split("-")[0] for name in store.asked("put")]
    assert kinds == ["kv"] * 4 + ["state"] and at.below.writeback and at.below.writeback.pending == 0
    at.below.flush()
    assert len(store.asked("put")) == 5
    at.mem.close()
    assert len(store.asked("put")) == 5


@pytest.mark.parametrize("call", ["flush", "close"])
def test_a_manager_that_sleeps_gives_nothing_to_host_memory(call: str, plain: Backend) -> None:
    """The call is refused before a record is filed for a state that was never copied."""
    at = Tiered(plain, slots=6, tiers={"write": "back"})
    at.cache_prompts(ONE)
    at.mem.device.sleep()
    with pytest.raises(ms.Asleep):
        getattr(at.below if call == "flush" else at.mem, call)()
    assert at.keeps() == set() and at.tiers.leaked_records == 0
    at.mem.device.wake()


def test_flushing_more_than_host_memory_holds_writes_all_of_it(plain: Backend) -> None:
    """Records are written in turns: those that storage has already make room in host memory for the rest."""
    store = MemoryStore()
    at = Tiered(plain, slots=8, tiers={"store": store, "write": "back", "host_slots": 2, "host_pages": 4})
    at.cache_prompts(*(whole(n) for n in range(1, 6)))
    at.mem.submit()
    at.below.flush()
    assert sum(name.startswith("state") for name in store.records) == 5
    assert sum(name.startswith("kv") for name in store.records) == 10 and at.tiers.refused == 0
    at.mem.close()

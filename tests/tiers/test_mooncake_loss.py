"""Records of a real Mooncake store that is full, or that loses a process or its master."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from memstate.tiers.stores.base import Outcome
from memstate.tiers.stores.mooncake import MooncakeStore
from tests.support.loopback import PATIENCE_S, until
from tests.support.mooncake_server import running_master
from tests.support.store_rig import SIZE, Rig, fresh, peer

MISSING, DONE, _, FAILED = Outcome


def test_a_full_store_refuses_and_evicts(generator: torch.Generator) -> None:
    with running_master() as own:
        rig = Rig(MooncakeStore(own.settings(segment_bytes=16 << 20)))
        wanted = rig.fill(generator, 0)
        names = [fresh() for _ in range(3 * (16 << 20) // SIZE)]
        outcomes = rig.store.put(names, rig.buffers(0) * len(names))
        assert set(outcomes) == {DONE, FAILED}
        assert rig.store.faults == {"NO_SPACE": outcomes.count(FAILED)}
        for name, outcome in zip(names, outcomes, strict=True):
            read = rig.store.get([name], rig.buffers(1))[0]
            assert read in ((DONE, MISSING) if outcome is DONE else (MISSING,))
            assert read is MISSING or rig.holds(wanted, 1)
        until(lambda: rig.store.put([fresh()], rig.buffers(0)) == [DONE], "nothing is evicted")
        rig.store.close()


def test_a_process_that_leaves_takes_its_records_along(generator: torch.Generator) -> None:
    with running_master() as own:
        keeper, rig = Rig(MooncakeStore(own.settings())), Rig(MooncakeStore(own.settings(segment_bytes=0)))
        name = fresh()
        wanted = keeper.fill(generator, 0)
        assert keeper.store.put([name], keeper.buffers(0)) == [DONE]
        assert rig.store.get([name], rig.buffers(0)) == [DONE]
        assert rig.holds(wanted, 0)
        keeper.store.close()
        assert rig.store.get([name], rig.buffers(0)) == [MISSING]
        assert rig.store.put([name], rig.buffers(0)) == [FAILED]  # no process provides memory
        rig.store.close()


@pytest.mark.proof
def test_a_master_that_is_killed_and_comes_back(generator: torch.Generator) -> None:
    def story(http: bool) -> None:
        with running_master() as own:
            settings = own.settings(http=http)
            rig = Rig(MooncakeStore(settings))
            before, lost, after, theirs = (fresh() for _ in range(4))
            wanted = rig.fill(generator, *range(3))
            assert rig.store.put([before], rig.buffers(0)) == [DONE]

            own.kill()
            with ThreadPoolExecutor(3) as pool:
                calls = [
                    pool.submit(rig.store.get, [before], rig.buffers(3)),
                    pool.submit(rig.store.put, [lost], rig.buffers(1)),
                ]
                asked = pool.submit(rig.store.exists, [before])
                assert [call.result(PATIENCE_S) for call in calls] == [[FAILED], [FAILED]]
                with pytest.raises(OSError, match=r"exists of 1 records .*: (RPC_FAIL|RPC_TIMEOUT|NO_MASTER)"):
                    asked.result(PATIENCE_S)
            assert rig.store.faults.keys() <= {"RPC_FAIL", "RPC_TIMEOUT", "NO_MASTER"}
            assert rig.store.faults.total() == 3
            until(
                lambda: rig.store.put([lost], rig.buffers(1)) == [DONE] or rig.store.faults["NO_MASTER"],
                "nobody notices",
            )
            assert rig.store.get([before], rig.buffers(3)) == [FAILED]

            own.start()
            until(lambda: rig.store.put([after], rig.buffers(2)) == [DONE], "the store does not work again")
            assert rig.store.get([before, after, lost], rig.buffers(4, 5, 6)) == [MISSING, DONE, MISSING]
            assert rig.holds([wanted[2]], 5)
            other = peer(f"MooncakeStore({replace(settings, segment_bytes=0)!r})", after, theirs, 7)
            assert rig.store.get([theirs], rig.buffers(7)) == [DONE]
            assert rig.holds([wanted[2] ^ 7], 7)
            other.communicate()
            rig.store.close()

    with ThreadPoolExecutor(2) as pool:  # both stories at once, since they mostly wait
        list(pool.map(story, [False, True]))


def test_a_master_that_freezes_and_goes_on(generator: torch.Generator) -> None:
    with running_master() as own:
        rig = Rig(MooncakeStore(own.settings(timeout=1.0)))
        name = fresh()
        wanted = rig.fill(generator, 0)
        assert rig.store.put([name], rig.buffers(0)) == [DONE]
        with own.frozen(), ThreadPoolExecutor(2) as pool:
            put = pool.submit(rig.store.put, [fresh()], rig.buffers(1))
            get = pool.submit(rig.store.get, [name], rig.buffers(2))
            assert (put.result(PATIENCE_S), get.result(PATIENCE_S)) == ([FAILED], [FAILED])
            assert rig.store.faults.keys() <= {"RPC_TIMEOUT", "NO_MASTER"}
        until(lambda: rig.store.get([name], rig.buffers(2)) == [DONE], "the store does not work again")
        assert rig.holds(wanted, 2)
        rig.store.close()

"""Runs two processes that share only a store."""

from multiprocessing.synchronize import Barrier

from toy import manager, open_store, report, serve

MANUAL = list(range(100, 132))  # first tokens of all prompts


def first_process(place: str, barrier: Barrier) -> None:
    """Computes a prompt. The process stays until the other has ended, because a Mooncake store uses its memory."""
    store = open_store(place)
    mem = manager(store)
    starts = [serve(mem, [*MANUAL, 1, 2, 3])]
    mem.tiers.flush()  # writes all records now; without this call, polls write them later
    report("first process", mem, store, starts)
    barrier.wait()
    barrier.wait()
    mem.close()


def second_process(place: str, barrier: Barrier) -> None:
    """Starts from the state that the first process has computed."""
    store = open_store(place)
    mem = manager(store)
    barrier.wait()
    report("second process", mem, store, [serve(mem, [*MANUAL, question]) for question in (4, 5)])
    mem.close()
    barrier.wait()

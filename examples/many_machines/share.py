"""Two processes that know nothing of each other but the store."""

from multiprocessing.synchronize import Barrier

from toy import manager, open_store, report, serve

MANUAL = list(range(100, 132))  # tokens that the prompts begin with


def first_process(place: str, barrier: Barrier) -> None:
    """Computes a prompt. It gives memory to a Mooncake store, so it stays until the other has ended."""
    store = open_store(place)
    mem = manager(store)
    starts = [serve(mem, [*MANUAL, 1, 2, 3])]
    mem.tiers.flush()  # others find it from now on; without this, some polls later
    report("first process", mem, store, starts)
    barrier.wait()
    barrier.wait()
    mem.close()


def second_process(place: str, barrier: Barrier) -> None:
    """Starts from what the first process has computed."""
    store = open_store(place)
    mem = manager(store)
    barrier.wait()
    report("second process", mem, store, [serve(mem, [*MANUAL, question]) for question in (4, 5)])
    mem.close()
    barrier.wait()

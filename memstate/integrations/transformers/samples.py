"""Several samples of a request: its row is forked behind the prompt."""

from memstate.engine.manager import StateManager
from memstate.errors import OutOfPages, OutOfRows, OutOfSlots
from memstate.integrations.transformers.kv import KvPages
from memstate.integrations.transformers.running import Running

BACK_PRESSURE = (OutOfSlots, OutOfRows, OutOfPages)


def forked(mem: StateManager, kv: KvPages | None, one: Running) -> list[Running]:
    """Forks the row of a request for its other samples, all or none. Full KV pages are shared, the last one is copied.

    Args:
        mem: the manager.
        kv: its pages; None: no layer attends.
        one: the row, which has read its prompt.

    Returns:
        All samples of the request; the first is `one`, which is as it was.

    Raises:
        OutOfSlots, OutOfRows, OutOfPages: back-pressure; nothing changed.

    Syncs: no.
    """
    others = one.samplers[1:]
    fork = None
    try:
        fork = mem.fork(one.row, [one.prompt.id] * len(others))
        if mem.device.page_table.numel():
            mem.extend(fork.rows, [len(one.tokens) + sampler.most - 1 for sampler in others])
        if kv is not None:
            kv.copy(fork.page_copies)
        rows = [
            Running(one.prompt, [sampler], row, list(one.tokens), one.cached, one.length, one.fetch, number)
            for number, (sampler, row) in enumerate(zip(others, fork.rows, strict=True), 1)
        ]
    except BaseException:
        if fork is not None:
            mem.end(fork.rows)
        raise
    return [one, *rows]

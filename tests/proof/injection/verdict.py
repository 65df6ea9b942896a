"""Compares managers before and after a call, says whether one is broken, and runs functions in forked processes."""

import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

import numpy as np

import memstate as ms
from tests.support import inside, owners

ERRORS: dict[str, Callable[[], BaseException]] = {
    "MemoryError": MemoryError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "OutOfSlots": lambda: ms.OutOfSlots(1, 0),  # a policy of the caller can raise it
}


def fingerprint(mem: ms.StateManager) -> dict[str, Any]:
    """Sends the recorded changes, and returns everything that a later call can depend on."""
    asleep = mem.planes.asleep
    if asleep:
        mem.device.wake()
    seen = asdict(mem.inspect())
    del seen["stats"], seen["changes"]
    for one in seen["rows"] + seen["sessions"]:  # these change with time
        del one["age"], one["idle"]
    table, file, below = owners.table(mem), inside.registers(mem), mem.tiers
    seen |= {name: getattr(table, name).tolist() for name in ("generation", "used", "finished", "confirmed")}
    seen["unsettled"] = mem._parts.log.times(table).tolist()
    seen |= {name: getattr(file, name).tolist() for name in ("held", "tracked", "source", "pending", "newest")}
    of_tails = file.table.pending, file.table.newest
    seen["tails"] = [column.tolist() for column in of_tails if column is not None]
    seen |= {"host labels": np.where(file.held, file.labels, 0).tolist(), "ids": list(table.ids)}
    seen["kept"] = sorted(owners.states(mem).values(), key=lambda snap: snap.register)
    seen["pages"] = owners.row_pages(mem).held, list(owners.kv_pages(mem).holders)
    seen["steps"] = [step.serial for step in mem._parts.stepping._log.unsettled], mem._parts.stepping.open is not None
    seen["host"] = [
        [(e.key, e.record, e.pins, e.stored) for e in cache.entries()] for cache in (below._caches if below else ())
    ]
    seen["parked"] = [
        [(part.at, part.index, part.entry.record if part.entry else None, part in below.parked.above) for part in parts]
        for parts in (below.parked._of.values() if below else ())
    ]
    seen["free"] = mem.free_slots, mem.free_pages, owners.free(mem)
    seen["fetches"] = [fetch.done for fetch in (below.prefetcher._fetches if below and below.prefetcher else ())]
    gone_first = mem.prefix._superseded if mem.prefix else ()
    seen["superseded"] = [node.snapshot.register for node in gone_first if node.snapshot]
    seen["asleep"] = asleep
    seen["rows' memory"] = rows["tail"][:, table.used].tolist() if (rows := mem.planes.rows) else None
    return seen


def broken(mem: ms.StateManager) -> bool:
    """Says whether the next calls raise `Broken`."""
    try:
        mem.device.buffer_infos()
        mem.device.scrub_null()
    except ms.Broken:
        for call in (lambda: mem.admit([]), mem.poll, mem.audit, lambda: mem.pool.claim(1), lambda: mem.plan([])):
            try:
                call()
            except ms.Broken:
                continue
            raise AssertionError("a call of a broken manager did not say so") from None
        mem.stats()
        return True
    except ms.Asleep:
        return False
    return False


def split() -> tuple[int, Any]:
    """Forks. Returns the pipe for `reply` in the child; in the parent 0, and the answer of the child or None."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.close(reader)
        return writer, None
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return 0, pickle.loads(said) if said else None


def reply(pipe: int, answer: Any) -> NoReturn:
    """Ends a forked process with an answer."""
    with os.fdopen(pipe, "wb") as file:
        file.write(pickle.dumps(answer))
    os._exit(0)


def forked(work: Callable[[], Any]) -> Any:
    """Runs `work` in a forked process, so that nothing changes in this one. Returns its answer."""
    pipe, answer = split()
    if pipe:
        try:
            answer = [work()]
        except BaseException:
            answer = RuntimeError(traceback.format_exc())
        reply(pipe, answer)
    if isinstance(answer, RuntimeError):
        raise answer
    if answer is None:
        raise RuntimeError("the process ended without an answer")
    return answer[0]

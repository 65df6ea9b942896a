"""Judges a call that an exception ended: it is done, or undone, or `Broken` is raised and recover() repairs it.

Each point, a place where the exception comes, is tried in a forked process, so that a scene is built only once.
"""

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

import memstate as ms
from tests.proof.injection.keyed import Keyed
from tests.proof.injection.points import Tracer
from tests.proof.injection.scene import Scene, calls, scene
from tests.support import inside, owners

ERRORS: dict[str, Callable[[], BaseException]] = {
    "MemoryError": MemoryError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "OutOfSlots": lambda: ms.OutOfSlots(1, 0),  # a policy of the caller can raise it
}


SERVED = 4  # after each 4th point, requests are served from the remaining states


class Outcome(NamedTuple):
    """The result of one point.

    Attributes:
        kind: "done", "undone" or "noticed"; otherwise "wrong".
        place: the line of the exception.
        text: the fault, if the kind is "wrong".
    """

    kind: str
    place: str
    text: str = ""


def fingerprint(scene: Scene | Keyed) -> dict[str, Any]:
    """Sends the recorded changes, and returns everything that a later call can depend on."""
    mem = scene.mem
    seen = asdict(mem.inspect())
    del seen["stats"], seen["changes"]
    for one in seen["rows"] + seen["sessions"]:  # these change with time
        del one["age"], one["idle"]
    table, file, below = owners.table(mem), inside.registers(mem), scene.below
    seen |= {name: getattr(table, name).tolist() for name in ("generation", "used", "finished", "confirmed")}
    seen["unsettled"] = mem._parts.log.times(table).tolist()
    seen |= {name: getattr(file, name).tolist() for name in ("held", "tracked", "source", "pending", "newest")}
    of_tails = file.table.pending, file.table.newest
    seen["tails"] = [column.tolist() for column in of_tails if column is not None]
    seen |= {"host labels": np.where(file.held, file.labels, 0).tolist(), "ids": list(table.ids)}
    seen["kept"] = sorted(owners.states(mem).values(), key=lambda snap: snap.register)
    seen["pages"] = owners.row_pages(mem).held, list(owners.kv_pages(mem).holders)
    seen["steps"] = [step.serial for step in mem._parts.stepping._log.unsettled], mem._parts.stepping.open is not None
    seen["host"] = [[(e.key, e.record, e.pins, e.stored) for e in cache.entries()] for cache in scene.caches]
    seen["free"] = mem.free_slots, mem.free_pages, owners.free(mem)
    seen["fetches"] = [fetch.done for fetch in (below.prefetcher._fetches if below.prefetcher else ())]
    gone_first = mem.prefix._superseded if mem.prefix else ()
    seen["superseded"] = [node.snapshot.register for node in gone_first if node.snapshot]
    seen["asleep"] = mem.planes.asleep
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


def _different(one: dict[str, Any], other: dict[str, Any]) -> str:
    return ", ".join(name for name in one if one[name] != other[name])


def judge(
    scene: Scene | Keyed, name: str, call: Callable[[], Any], at: int, error: BaseException, marks: Any
) -> Outcome:
    """Raises an error at one point of a call, and judges the state that is left.

    at: number of the point. marks: the fingerprints before the call and after a call without an error.
    """
    tracer, mem = Tracer(at, error), scene.mem
    sys.unraisablehook = lambda _: None  # a discarded generator would report the exception again
    came = False
    try:
        tracer.run(call)
    except type(error):
        came = True
    except ms.Broken as raised:
        came = raised.__context__ is not None
    except BaseException:
        return Outcome("wrong", tracer.place, traceback.format_exc(limit=-4))
    kind = "noticed"
    try:
        scene.work_in_threads()
        if broken(mem):
            assert came, "the exception was swallowed, and the manager is broken"
            recovered = mem.recover(held_by_id(scene))
            assert mem.stats().rows_used == 0 and not [s for s in recovered.lost if s in recovered.snapshots]
        else:
            if (name == "wake" and mem.planes.asleep) or (name == "sleep" and mem.planes.asleep):
                mem.device.wake()
            here = fingerprint(scene)
            before, after = marks
            kind = "undone" if here == before else "done" if here == after else "wrong"
            if kind == "wrong":
                text = f"neither done ({_different(after, here)}) nor undone ({_different(before, here)})"
                return Outcome("wrong", tracer.place, text)
            if kind == "undone" and at % SERVED:
                return Outcome(kind, tracer.place)  # the state is as before the call
            if kind == "done" and came:
                mem.recover(held_by_id(scene))
            elif scene.in_gap and kind == "undone":
                scene.land()
        mem.audit()
        assert not (wrong := mem.audit().miscounts), wrong
        scene.finish(serve=at % SERVED == 0)
    except BaseException:
        return Outcome("wrong", tracer.place, traceback.format_exc(limit=-4))
    return Outcome(kind, tracer.place)


def held_by_id(scene: Scene | Keyed) -> list[int]:
    """Returns the slots that the caller claimed by id and that are not free."""
    free = scene.mem.pool.allocator.free_slots()
    return [slot for slot in scene.by_id.tolist() if not free[slot]]


def forked(work: Callable[[], Any]) -> Any:
    """Runs `work` in a forked process, so that nothing changes in this one. Returns its answer."""
    reader, writer = os.pipe()
    if child := os.fork():
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        if not said:
            raise RuntimeError("the process ended without an answer")
        answer = pickle.loads(said)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer
    os.close(reader)
    try:
        said = pickle.dumps(work())
    except BaseException:
        said = pickle.dumps(RuntimeError(traceback.format_exc()))
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(said)
    os._exit(0)


def outcomes(scene: Scene | Keyed, name: str, error: str, chosen: Callable[[int], Sequence[int]]) -> list[Outcome]:
    """Returns the results of points of one call. The scene does not change, because each point runs in another process.

    Args:
        scene: the manager before the call.
        name: the call, a name of `calls`.
        error: the exception, a name of `ERRORS`.
        chosen: function of the number of points; returns the points to try.
    """
    return list(forked(lambda: _outcomes(scene, name, error, chosen)))


def _outcomes(scene: Scene | Keyed, name: str, error: str, chosen: Callable[[int], Sequence[int]]) -> list[Outcome]:
    call = calls(scene)[name]()

    def after() -> Any:
        tracer = Tracer()
        tracer.run(call)
        return tracer.count, before()

    def before() -> dict[str, Any]:
        if scene.mem.planes.asleep:
            scene.mem.device.wake()
        return fingerprint(scene)

    count, done = forked(after)
    marks = forked(before), done
    return [
        forked(lambda at=at: judge(scene, name, call, at, ERRORS[error](), marks))  # type: ignore[misc]
        for at in chosen(count)
    ]


def every_so_many(name: str, error: str, call: str, every: int) -> list[Outcome]:
    """Returns the results of every `every`-th point of a call. Runs in a worker process."""
    torch.set_num_threads(1)
    return outcomes(scene(name), call, error, lambda count: range(1, count + 1, every))

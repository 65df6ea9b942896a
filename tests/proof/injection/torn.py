"""Ends calls of scripts by exceptions, and judges what is left: the call is done, or undone, or `Broken` is raised.

Before a script makes a call, forked processes make it, each with an exception at another point. If the call is undone,
the script goes on in that process, and the model compares everything, as always. Otherwise `recover` must leave only
states that are those of their tokens.
"""

import importlib
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch

import memstate as ms
from memstate.engine.conversations import SessionCalls
from memstate.engine.device import DeviceCalls
from memstate.engine.pool import StatePool
from memstate.kernels.dispatch import Backend
from memstate.tokens import ids
from tests.proof.injection.points import Tracer
from tests.proof.injection.verdict import ERRORS, broken, fingerprint, forked, reply, split
from tests.proof.stateful.ledger import Text
from tests.proof.stateful.machine import encoded
from tests.proof.stateful.program import Program, carry_out
from tests.proof.stateful.script import Driven, Play, Script
from tests.support import owners
from tests.support.sources import ROOT

PUBLIC = {
    name
    for kind in (ms.StateManager, ms.tiers.TierManager, DeviceCalls, SessionCalls, StatePool)
    for name, _ in inspect.getmembers(kind, inspect.isfunction)
    if not name.startswith("_")
}
KINDS = {"": {}, "tails": {"tail": True}, "keys": {"kv": "keys"}, "reach": {"kv": "reach"}, "tiers": {"tiered": True}}
LENGTH = 60  # operations of a program
SERVED = 4  # after each 4th point that is undone, the script goes on


def names_in(call: Callable[[], Any]) -> Sequence[str]:
    """Returns the name of a method, or the names that a lambda uses."""
    return [call.__name__] if inspect.ismethod(call) else call.__code__.co_names


Places = Callable[[], Sequence[float]]  # places in a call, from 0, its begin, to 1, its end


class Outcome(NamedTuple):
    """The result of one point.

    kind: "done", "undone" or "noticed"; "whole" for a call that was not ended; otherwise "wrong". call: name of the
    public call. place: line of the exception. text: the fault, if the kind is "wrong".
    """

    kind: str
    call: str
    place: str = ""
    text: str = ""


class Torn(Driven):
    """A machine that makes calls in forked processes, too, where an exception ends them.

    error: name of the exception. chosen: function that returns where to end the next call. report: pipe of a forked
    process in which a call was undone. undone: its outcome.
    """

    error = "MemoryError"
    chosen: Places = staticmethod(lambda: ())
    report: int | None = None
    undone = Outcome("undone", "")

    def __init__(self, *given: Any) -> None:
        self.outcomes: list[Outcome] = []
        super().__init__(*given)

    def called(self, call: Callable[[], Any]) -> Any:
        if self.report is not None:
            return super().called(call)
        name = next((one for one in reversed(names_in(call)) if one in PUBLIC), "")
        if places := self.chosen():
            before = forked(lambda: fingerprint(self.mem))
            count, after = forked(lambda: self._whole(call))
            for place in places if count else ():
                outcome = self._tear(call, 1 + int(place * count), name, (before, after))
                if outcome is None:  # this is the process in which the call is undone
                    break
                self.outcomes.append(outcome)
        else:
            self.outcomes.append(Outcome("whole", name))
        return super().called(call)

    def _whole(self, call: Callable[[], Any]) -> tuple[int, dict[str, Any]]:
        """Returns the number of points of a call, and what is left after it."""
        tracer = Tracer()
        with suppress(ms.MemstateError):
            tracer.run(call)
        return tracer.count, fingerprint(self.mem)

    def _tear(self, call: Callable[[], Any], at: int, name: str, marks: Any) -> Outcome | None:
        """Ends a call at one point in a forked process. Returns the outcome; None in that process if it goes on."""
        pipe, outcome = split()
        if not pipe:
            return outcome or Outcome("wrong", name, "", "the process ended without an answer")
        self.report, error = pipe, ERRORS[self.error]()
        tracer = Tracer(at, error)
        try:
            kind = self._judge(call, tracer, error, marks)
        except BaseException:
            self.reply(Outcome("wrong", name, tracer.place, traceback.format_exc(limit=-4)))
        self.undone = Outcome(kind, name, tracer.place)
        if kind != "undone" or at % SERVED or marks[0] == marks[1]:  # equal: the call may count a figure, no more
            self.reply(self.undone)
        return None

    def reply(self, outcome: Outcome) -> None:
        """Ends a forked process."""
        assert self.report is not None
        reply(self.report, outcome)

    def _judge(self, call: Callable[[], Any], tracer: Tracer, error: BaseException, marks: Any) -> str:
        mem, came = self.mem, False
        sys.unraisablehook = lambda _: None  # a discarded generator would report the exception again
        try:
            tracer.run(call)
        except BaseException as raised:
            came = raised is error or isinstance(raised, ms.Broken)
            if not (came or isinstance(raised, ms.MemstateError)):
                raise
        if not forked(lambda: broken(mem)):
            here = forked(lambda: fingerprint(mem))
            if here == marks[0]:
                return "undone"
            if here != marks[1]:
                differ = [", ".join(name for name in here if here[name] != mark[name]) for mark in marks]
                raise AssertionError(f"neither undone ({differ[0]}) nor done ({differ[1]})")
        elif not came:
            raise AssertionError("the exception was swallowed, and the manager is broken")
        kind = "done" if not forked(lambda: broken(mem)) else "noticed"
        self._recover()
        return kind

    def _recover(self) -> None:
        """Recovers, checks what is left, and asserts that requests can have everything."""
        mem = self.mem
        if mem.planes.asleep:
            mem.device.wake()
        with self.waiting():
            recovered = mem.recover()
        assert mem.stats().rows_used == 0 and not [one for one in recovered.lost if one in recovered.snapshots]
        audit = mem.audit()
        assert not audit.miscounts and not audit.leaked, audit
        slots = self.registers.table.slots.tolist()
        for register, known in self._texts().items():
            assert any(self.memory.holds(slots[register], text) for text in known), (
                f"{self.owner(register)} is not {known}"
            )
        with self.waiting():
            mem.recover(keep=False)
        assert mem.free_slots == self.settings.slots and mem.free_pages == self.settings.pages

    def waiting(self) -> AbstractContextManager[Any]:
        """Lets calls in a block wait for jobs of threads."""
        return self.lower.waiting() if self.lower else nullcontext()

    def _texts(self) -> dict[int, list[Text]]:
        """Returns register -> texts of which one is the state's, for all states that are left."""
        texts: dict[int, list[Text]] = {}
        size = self.settings.page_size
        rows = [*(row.text for row in self.model.rows.values()), *(entry.tokens for entry in self.model.entries)]
        whole_pages = [text[:end] for text in rows for end in range(size, len(text) + 1, size)]
        of_names = {encoded(self.names(text, fill=True)): text for text in whole_pages}
        whole: dict[object, bytes] = {}
        for _, node in self.mem.prefix.tree.walk() if self.mem.prefix else ():
            whole[node] = whole.get(node.parent, b"") + ids(node.key).tobytes()
            if node.snapshot:
                texts[node.snapshot.register] = [of_names[whole[node]]]
        for talk in owners.sessions(self.mem).opened.values():
            known = tuple(ids(talk.prompt.key).tolist())
            texts |= {one.register: [known[: one.length]] for one in talk.kept}
        kept = {snap.register: one.text for snap, one in self.snaps.items()}
        for register, snap in owners.states(self.mem).items():
            if register not in texts:  # a handle: of the script, or the answer of the call that was ended
                texts[register] = [kept[register]] if register in kept else [text[: snap.length] for text in rows]
        return texts


def scripts() -> dict[str, Script]:
    """Returns all scripts of the tests by name."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "\n@script(" in path.read_text():
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            found |= {f"{path.stem} {name}": one.script for name, one in vars(module).items() if hasattr(one, "script")}
    return found


class TornPlay(Play):
    """A script whose calls are ended by exceptions."""

    driven = Torn


def torn_script(of: Script, case: dict[str, Any], error: str, chosen: Places) -> list[Outcome]:
    """Runs a case of a script, and tries points of each of its calls. Returns the outcomes."""
    play = TornPlay(Backend("reference", "cpu"), **case)
    return _run(play.machine, lambda: of.run(play), error, chosen)  # type: ignore[arg-type]


def torn_program(program: Program, error: str, chosen: Places) -> list[Outcome]:
    """Runs a random program, and tries points of each of its calls. Returns the outcomes."""
    machine = Torn(program.drawn(), Backend("reference", "cpu"))
    return _run(machine, lambda: carry_out(program, machine), error, chosen)


def _run(
    machine: Torn, work: Callable[[], None], error: str, chosen: Places
) -> list[Outcome]:  # fmt: skip
    machine.error, machine.chosen = error, chosen  # type: ignore[method-assign]
    try:
        work()
    except BaseException as raised:
        if machine.report is None:
            raise
        text = "".join(traceback.format_exception(raised, limit=-4))
        machine.reply(machine.undone._replace(kind="wrong", text=f"undone, and then: {text}"))
    if machine.report is not None:
        machine.reply(machine.undone)
    return machine.outcomes


def work(job: tuple[str, str, int, int]) -> tuple[str, list[Outcome]]:
    """Runs a script, or a program if the name is one of KINDS. Returns its settings and its outcomes."""
    torch.set_num_threads(1)
    name, error, seed, points = job
    chance = random.Random(f"{name} {error} {seed}")

    def chosen() -> Sequence[float]:
        return [chance.random() for _ in range(points)]

    if name in KINDS:
        program = Program.random(seed, LENGTH, **KINDS[name])
        return str(program.drawn()), torn_program(program, error, chosen)
    script = scripts()[name]
    case = chance.choice(script.cases)
    return str(case), torn_script(script, case, error, chosen)

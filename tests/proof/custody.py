"""Tries every order of messages between an owner and two processes, with losses, repetitions and deaths of processes:

    python -m tests.proof.custody [--tokens 2] [--epochs 3]

It runs the very classes of examples/many_machines/owner.py. Messages are a set that only grows: each may come never,
late, twice, and after any other. A process may die at any time, the owner does not. A token names the epoch and the run
in which it was sampled, so what is sampled twice differs. The search also knows of which tokens a state truly is, which
the classes do not.

Wrong is: two that may speak; a token that was computed from other tokens than those that count; a request that neither
ends nor can be given again; and a state that a living process keeps for ever after the end.
"""

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from tests.support.sources import ROOT, changed

SOURCE = ROOT / "examples" / "many_machines" / "owner.py"
PLACES = (0, 1)
HEARD = ("count", "adopt")  # messages to the owner; the others, "run" and "take", go to the place that they name
LIMIT = 400_000
Fields = tuple[tuple[str, Any], ...]  # the attributes of an owner or a seat


class Process(NamedTuple):
    """A living process.

    seat: its seat. runs: the tokens of the state that runs in it; None: none runs. again: whether it took the word for
    this epoch a second time, which no process should.
    """

    seat: Fields
    runs: tuple[Any, ...] | None = None
    again: bool = False


class World(NamedTuple):
    """The owner, two processes of which a dead one is None, and all messages that may still come."""

    owner: Fields
    processes: tuple[Process | None, ...]
    messages: frozenset[tuple[Any, ...]]


class Found(NamedTuple):
    """The number of different worlds, and what is wrong in one of them."""

    worlds: int
    wrong: set[str]


@cache
def called(kind: type, fields: Fields, method: str, *given: Any) -> tuple[Fields, Any]:
    """Returns the attributes of an object after a call of a method, and its answer."""
    one = kind.__new__(kind)
    vars(one).update(fields)
    answer = getattr(one, method)(*given)
    return tuple(vars(one).items()), answer


class Custody:
    """All worlds of one request.

    Args:
        rules: the module with the classes `Owner` and `Seat`.
        tokens: number of tokens of the request.
        epochs: number of times that the owner may give it.
    """

    def __init__(self, rules: ModuleType | Any, tokens: int, epochs: int) -> None:
        self.owner, self.seat, self.tokens, self.epochs = rules.Owner, rules.Seat, tokens, epochs
        owner, seat = (tuple(vars(one).items()) for one in (rules.Owner(), rules.Seat()))
        self.first = World(owner, (Process(seat),) * 2, frozenset())

    def after(self, world: World) -> Iterator[tuple[World, str]]:
        """Yields each world that may come next, and what is wrong with this step."""
        owner = dict(world.owner)
        if not owner["ended"]:
            for place in PLACES if owner["epoch"] < self.epochs else ():
                then, (epoch, tokens) = called(self.owner, world.owner, "give", place)
                yield self.made(world, then, send=[("run", place, epoch, tokens)]), ""
            if len(owner["tokens"]) == self.tokens:
                yield self.made(world, tuple((owner | {"ended": True}).items())), ""
        for message in world.messages:
            if message[0] in HEARD:
                then, wrong = self.told(world.owner, message)
                if then != world.owner:
                    yield self.made(world, then), wrong
        for place, process in enumerate(world.processes):
            if process is not None:
                for now, send in self.moves(world, place, process):
                    yield self.made(world, place=place, process=now, send=send), ""

    def told(self, owner: Fields, message: tuple[Any, ...]) -> tuple[Fields, str]:
        """Returns the owner after a message, and what is wrong with it."""
        kind, _, *given, real = message
        then, counts = called(self.owner, owner, kind, *given)
        known = dict(owner)["tokens"]
        other = real[: len(known)] != known or (kind == "count" and real != known)
        return then, "a token of other tokens than those that count" if counts and other else ""

    def moves(self, world: World, place: int, process: Process) -> Iterator[tuple[Process | None, list[Any]]]:
        """Yields what a process may be next, and what it sends."""
        (seat, runs, again), fields = process, dict(process.seat)
        seen, parked = fields["seen"], fields["parked"]
        yield None, []  # it dies
        if called(self.seat, seat, "speaks")[1]:
            base = parked[1] if runs is None else runs
            if len(base) < self.tokens:
                token = (seen, again)
                yield process._replace(runs=(*base, token)), [("count", place, seen, len(base), token, base)]
            else:
                yield process, [("count", place, seen, len(base) - 1, base[-1], base[:-1])]
            if runs is not None:  # the owner asked it to park, or it does so for a reason of its own
                then, _ = called(self.seat, seat, "park", runs, runs)
                known, state = dict(then)["parked"]
                says = [("adopt", place, seen, known, state), ("take", 1 - place, seen, known, state)]
                yield Process(then, runs if called(self.seat, then, "speaks")[1] else None, again), says
        if parked:
            yield process, [("adopt", place, seen, *parked)]
        for epoch in range(1, self.epochs + 1):
            if called(self.owner, world.owner, "old", epoch)[1]:
                then, goes = called(self.seat, seat, "over", epoch)
                yield Process(then, None if goes else runs, again), []
        for message in world.messages:
            if message[0] not in HEARD and message[1] == place:
                yield self.heard(process, message), []

    def heard(self, process: Process, message: tuple[Any, ...]) -> Process:
        """Returns a process after a message."""
        seat, (kind, _, epoch, tokens, *state) = process.seat, message
        if kind == "take":
            return process._replace(seat=called(self.seat, seat, "take", epoch, tokens, *state)[0])
        seen, parked = dict(seat)["seen"], dict(seat)["parked"]
        then, taken = called(self.seat, seat, "run", epoch)
        if not taken:
            return process
        then, found = called(self.seat, then, "use", tokens)
        return Process(then, tokens if found is None else found + tokens[len(parked[0]) :], epoch <= seen)

    def made(
        self, world: World, owner: Fields | None = None, place: int = -1, process: Process | None = None, send: Any = ()
    ) -> World:  # fmt: skip
        """Returns a world after a change, without the messages that change nothing in it and never will."""
        processes = tuple(process if at == place else one for at, one in enumerate(world.processes))
        then = World(owner or world.owner, processes, world.messages.union(send))
        touched = {
            one for one in world.messages if (one[0] in HEARD if owner else one[0] not in HEARD and one[1] == place)
        }
        return then._replace(
            messages=then.messages - {one for one in touched.union(send) if not self.matters(then, one)}
        )

    def matters(self, world: World, message: tuple[Any, ...]) -> bool:
        """Returns whether a message may change something, now or later. Epochs and tokens only grow."""
        owner, (kind, place, epoch, *given) = dict(world.owner), message
        if kind in HEARD:
            grows = given[0] >= len(owner["tokens"]) if kind == "count" else len(given[0]) > len(owner["tokens"])
            may = not owner["ended"] and epoch == owner["epoch"] and grows
            return may or self.told(world.owner, message)[0] != world.owner
        process = world.processes[place]
        if process is None:
            return False
        seen = dict(process.seat)["seen"]
        return epoch > seen - (kind == "take") or self.heard(process, message) != process

    def search(self) -> Found:
        """Visits all worlds, up to the first wrong one."""
        numbers, order, edges, wrong = {self.first: 0}, [self.first], list[list[int]](), set[str]()
        todo = deque(order)
        while todo and len(order) < LIMIT:
            world, targets = todo.popleft(), list[int]()
            edges.append(targets)
            newest = [one for one in world.processes if one and self.may_speak(world, one)]
            wrong |= {"two that may speak"} if len(newest) > 1 else set()
            for then, why in self.after(world):
                wrong |= {why} - {""}
                if then not in numbers:
                    numbers[then] = len(order)
                    order.append(then)
                    todo.append(then)
                targets.append(numbers[then])
            if wrong:
                return Found(len(order), wrong)
        return Found(len(order), {"too many"} if todo else self.for_ever(order, edges))

    def may_speak(self, world: World, process: Process) -> bool:
        """Returns whether what a process says would count."""
        owner, speaks = dict(world.owner), called(self.seat, process.seat, "speaks")[1]
        return bool(speaks and dict(process.seat)["seen"] == owner["epoch"] and not owner["ended"])

    def for_ever(self, order: list[World], edges: list[list[int]]) -> set[str]:
        """Returns what is wrong because something can never come."""
        ended = [dict(world.owner)["ended"] for world in order]
        ends = self.reach(order, edges, lambda world: dict(world.owner)["ended"])
        clean = self.reach(order, edges, lambda world: not any(map(self.holds, world.processes)), deaths=False)
        stuck = [
            at for at, world in enumerate(order)
            if at not in ends and any(world.processes) and dict(world.owner)["epoch"] < self.epochs
        ]  # fmt: skip
        kept = [at for at, over in enumerate(ended) if over and at not in clean]
        return {"neither an end nor another epoch"} if stuck else {"held for ever after the end"} if kept else set()

    def holds(self, process: Process | None) -> bool:
        return process is not None and (process.runs is not None or bool(dict(process.seat)["parked"]))

    def reach(
        self, order: list[World], edges: list[list[int]], goal: Callable[[World], bool], deaths: bool = True
    ) -> set[int]:  # fmt: skip
        """Returns the numbers of the worlds from which one with `goal` may come, with or without deaths on the way."""
        before = [list[int]() for _ in order]
        for at, targets in enumerate(edges):
            for to in targets:
                if deaths or order[at].processes.count(None) == order[to].processes.count(None):
                    before[to].append(at)
        found = {at for at, world in enumerate(order) if goal(world)}
        todo = list(found)
        while todo:
            more = [at for at in before[todo.pop()] if at not in found]
            found |= {*more}
            todo += more
        return found


def check(source: str = "", tokens: int = 2, epochs: int = 3) -> Found:
    """Tries all worlds of the rules in a source text; without one, of those of the example."""
    return Custody(changed(source or SOURCE.read_text()), tokens, epochs).search()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    chosen = parser.parse_args()
    found = check("", chosen.tokens, chosen.epochs)
    print(f"{found.worlds} worlds, {', '.join(sorted(found.wrong)) or 'nothing wrong'}")
    return bool(found.wrong)


if __name__ == "__main__":
    sys.exit(main())

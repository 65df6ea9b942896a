"""Breadth-first search over the states of one case: every schedule of a length, each distinct state once."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tests.proof.exhaustive.checkpoint import Checkpoint
from tests.proof.exhaustive.state import name
from tests.proof.exhaustive.world import CASES, Move, World
from tests.proof.stateful.settings import Settings


class Node(NamedTuple):
    """A state that was reached: by a move, from another one."""

    before: "Node | None"
    move: Move


@dataclass
class Found:
    """What a search has seen.

    depth: moves of the longest schedules of which all were tried; calls: how often each was made from a new state.
    """

    case: str
    depth: int = 0
    states: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    difference: str = ""

    @property
    def transitions(self) -> int:
        return self.calls.total()


class Search:
    """All schedules of one case, from an empty manager and from busy ones."""

    def __init__(self, case: str, settings: Settings) -> None:
        self.world, self.found = World(settings), Found(case)
        self._path: list[tuple[Node | None, Checkpoint]] = [(None, Checkpoint(self.world))]
        self._moves: list[Move] = []  # that lead to the present state
        self._seen: set[bytes] = set()

    def run(self, depth: int, seconds: float) -> Found:
        """Tries all schedules up to `depth` moves, or as deep as `seconds` allow."""
        began, found = time.monotonic(), self.found
        try:
            frontier = self._starts()
            while frontier and time.monotonic() - began < seconds:
                level: list[Node | None] = []
                last = found.depth == depth
                for node in frontier:
                    self._expand(node, level, last)
                    if time.monotonic() - began > seconds:
                        return found
                if last:
                    break
                frontier = level
                found.depth += 1
        except Exception as error:
            told = "\n  ".join(map(str, self._moves))
            found.difference = f"{found.case}: {type(error).__name__}: {error}\n  {told}"
        finally:
            found.states, found.seconds = len(self._seen), time.monotonic() - began
        return found

    def _starts(self) -> list[Node | None]:
        """An empty manager, and the stages of a busy one."""
        self._seen.add(name(self.world))
        found: list[Node | None] = [None]
        for stage in self.world.warm_up():
            node = None
            for move in stage:
                node = Node(node, move)
            self._moves = self._go(node)
            if (known := name(self.world)) not in self._seen:
                self._seen.add(known)
                found.append(node)
        return found

    def _expand(self, node: Node | None, level: list[Node | None], last: bool) -> None:
        """Ends everything from a state; unless it is one of the last, makes each move from it first."""
        world, seen = self.world, self._seen
        self._moves = self._go(node)
        if not last:
            here, before = Checkpoint(world), name(world)
            for move in list(world.moves()):
                self._moves.append(move)
                refused = world.apply(move)
                self.found.calls[move[0]] += 1
                after = name(world)
                if refused and after != before:
                    raise AssertionError("a refused call changed something")
                if after not in seen:
                    seen.add(after)
                    level.append(Node(node, move))
                self._moves.pop()
                here.restore()
        self._moves.append(("everything ends",))
        world.end()

    def _go(self, node: Node | None) -> list[Move]:
        """Comes to a state, from the nearest one before it whose contents are still kept."""
        way: list[Node] = []
        at, kept = node, {id(on): i for i, (on, _) in enumerate(self._path)}
        while id(at) not in kept:
            assert at
            way.append(at)
            at = at.before
        del self._path[kept[id(at)] + 1 :]
        self._path[-1][1].restore()
        moves = _moves(at)
        for step in reversed(way):
            moves.append(step.move)
            self.world.apply(step.move)
            if step is not node:
                self._path.append((step, Checkpoint(self.world)))
        return moves


def _moves(node: Node | None) -> list[Move]:
    found: list[Move] = []
    while node:
        found.append(node.move)
        node = node.before
    return found[::-1]


def work(case: str, depth: int, seconds: float) -> Found:
    """Searches a case in a process of its own."""
    torch.set_num_threads(1)
    return Search(case, CASES[case]).run(depth, seconds)

"""Searches the states of one case breadth-first. Tries all schedules of a length, but expands equal states once."""

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
    """A state: the node before it (None for the empty manager), and the move that first led from there to it."""

    before: "Node | None"
    move: Move


@dataclass
class Found:
    """The result of a search.

    depth: number of moves up to which all schedules were tried. states: number of distinct states. calls: name of a
    move -> how often it was made. difference: text of the first error, with its schedule.
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
    """A search through all schedules of one case. They start from an empty manager, and from busy ones."""

    def __init__(self, case: str, settings: Settings) -> None:
        self.world, self.result = World(settings), Found(case)
        self._path: list[tuple[Node | None, Checkpoint]] = [(None, Checkpoint(self.world))]
        self._moves: list[Move] = []  # moves from the start to the present state
        self._seen: set[bytes] = set()

    def run(self, depth: int, seconds: float) -> Found:
        """Tries all schedules up to `depth` moves, or as deep as `seconds` allow."""
        began, result = time.monotonic(), self.result
        try:
            frontier = self._starts()
            while frontier and time.monotonic() - began < seconds:
                level: list[Node | None] = []
                last = result.depth == depth
                for node in frontier:
                    self._expand(node, level, last)
                    if time.monotonic() - began > seconds:
                        return result
                if last:
                    break
                frontier = level
                result.depth += 1
        except Exception as error:
            told = "\n  ".join(map(str, self._moves))
            result.difference = f"{result.case}: {type(error).__name__}: {error}\n  {told}"
        finally:
            result.states, result.seconds = len(self._seen), time.monotonic() - began
        return result

    def _starts(self) -> list[Node | None]:
        """Returns the nodes to start from: None, for the empty manager, and the stages of `World.warm_up`."""
        self._seen.add(name(self.world))
        starts: list[Node | None] = [None]
        for stage in self.world.warm_up():
            node = None
            for move in stage:
                node = Node(node, move)
            self._moves = self._go(node)
            if (known := name(self.world)) not in self._seen:
                self._seen.add(known)
                starts.append(node)
        return starts

    def _expand(self, node: Node | None, level: list[Node | None], last: bool) -> None:
        """Makes each move from a state, except at the last level. Then, in this state, ends all rows and holders."""
        world, seen = self.world, self._seen
        self._moves = self._go(node)
        if not last:
            here, before = Checkpoint(world), name(world)
            for move in list(world.moves()):
                self._moves.append(move)
                refused = world.apply(move)
                self.result.calls[move[0]] += 1
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
        """Brings the manager to a state, from the nearest checkpoint before it. Returns all moves from the start."""
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
    moves: list[Move] = []
    while node:
        moves.append(node.move)
        node = node.before
    return moves[::-1]


def work(case: str, depth: int, seconds: float) -> Found:
    """Searches one case in a worker process, and returns the result."""
    torch.set_num_threads(1)
    return Search(case, CASES[case]).run(depth, seconds)

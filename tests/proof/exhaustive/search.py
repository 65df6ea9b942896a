"""Breadth-first search over the states of one case: every schedule of a length, each distinct state once."""

import time
from dataclasses import dataclass

from tests.proof.exhaustive.checkpoint import Checkpoint
from tests.proof.exhaustive.state import check, drain, name
from tests.proof.exhaustive.world import Case, Move, Violation, World

Node = tuple["Node | None", Move]  # the schedule that leads to a state, last move first


@dataclass
class Found:
    """What a search has seen. depth: moves of the longest schedules of which all were tried."""

    case: str
    depth: int = 0
    states: int = 1
    transitions: int = 0
    seconds: float = 0.0
    difference: str = ""


def schedule(node: Node | None) -> list[Move]:
    moves = []
    while node:
        node, move = node
        moves.append(move)
    return moves[::-1]


def search(case: Case, depth: int, seconds: float) -> Found:
    """Tries all schedules up to `depth` moves, or as deep as `seconds` allow."""
    began, found = time.monotonic(), Found(case.name)
    world = World(case)
    start = Checkpoint(world)
    seen = {name(world)}
    frontier: list[Node | None] = [None]
    moves: list[Move] = []
    try:
        while frontier and found.depth < depth:
            level: list[Node | None] = []
            for node in frontier:
                start.restore()
                for move in (moves := schedule(node)):
                    world.apply(move)
                    check(world)
                here, before = Checkpoint(world), name(world)
                for move in list(world.moves()):
                    here.restore()
                    moves.append(move)
                    refused = world.apply(move)
                    found.transitions += 1
                    check(world)
                    after = name(world)
                    if refused and after != before:
                        raise Violation("a refused call changed something")
                    if after not in seen:
                        seen.add(after)
                        level.append((node, move))
                    moves.pop()
                here.restore()
                moves.append(("drain",))
                drain(world)
                moves.pop()
                if time.monotonic() - began > seconds:
                    return found
            frontier = level
            found.depth += 1
        for node in frontier:
            start.restore()
            for move in (moves := schedule(node)):
                world.apply(move)
                check(world)
            moves.append(("drain",))
            drain(world)
            if time.monotonic() - began > seconds:
                break
    except Exception as error:
        found.difference = f"{case.name}: {type(error).__name__}: {error}\n  " + "\n  ".join(map(str, moves))
    finally:
        found.states, found.seconds = len(seen), time.monotonic() - began
    return found

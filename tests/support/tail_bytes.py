"""Computes the bytes that speculation moves and keeps under four schemes, from the shapes of a layout.

A step verifies `tokens` tokens of a request, and `accepted` of them are real. Inputs of the model and outputs do not
count, because they are the same under all schemes.
"""

from collections.abc import Callable
from typing import NamedTuple

from memstate.state.layout import StateLayout


class Cost(NamedTuple):
    """moved: bytes moved per accepted token. scratch: bytes that a request has besides its state."""

    moved: float
    scratch: int


def of_token(layout: StateLayout) -> int:
    """Returns the bytes that tails keep per token, in all layers. In planes of rings, axis 0 counts the places."""
    rows = layout.rows
    assert rows is not None
    return sum(rows.layers_of(plane) * plane.nbytes // plane.shape[0] for plane in rows.planes)


def tail_step(state: int, token: int, tokens: int, pending: float) -> float:
    """Returns the bytes of a step: it reads and stores a state, reads pending inputs, and keeps its own inputs."""
    return 2 * state + (pending + tokens) * token


def deferred(state: int, token: int, defer: int) -> float:
    """Returns the bytes per token of plain decode that reads the state in each step, but stores it every `defer` steps.

    Between the stores, the inputs wait in the tail.
    """
    return state * (1 + 1 / defer) + token * (1 + (defer - 1) / 2) * (defer > 1)


SCHEMES: dict[str, Callable[[int, int, int, float], tuple[float, int]]] = {
    "a state after every token; accept copies one": lambda s, t, n, a: ((1 + n) * s + 2 * s, n * s),
    "a slot for every token; accept chooses one": lambda s, t, n, a: ((1 + n) * s, n * s),
    "the inputs of every token; accept adds them to the state": lambda s, t, n, a: (3 * s + (n + a) * t, n * t),
    "a tail: the next step adds them": lambda s, t, n, a: (tail_step(s, t, n, a), (3 * n - 1) * t),
}


def costs(layout: StateLayout, tokens: int, accepted: float) -> dict[str, Cost]:
    """Returns scheme -> its cost, for a layout with tails."""
    state, token = layout.payload_bytes_per_slot, of_token(layout)
    bytes_of = {scheme: of(state, token, tokens, accepted) for scheme, of in SCHEMES.items()}
    return {scheme: Cost(moved / accepted, scratch) for scheme, (moved, scratch) in bytes_of.items()}

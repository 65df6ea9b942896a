"""What speculation costs under four schemes, from the shapes of a layout. Knows no kernel.

A step verifies `tokens` tokens of a request, of which `accepted` turn out to be real. Inputs of the model and outputs
are the same under all schemes, and are left out.
"""

from collections.abc import Callable
from typing import NamedTuple

from memstate.state.layout import StateLayout


class Cost(NamedTuple):
    """Bytes of states and of inputs that are kept: moved for an accepted token, and beside the state of a request."""

    moved: float
    scratch: int


def of_token(layout: StateLayout) -> int:
    """Bytes that a tail keeps of one token, in all layers; rings have as many places as each of their planes says."""
    rows = layout.rows
    assert rows is not None
    return sum(rows.layers_of(plane) * plane.nbytes // plane.shape[0] for plane in rows.planes)


def tail_step(state: int, token: int, tokens: int, pending: float) -> float:
    """A state is read and one is stored; pending inputs are read, those of the step are kept."""
    return 2 * state + (pending + tokens) * token


def deferred(state: int, token: int, defer: int) -> float:
    """Bytes for a token of plain decode: a state is read, and one of `defer` is stored; inputs wait in the tail."""
    return state * (1 + 1 / defer) + token * (1 + (defer - 1) / 2) * (defer > 1)


SCHEMES: dict[str, Callable[[int, int, int, float], tuple[float, int]]] = {
    "a state after every token; accept copies one": lambda s, t, n, a: ((1 + n) * s + 2 * s, n * s),
    "a slot for every token; accept chooses one": lambda s, t, n, a: ((1 + n) * s, n * s),
    "the inputs of every token; accept adds them to the state": lambda s, t, n, a: (3 * s + (n + a) * t, n * t),
    "a tail: the next step adds them": lambda s, t, n, a: (tail_step(s, t, n, a), (3 * n - 1) * t),
}


def costs(layout: StateLayout, tokens: int, accepted: float) -> dict[str, Cost]:
    """The schemes, for a layout with tails."""
    state, token = layout.payload_bytes_per_slot, of_token(layout)
    found = {scheme: of(state, token, tokens, accepted) for scheme, of in SCHEMES.items()}
    return {scheme: Cost(moved / accepted, scratch) for scheme, (moved, scratch) in found.items()}

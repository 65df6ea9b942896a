"""Counts the bytes that a step with a tail moves, from addresses, and compares them with the figures of the docs.

Computes the bytes that speculation moves and keeps under four schemes, from the shapes of a layout. A step verifies
`tokens` tokens of a request, and `accepted` of them are real. Inputs of the model and outputs do not count, because
they are the same under all schemes.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate.state.presets import from_config
from tests.state.test_tails import BATCH, KINDS, RING, TAIL, steps
from tests.support.addresses import LOAD, STORE, Log
from tests.support.recorded import recorded
from tests.support.sources import ROOT


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


def moved(log: Log, planes: Planes, kind: str, names: str = "") -> int:
    """Returns the bytes loaded or stored in planes whose names begin with `names`. A launch counts each byte once."""
    touched, total = [launch.touched(kind) for launch in log.launches], 0
    for plane in (plane for name, plane in planes.items() if name.startswith(names)):
        start = plane.data_ptr()
        total += sum(int(((at >= start) & (at < start + plane.nbytes)).sum()) for at in touched)
    return total


@pytest.mark.sample(4)
@pytest.mark.parametrize(("pending", "stores"), [(0, True), (2, True), (5, True), (3, False)])
@pytest.mark.parametrize("model", [kind for kind in KINDS if kind != "several convolutions"])
def test_T21_a_step_reads_and_stores_a_state_once_whatever_it_verifies(model: str, pending: int, stores: bool) -> None:
    """The step reads pending tokens in the rings and stores its own tokens there.

    A window needs only the last pending ones.
    """
    layout = from_config(KINDS[model], tail=TAIL)
    planes = Planes(layout, 4, Backend("reference"), rows=2)
    rings = planes.rows
    assert rings is not None
    for plane in [*planes.values(), *rings.values()]:
        plane.zero_()
    with recorded() as log:
        steps(planes, model, Backend("interpreter"), pending, stores)
    state, token = BATCH * layout.payload_bytes_per_slot, BATCH * of_token(layout)
    matrices, kept = (
        BATCH * sum(of.layers_of(plane) * plane.nbytes for plane in of.planes if plane.name.startswith("ssm"))
        for of in (layout, rings.layout)
    )
    assert moved(log, planes, STORE) == state * stores and moved(log, rings, STORE) == TAIL * token
    assert moved(log, planes, LOAD, "ssm") == matrices and moved(log, rings, LOAD, "ssm") == pending * kept // RING
    read, again = moved(log, planes, LOAD), moved(log, rings, LOAD)
    assert read <= state and again <= pending * token and (pending or read == state)
    together = read + state + again + TAIL * token
    assert together <= tail_step(state, token, TAIL, pending), "the figures of docs/speculation.md"


def test_the_page_has_the_costs_that_shapes_give() -> None:
    page = (ROOT / "docs" / "speculation.md").read_text()
    rows = [
        f"| {scheme} | {few.moved / 2**20:.0f} | {few.scratch / 2**20:.1f} | {many.moved / 2**20:.0f} "
        f"| {many.scratch / 2**20:.1f} |"
        for (scheme, few), many in zip(
            costs(ms.presets.qwen3_next(tail=4), 4, 2.5).items(),
            costs(ms.presets.qwen3_next(tail=8), 8, 4).values(), strict=True,
        )
    ]  # fmt: skip
    table = "\n".join(rows)
    assert table in page, f"docs/speculation.md should have these rows:\n{table}"
    slot = ms.presets.qwen3_next().bytes_per_slot / 2**20
    assert re.findall(r"plain decode moves (\d+) MiB a token", page) == [f"{2 * slot:.0f}"]
    layout = ms.presets.qwen3_next(tail=4)
    waits = [deferred(layout.payload_bytes_per_slot, of_token(layout), n) / 2**20 for n in (2, 4)]
    assert re.findall(r"`defer=(\d)` moves (\d+) MiB", page) == [("2", f"{waits[0]:.0f}"), ("4", f"{waits[1]:.0f}")]

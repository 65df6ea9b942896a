"""Counts the bytes that a step with a tail moves, from addresses, and compares them with the figures of the docs."""

import re

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.planes import Planes
from memstate.state.presets import from_config
from tests.state.test_tails import BATCH, KINDS, RING, TAIL, steps
from tests.support.addresses import LOAD, STORE, Log
from tests.support.recorded import recorded
from tests.support.sources import ROOT
from tests.support.tail_bytes import costs, deferred, of_token, tail_step


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

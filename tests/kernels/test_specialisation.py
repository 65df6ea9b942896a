"""Serving never compiles: it asks Triton for no kernel under a key that warm-up had not asked for.

The launches are those of `tests.support.op_launches` and those of managers that serve, recorded in a process of its own
without Triton's interpreter. Nothing runs on a recorder, so results of the device stay zero; the host's mirror is
exact.
"""

import json
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import OPS
from memstate.kernels.tables import StepRecord
from tests.support.build import build
from tests.support.kernel_runs import not_interpreted
from tests.support.sampling import PROOF

TARGETS = ("sm_90", "gfx942") if PROOF else ("sm_90",)
PLANES = (ms.Plane("conv", (3,), torch.bfloat16), ms.Plane("ssm", (2, 4), torch.float32))
LAYOUT = ms.StateLayout(PLANES, layers=2)
STRATEGIES: tuple[ms.Tracking, ...] = (ms.NoTracking(4), ms.PingPong(4), ms.LazyPingPong(4), ms.Redirect(4))
SIZES = ((0, 0, 8), (0, 1, 8), (1, 0, 8), (1, 1, 8), (0, 1, 1), (1, 0, 3))  # overlap, direct hits, batch
# Settings of managers that serve, by name.
SERVED = {
    f"{type(tracking).__name__}, overlap {overlap}, direct hits {hits}, batch {most}": {
        "tracking": tracking, "overlap": bool(overlap), "direct_hits": bool(hits), "max_batch": most
    }
    for tracking, (overlap, hits, most) in product(STRATEGIES, SIZES)
} | {
    f"{type(tracking).__name__}, {how}": {"tracking": tracking, "overlap": False, "max_batch": 5, how: True}
    for tracking, how in product(STRATEGIES, ("in_place", "speculation"))
}  # fmt: skip
LARGEST = (32, 33, 64, 65, 128, 129, 256)  # batches on both sides of what compiles anew

LAZY = {"tracking": ms.LazyPingPong(2), "overlap": False}

# Keys of an operation over batches 1..256 of one model, where not 1.
POWERS = 4  # a batch is compiled for the next power of two from 32 on
EXPECTED = {
    "claim": POWERS,
    "release": POWERS,
    "plan": POWERS,
    "accept": POWERS,
    "conv_step": 3,  # storing slots, storing a window, and storing slots of marks too
    "gated_delta_step": 4,
    "selective_step": 3,
    "scatter_inputs": 2,  # to a plane stored as `tap channel`, and as `channel tap`
    "pack_slots": 2,  # slots in registers, and slots named directly
    "unpack_slots": 2,
    "pack_int8": 2,
    "unpack_int8": 2,
}


# -- managers that serve, in the process without the interpreter -------------------------------------------------------


def manager(max_batch: int, **settings: Any) -> ms.StateManager:
    return build(
        LAYOUT, slots=900, max_requests=2 * max_batch, max_batch=max_batch, pages=128 * max_batch, page_size=2,
        pages_per_row=64, backend="interpreter", **settings,
    )  # fmt: skip


def decode(mem: ms.StateManager, rows: Sequence[ms.Row], batch: int, steps: int = 9, end: int = 0) -> None:
    """Steps padded to `batch`: a row takes one token, or all up to its boundary; the last step ends `end` rows."""
    flying: deque[ms.Step] = deque()
    for step in range(steps + mem.overlap):
        if step < steps:
            chunks = [mem.next_boundary(row) - mem.length(row) for row in rows]
            tokens = [chunk if (i + step) % 3 == 0 else 1 for i, chunk in enumerate(chunks)]
            flying.append(mem.plan([*rows, *[None] * (batch - len(rows))], tokens + [0] * (batch - len(rows))))
        if step >= mem.overlap:
            over = end if step + 1 == steps + mem.overlap else 0
            mem.settle(flying.popleft(), [i < over for i in range(batch)])


def speculate(mem: ms.StateManager, rows: Sequence[ms.Row], batch: int) -> None:
    """Windows of different sizes, of which some tokens, all or none are accepted."""
    for tokens in (1, 2, 3):
        padding = batch - len(rows)
        step = mem.plan([*rows, *[None] * padding], [tokens] * len(rows) + [0] * padding, window=True)
        shapes = {plane.name: (LAYOUT.layers, batch, tokens, *plane.shape) for plane in PLANES}
        windows = {plane.name: torch.zeros(shapes[plane.name], dtype=plane.dtype) for plane in PLANES}
        mem.accept(step, [min(i, int(most)) for i, most in enumerate(step.tokens_of)], windows)


def serve(mem: ms.StateManager) -> None:
    """Everything that a scheduler does, at every size of a batch, padded and not."""
    most = mem._parts.log.max_batch
    for batch, padded in [(n, n) for n in range(1, most + 1)] + [(n, most) for n in range(1, most)]:
        mem.settle(mem.plan([None] * padded))
        rows = mem.admit([ms.Request((batch, i), length=2, snapshot_at=[6] * (i % 2)) for i in range(batch)])
        mem.extend(rows, [64] * batch)
        mem.shortfall(rows)
        decode(mem, rows, padded, end=batch // 2)
        if mem.forward.speculation:
            speculate(mem, rows, padded)
        mem.read_slots(rows)
        mem.abort(mem.fork(rows[-1], ["fork"]).rows)
        kept = mem.publish(rows)
        mem.abort(rows[:1])
        kept += mem.release(rows[1 : batch // 2], publish=True) + mem.retract(rows[max(1, batch // 2) :])
        snapshots = [snap for snap in kept if snap]
        rows = mem.admit([ms.Request("hit", length=snap.length + 24, resume=snap) for snap in snapshots[:most]])
        decode(mem, rows, most, steps=3)
        snapshots += [snap for snap in mem.cancel(mem.plan(rows), publish=True) if snap]
        mem.drop(snapshots)
    mem.scrub_null()
    mem.submit()
    mem.audit()
    mem.reset()
    decode(mem, mem.admit([ms.Request("fresh", length=20)]), most)


def every_size(mem: ms.StateManager) -> None:
    """Steps of every size that could compile anew, of rows that all supersede a lane; one row ends at each."""
    most = mem._parts.log.max_batch
    rows = mem.admit([ms.Request(i, length=128) for i in range(most)])
    around = [2**k + near for k in range(9) for near in (-1, 0, 1)]
    for batch in sorted({n for n in (*around, most) if 1 <= n <= most}):
        for ended in (False, False, False, True):
            mem.settle(mem.plan(rows[:batch]), [i + 1 == batch and ended for i in range(batch)])


def shifted(mem: ms.StateManager) -> None:
    """A planted defect: the columns of step records lie one behind the other, aligned by chance."""
    mem._parts.log._columns = StepRecord(
        *torch.zeros(len(StepRecord._fields), mem._parts.log.max_batch, dtype=torch.int32)
    )
    every_size(mem)


def record() -> Iterator[tuple[str, Any]]:
    from memstate.kernels import dispatch
    from tests.support import launch_keys, op_launches

    dispatch.choose = lambda name, device: name  # kernels, although on a CPU and not interpreted

    def served(mem: ms.StateManager, run: Callable[[ms.StateManager], None]) -> dict[str, launch_keys.Keys] | str:
        try:
            with recorder.recorded() as warm:
                ms.warm_up(mem)
            with recorder.recorded() as keys:
                run(mem)
        except Exception:  # one broken manager must not hide the others
            return traceback.format_exc()
        return {"warm": warm, "served": keys}

    for target in TARGETS:
        recorder = launch_keys.Recorder(target)
        yield f"{target} planted", launch_keys.planted_launches(recorder)
        yield from ((f"{target} {op}", op_launches.run_op(recorder, op)) for op in OPS)
        for name, settings in SERVED.items() if target == TARGETS[0] else ():
            yield name, served(manager(**settings), serve)
        for most in LARGEST:
            yield f"{target} {most}", served(manager(most, **LAZY), every_size)
        yield f"{target} shifted", served(manager(37, **LAZY), shifted)
        yield f"{target} arguments", recorder.names


# -- what was recorded ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return not_interpreted(__file__)


def differing(arguments: list[str], keys: list[str]) -> str:
    """The arguments that keys differ in, with what Triton makes of them, and the options: for people."""
    rows = [key[2 : key.index(")]{")].split("), (") for key in keys]
    columns = zip(arguments, zip(*rows, strict=True), strict=True)
    found = [f"{name}: {sorted(set(kinds))}" for name, kinds in columns if len(set(kinds)) > 1]
    return "; ".join([*found, *sorted({key[key.index(")]{") + 2 :] for key in keys})])


each_target = pytest.mark.parametrize("target", TARGETS)


@each_target
def test_recorder_sees_what_triton_specialises(recorded: dict[str, Any], target: str) -> None:
    """Triton tells apart 1, multiples of 16 and the rest, pointers on 16 bytes and others, int32 and int64."""
    assert recorded[f"{target} planted"] == {
        "nothing": 1, "not specialised": 1, "beyond int32": 2, "specialised": 3, "alignment": 2, "constant": 2,
    }  # fmt: skip


@each_target
@pytest.mark.parametrize("op", OPS)
def test_an_operation_has_one_key_for_all_calls_of_a_model(recorded: dict[str, Any], target: str, op: str) -> None:
    found = recorded[f"{target} {op}"]
    assert isinstance(found, dict), found
    ((kernel, keys),) = found.items()
    what = differing(recorded[f"{target} arguments"][kernel], keys)
    assert len(keys) == EXPECTED.get(op, 1), f"{kernel} has {len(keys)} keys, by {what}"


def unexpected(run: dict[str, dict[str, list[str]]] | str) -> dict[str, list[str]]:
    """Keys that serving asked for and warm-up had not."""
    assert isinstance(run, dict), run
    new = {kernel: sorted(set(keys) - set(run["warm"].get(kernel, ()))) for kernel, keys in run["served"].items()}
    return {kernel: keys for kernel, keys in new.items() if keys}


def check_nothing_new(recorded: dict[str, Any], name: str, target: str) -> None:
    new = []
    for kernel, keys in unexpected(recorded[name]).items():
        known = recorded[name]["warm"].get(kernel, [])
        what = differing(recorded[f"{target} arguments"][kernel], [*known, *keys])
        new.append(f"{kernel}: {len(keys)} besides the {len(known)} keys of warm-up, by {what}")
    assert not new, "\n".join(new)


@pytest.mark.parametrize("name", SERVED)
def test_serving_asks_for_nothing_new(recorded: dict[str, Any], name: str) -> None:
    check_nothing_new(recorded, name, TARGETS[0])
    kernels = {f"registers.{kernel}" for kernel in ("_ownership", "_resolve", "_audit")}
    kernels |= {"copy._move", "tracking._plan"}
    kernels |= {"speculation._accept", "scatter._scatter"} if "speculation" in name else set()
    assert set(recorded[name]["served"]) == kernels


@each_target
@pytest.mark.parametrize("most", LARGEST)
def test_warm_up_covers_every_batch_up_to_the_largest(recorded: dict[str, Any], target: str, most: int) -> None:
    check_nothing_new(recorded, f"{target} {most}", target)
    served = recorded[f"{target} {most}"]["served"]
    powers = len([power for power in (32, 64, 128, 256) if power < 2 * most])
    assert len(served["tracking._plan"]) == powers


@each_target
def test_what_warm_up_lacks_is_found(recorded: dict[str, Any], target: str) -> None:
    """Planted: a warm-up for batches up to 64 and serving up to 128; columns of step records that are not aligned."""
    run = {"warm": recorded[f"{target} 64"]["warm"], "served": recorded[f"{target} 128"]["served"]}
    assert {kernel: len(keys) for kernel, keys in unexpected(run).items()} == {"tracking._plan": 1}
    assert "tracking._plan" in unexpected(recorded[f"{target} shifted"])


if __name__ == "__main__":
    json.dump(dict(record()), sys.stdout)

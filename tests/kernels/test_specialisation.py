"""Tests that serving never compiles: warm-up has asked Triton for each key for which serving asks.

A process without Triton's interpreter records the launches of `tests.support.op_launches` and of a manager. A recorder
runs no kernel, so results of the device stay zero, but the host's mirror is exact.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import LAUNCHES, OPS
from tests.support.build import build
from tests.support.kernel_runs import not_interpreted
from tests.support.sampling import PROOF

TARGETS = ("sm_90", "gfx942") if PROOF else ("sm_90",)
LAYOUT = ms.StateLayout((ms.Plane("conv", (3,), torch.bfloat16), ms.Plane("ssm", (2, 4), torch.float32)), layers=2)
LARGEST = (32, 33, 64, 65, 128, 129, 256)  # `max_batch`: below and above sizes that need another compilation

# op -> number of keys for batches of 1 to 256 rows of one model; an op that is not named has one key
POWERS = 4  # a batch is compiled for the next power of two: 32, 64, 128 or 256
EXPECTED = {
    "claim": POWERS,
    "release": POWERS,
    "plan": POWERS,
    "conv_step": 4,  # plain, with marks, with a tail, and with trees
    "gated_delta_step": 5,
    "conv_delta_step": 4,  # for each of its two kernels
    "selective_step": 4,
    "mamba3_step": 2,
    "pack_slots": 2,  # slots in registers, and slots named directly
    "unpack_slots": 2,
    "pack_int8": 2,
    "unpack_int8": 2,
}


# -- the process without the interpreter -----------------------------------------------------------------------------


def manager(most: int) -> ms.StateManager:
    return build(
        LAYOUT, slots=900, max_requests=2 * most, max_batch=most, pages=128 * most, page_size=2, pages_per_row=64,
        backend="interpreter", tracking=ms.LazyPingPong(2), overlap=False,
    )  # fmt: skip


def serve(mem: ms.StateManager, most: int) -> None:
    """Runs steps of all batch sizes that could need a compilation.

    In these steps, rows replace the states in their lanes. At each batch size, one row ends.
    """
    rows = mem.admit([ms.Request(i, length=128) for i in range(most)])
    around = [2**k + near for k in range(9) for near in (-1, 0, 1)]
    for batch in sorted({n for n in (*around, most) if 1 <= n <= most}):
        for ended in (False, False, False, True):
            mem.settle(mem.plan(rows[:batch]), [i + 1 == batch and ended for i in range(batch)])


def record() -> Iterator[tuple[str, Any]]:
    from memstate.kernels import dispatch
    from tests.support import launch_keys, op_launches

    dispatch.choose = lambda name, device: name  # else a CPU would get the reference
    for target in TARGETS:
        recorder = launch_keys.Recorder(target)
        yield from ((f"{target} {op}", op_launches.run_op(recorder, op)) for op in OPS)
        for most in LARGEST:
            mem = manager(most)
            with recorder.recorded() as warm:
                ms.warm_up(mem)
            with recorder.recorded() as served:
                serve(mem, most)
            yield f"{target} {most}", {"warm": warm, "served": served}
        yield f"{target} arguments", recorder.names


# -- recorded launches ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return not_interpreted(__file__)


def differing(arguments: list[str], keys: list[str]) -> str:
    """Returns, for messages, the arguments in which keys differ, with Triton's specialisation of each, and
    the options.
    """
    rows = [key[2 : key.index(")]{")].split("), (") for key in keys]
    columns = zip(arguments, zip(*rows, strict=True), strict=True)
    lines = [f"{name}: {sorted(set(kinds))}" for name, kinds in columns if len(set(kinds)) > 1]
    return "; ".join([*lines, *sorted({key[key.index(")]{") + 2 :] for key in keys})])


each_target = pytest.mark.parametrize("target", TARGETS)


@each_target
@pytest.mark.parametrize("op", OPS)
def test_an_operation_has_one_key_for_all_calls_of_a_model(recorded: dict[str, Any], target: str, op: str) -> None:
    keys_of = recorded[f"{target} {op}"]
    assert isinstance(keys_of, dict), keys_of
    assert len(keys_of) == LAUNCHES.get(op, 1)
    for kernel, keys in keys_of.items():
        what = differing(recorded[f"{target} arguments"][kernel], keys)
        assert len(keys) == EXPECTED.get(op, 1), f"{kernel} has {len(keys)} keys, by {what}"


@each_target
@pytest.mark.parametrize("most", LARGEST)
def test_warm_up_covers_every_batch_up_to_the_largest(recorded: dict[str, Any], target: str, most: int) -> None:
    """Managers with other settings: tests/engine/test_warmup.py."""
    run = recorded[f"{target} {most}"]
    for kernel, keys in run["served"].items():
        known = run["warm"].get(kernel, [])
        what = differing(recorded[f"{target} arguments"][kernel], [*known, *keys])
        assert set(keys) <= set(known), f"{kernel}: keys besides the {len(known)} of warm-up, by {what}"
    assert len(run["served"]["tracking._plan"]) == len([power for power in (32, 64, 128, 256) if power < 2 * most])


if __name__ == "__main__":
    json.dump(dict(record()), sys.stdout)

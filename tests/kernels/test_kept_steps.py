"""Tests decode steps that are launched again, without Triton's handling of their arguments.

Run as a program, this file compares them with launches through Triton, on the stub of a driver in `test_kept`. Of
Triton's compiler, only the first stage runs: which launches share a compiled kernel does not depend on its code.

`python -m tests.kernels.test_kept_steps time` prints their host time beside that of launches which were forgotten
before, and the same of their checks: the least of many calls, for 64 rows of Qwen3-Next whose weights are parameters.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.nn import Parameter

pytest.importorskip("triton", reason="without Triton there are no kernels")

import triton
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver

from memstate.kernels import dispatch, remembered
from memstate_tools.launches import compiling
from tests.kernels.test_kept import LAUNCHED, Launcher, Stub
from tests.support.kernel_runs import ROOT, not_interpreted
from tests.support.op_case import CPU
from tests.support.op_cases import Moving
from tests.support.step_forms import OPS, WEIGHTS, checked, forms


def test_a_step_is_launched_again_as_triton_would_launch_it() -> None:
    """Each op in each of its forms, with tensors and with parameters as weights, with an output and without.

    The first launch of a kind goes through Triton, and the next one does not. Tools see it again.
    """
    said = not_interpreted(__file__)
    assert said["differ"] == said["unseen"] == []
    assert said["runs"] == 4 * (5 + 10 + 5 + 2) and said["handled"] == 2 * said["runs"]


def kernels() -> dispatch.Backend:
    """Returns the kernels, although on a CPU, with a driver that launches nothing."""
    every = CUDABackend.add_stages

    def add_stages(self: Any, stages: dict[str, Any], *rest: Any) -> None:
        every(self, stages, *rest)
        first = dict([*stages.items()][:1])
        stages.clear()
        stages |= first | {"cubin": lambda source, metadata: metadata.update(name="", shared=0) or b"-"}

    CUDABackend.add_stages = add_stages
    knobs.cache.dir = str(ROOT / "build" / "kept" / triton.__version__)  # never that of compiled kernels
    driver.set_active(Stub())
    dispatch.choose = lambda name, device: name
    return dispatch.Backend("interpreter")


def compare() -> None:
    """Prints the differences between steps that are launched again and the same steps through Triton."""
    backend, handled = kernels(), 0

    def hook(*_: Any, **__: Any) -> None:
        nonlocal handled
        handled += 1

    for op in OPS:
        getattr(import_module(f"memstate.kernels.{dispatch.OPS[op]}"), f"_{op}").add_pre_run_hook(hook)

    def launched(op: str, given: dict[str, Any]) -> list[Any]:
        LAUNCHED.clear()
        out = getattr(backend, op)(**given).data_ptr()
        return [["out" if seen == out else seen for seen in launch] for launch in LAUNCHED]

    differ, unseen, runs = [], [], 0
    for op, form, first in forms():
        second = Moving(CPU).anything(first)  # a call of the same kind, in other memory
        weights = [name for name in WEIGHTS if first.get(name) is not None]
        for changed in (False, True):
            for out in ({}, {"out": None}):
                one, other = (
                    given | out | {name: Parameter(given[name]) for name in weights if changed}
                    for given in (first, second)
                )
                remembered.forget()
                launched(op, one)
                again = launched(op, other)
                remembered.forget()
                if len(again) != 1 or again != launched(op, other):
                    differ.append(f"{op}, {form}: {again}")
                runs += 1
        with compiling("sm_90") as seen:
            getattr(backend, op)(**other)
        unseen += [f"{op}, {form}"] * (len(seen) != 1)
    print(json.dumps({"differ": differ[:3], "unseen": unseen, "runs": runs, "handled": handled}))


def least(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Returns the least time of a call, in microseconds. `before` is called before each, outside of the time."""
    best = float("inf")
    for _ in range(400):
        before()
        start = perf_counter()
        call()
        best = min(best, perf_counter() - start)
    return 1e6 * best


def times() -> None:
    """Prints the host time of steps and of their checks, for the first call of a kind and for later ones."""
    backend, rows, heads, channels = kernels(), 64, 32, 8192
    Launcher.__call__ = lambda *_: None  # type: ignore[assignment, method-assign]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, 1, *shape).bfloat16()

    ids = torch.arange(1, rows + 1, dtype=torch.int32)
    slots = {"read": ids, "write": ids + rows, "snapshot": 0 * ids, "tokens": ids // ids}
    calls: dict[str, dict[str, Any]] = {
        "conv_step": {
            "x": normal(channels), "weight": Parameter(torch.randn(channels, 4)), "bias": None, "out": normal(channels),
            "state": torch.zeros(2 * rows + 1, channels, 3).bfloat16().mT,
        },
        "gated_delta_step": {
            "q": normal(16, 128), "k": normal(16, 128), "v": normal(heads, 128), "decay": normal(heads),
            "beta": normal(heads), "state": torch.zeros(2 * rows + 1, heads, 128, 128), "out": normal(heads, 128),
            "a_log": Parameter(torch.randn(heads)), "dt_bias": Parameter(torch.randn(heads)), "sigmoid": True,
            "normalize": True,
        },
    }  # fmt: skip
    for op, inputs in calls.items():
        given = inputs | slots
        check, arguments = checked(op, given)
        step, again = partial(getattr(backend, op), **given), partial(check, *arguments.values())
        whole = partial(check.__wrapped__, *arguments.values())
        step()
        for what, later, first in (
            ("launch", least(step), least(step, remembered.forget)), ("check", least(again), least(whole)),
        ):  # fmt: skip
            print(f"{op}: {what} {later:5.1f} us again, {first:5.1f} us at first: {later / first:.0%}")


if __name__ == "__main__":
    times() if sys.argv[1:] == ["time"] else compare()

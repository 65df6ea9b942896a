"""Tests loops whose bound is an argument of the kernel in the interpreter of Triton 3.6 with numpy 2.4 and later."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

import triton
import triton.language as tl
from triton.runtime import interpreter

from memstate.kernels.dispatch import choose

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are not interpreted here")


@triton.jit
def _count(out_ptr, n):
    rounds = 0
    for _ in range(0, n, 2):
        rounds += 1
    tl.store(out_ptr, rounds)


def count(n: int) -> int:
    """Runs a kernel with a loop up to its argument `n`; returns how often the loop ran."""
    out = torch.zeros(1, dtype=torch.int32)
    _count[(1,)](out, n)
    return int(out)


@pytest.fixture
def of_version_3_6(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the interpreter behave as in Triton 3.6.0, whatever version is installed."""
    patch = interpreter._patch_lang_tensor

    def older(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data))

    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", older)
    # The original function: `tests.support.quick_interpreter` wraps it to remember earlier patches.
    monkeypatch.setattr(
        interpreter, "_patch_lang", getattr(interpreter._patch_lang, "__wrapped__", interpreter._patch_lang)
    )
    yield


def test_a_loop_over_an_argument_runs_in_triton_3_6(of_version_3_6: None) -> None:
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        with pytest.raises(interpreter.InterpreterError, match="only 0-dimensional arrays"):
            count(7)
    choose("interpreter", CPU)
    mended = interpreter._patch_lang_tensor
    choose("auto", CPU)
    assert interpreter._patch_lang_tensor is mended
    assert [count(n) for n in (1, 7, 8)] == [1, 4, 4]


def test_other_versions_are_left_alone(of_version_3_6: None, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = interpreter._patch_lang_tensor
    for version in ("3.5.1", "3.7.1", "3.60.0", "4.0.0"):
        monkeypatch.setattr(triton, "__version__", version)
        choose("interpreter", CPU)
        assert interpreter._patch_lang_tensor is patch

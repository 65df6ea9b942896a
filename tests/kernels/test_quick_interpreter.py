"""The quick interpreter of the tests makes what Triton's own makes."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(
    not hasattr(interpreter._patch_lang, "__wrapped__"), reason="this process takes the interpreter as it is"
)

SCALARS = (tl.int1, tl.uint8, tl.int32, tl.int64, tl.uint64, tl.float16, tl.bfloat16, tl.float32, tl.float64)
TYPES = [*SCALARS, *map(tl.pointer_type, SCALARS)]
SHAPES = ([1], [8], [2, 4], [4, 1, 2])


def test_types_and_shapes_are_those_of_triton() -> None:
    """The second look is the remembered one."""
    for element in TYPES:
        for of in (element, *(tl.block_type(element, shape) for shape in SHAPES)):
            for _ in range(2):
                assert interpreter._get_np_dtype(of) == interpreter._get_np_dtype.__wrapped__(of)
                assert _made(tl.tensor, None, of) == _made_by_triton(tl.tensor, None, of)
        for shape in 2 * SHAPES:
            assert _made(tl.block_type, element, shape) == _made_by_triton(tl.block_type, element, shape)


def test_a_shape_that_triton_refuses_is_refused() -> None:
    for shape, error in (([3], ValueError), ([2, 2.0], TypeError), ([], TypeError)):
        with pytest.raises(error):
            tl.block_type(tl.int32, shape)


def _made(kind: type, *arguments: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(kind(*arguments)).items()}


def _made_by_triton(kind: Any, *arguments: Any) -> dict[str, str]:
    made = kind.__new__(kind)
    kind.__init__.__wrapped__(made, *arguments)
    return {name: repr(value) for name, value in vars(made).items()}


@triton.jit
def _inner(x):
    return tl.sum(x, 0) + tl.cdiv(tl.max(x, 0), 2)


@triton.jit
def _outer(out_ptr, n, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    found = _inner(lane + n)
    if found > 15:
        found += _inner(lane)
    tl.store(out_ptr, found)


def test_a_launch_leaves_the_language_as_it_was() -> None:
    """Also one whose functions patch it again, or that fails."""
    out = torch.zeros(1, dtype=torch.int32)
    _outer[(1,)](out, 1, BLOCK=4)  # what a function of Triton's own patches stays, as without the quick interpreter
    before = dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.math))
    for _ in range(2):
        _outer[(1,)](out, 1, BLOCK=4)
        assert out.tolist() == [10 + 2]
        _outer[(1,)](out, 5, BLOCK=4)
        assert out.tolist() == [26 + 4 + 6 + 2]
        with pytest.raises(interpreter.InterpreterError):
            _outer[(1,)](out, 1, BLOCK=3)
        assert (dict(vars(tl)), dict(vars(tl.tensor)), dict(vars(tl.math))) == before


def test_checks_of_sums_are_left_out_only_where_nobody_reads_them() -> None:
    options = interpreter.interpreter_builder.options
    assert not options.sanitize_overflow and not options.debug

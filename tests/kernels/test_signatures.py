"""Tests that kernel and reference of an operation share a signature, and that operations allocate no tensor."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from memstate.kernels.dispatch import OPS, Backend
from tests.support import op_cases
from tests.support.kernel_runs import nothing_allocated
from tests.support.sources import ROOT


def signature(path: Path, name: str) -> str:
    """Returns the parameters of a function, with defaults and types, and its return type."""
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    assert len(functions) == 1, f"{path}: {name} is defined {len(functions)} times"
    returns = functions[0].returns
    return f"({ast.unparse(functions[0].args)}) -> {ast.unparse(returns) if returns else ''}"


@pytest.mark.parametrize("op", OPS)
def test_kernel_and_reference_share_name_and_signature(op: str) -> None:
    file = f"{OPS[op]}.py"
    assert signature(ROOT / "kernels" / file, op) == signature(ROOT / "kernels" / "reference" / file, op)


@pytest.mark.parametrize("op", OPS)
def test_a_backend_shows_the_signature_and_the_shapes_of_its_ops(op: str) -> None:
    shown, reference = getattr(Backend("reference"), op), getattr(Backend, op)
    assert inspect.signature(shown) == inspect.signature(reference)
    assert inspect.getdoc(shown) == inspect.getdoc(reference)
    parameters = inspect.signature(shown).parameters
    assert all(re.search(rf"^ *{name}: ", shown.__doc__, re.MULTILINE) for name in parameters)
    assert all(parameter.annotation is not parameter.empty for parameter in parameters.values())


@pytest.mark.parametrize("op", [op for op in OPS if op != "claim"])  # a claim returns a new tensor
def test_an_operation_makes_no_tensor_where_its_output_is_given(op: str) -> None:
    triton = pytest.importorskip("triton", reason="without Triton there are no kernels")
    if not triton.knobs.runtime.interpret:
        pytest.skip("these launches are on a CPU, where kernels are interpreted")
    for seed in range(3):
        made = op_cases.made(op, seed)
        with nothing_allocated():
            getattr(made.module(), op)(**made.arguments)

"""One signature for each operation: of its kernel, of its reference, and as a backend shows it."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from memstate.kernels.dispatch import OPS, Backend
from tests.support.sources import ROOT


def signature(path: Path, name: str) -> str:
    """The parameters of a function, with defaults and types, and what it returns."""
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

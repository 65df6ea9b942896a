"""The examples in docstrings run as they are written, on the reference."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parent.parent / "memstate"


def with_examples() -> list[str]:
    """Returns the modules of the library, kernels included, that have an example."""
    # rglob does not follow the link memstate/kernels
    paths = [LIBRARY / "kernels" / "dispatch.py", *LIBRARY.rglob("*.py")]
    names = {path: path.relative_to(LIBRARY.parent).with_suffix("").parts for path in paths}
    return sorted(
        {".".join(name).removesuffix(".__init__") for path, name in names.items() if ">>> " in path.read_text()}
    )


@pytest.mark.parametrize("name", with_examples())
def test_examples_run_as_written(name: str) -> None:
    assert doctest.testmod(import_module(name)).failed == 0

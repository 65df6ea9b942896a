"""Records every access of interpreted kernels. Skips the module that imports it if accesses cannot be recorded."""

from contextlib import AbstractContextManager

import pytest

from tests.support.addresses import Log

try:  # the interleaver replaces parts of Triton, and checks at import that they are as expected
    from tests.proof.interleaver import interleaved, misfit, stock
except ImportError as error:
    pytest.skip(f"accesses cannot be recorded here: {error}", allow_module_level=True)
if reason := misfit():
    pytest.skip(f"accesses cannot be recorded here: {reason}", allow_module_level=True)


def recorded() -> AbstractContextManager[Log]:
    """Returns a context manager with a log of the launches in its block, which run one program after the other."""
    return interleaved(stock)

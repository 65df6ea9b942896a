"""Records every access of interpreted kernels. Where this is impossible, skips the test module that imports it."""

from contextlib import AbstractContextManager

import pytest

from tests.support.addresses import Log

try:  # the interleaver replaces parts of Triton, and its import fails if they are not as expected
    from tests.proof.interleaver import interleaved, misfit, stock
except ImportError as error:
    pytest.skip(f"accesses cannot be recorded here: {error}", allow_module_level=True)
if reason := misfit():
    pytest.skip(f"accesses cannot be recorded here: {reason}", allow_module_level=True)


def recorded() -> AbstractContextManager[Log]:
    """Returns a context manager that logs the launches in its block. Their programs run one after the other."""
    return interleaved(stock)

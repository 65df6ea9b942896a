"""Records every access of interpreted kernels. What imports it is skipped where that cannot be done."""

from contextlib import AbstractContextManager

import pytest

from tests.support.addresses import Log

try:  # it replaces parts of Triton, and tries at once whether they are what it takes them for
    from tests.proof.interleaver import interleaved, misfit, stock
except ImportError as error:
    pytest.skip(f"accesses cannot be recorded here: {error}", allow_module_level=True)
if reason := misfit():
    pytest.skip(f"accesses cannot be recorded here: {reason}", allow_module_level=True)


def recorded() -> AbstractContextManager[Log]:
    """A context whose launches, one program after the other, are in the log that it gives."""
    return interleaved(stock)

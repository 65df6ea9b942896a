"""Makes each test of this folder check that its servers end without requests, slots and pages in use."""

from tests.support.endings import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]

"""Requires that the servers of these tests end empty."""

from tests.support.endings import pytest_pyfunc_call

__all__ = ["pytest_pyfunc_call"]

"""Defines a decorator that runs a test with every strategy, with and without overlap."""

from collections.abc import Callable
from typing import Any

from tests.support.planes import both_orders, every_strategy

Test = Callable[..., Any]


def every_order_and_strategy(test: Test) -> Test:
    return both_orders(every_strategy(test))

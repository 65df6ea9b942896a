"""Defines decorators that run a test with every strategy, with and without overlap, with and without a cache."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.planes import both_orders, every_strategy

Test = Callable[..., Any]
with_and_without_cache = pytest.mark.parametrize("cache", [False, True], ids=["alone", "cache"])


def every_order_and_strategy(test: Test) -> Test:
    return both_orders(every_strategy(test))


def every_strategy_and_order(test: Test) -> Test:
    return every_strategy(both_orders(test))


def every_way_and_cache(test: Test) -> Test:
    return every_strategy(both_orders(with_and_without_cache(test)))

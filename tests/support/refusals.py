"""Makes tests of tables of refusals."""

from collections.abc import Callable
from typing import Any

import pytest


def refusals(
    error: Any, *rows: tuple[Any, str], call: Callable[[Any], object] = lambda act: act()
) -> Callable[..., None]:
    """Returns a test with a case for each row: what `call` gets, by default a function, and words of the error.

    error: its class, or a tuple of classes.
    """

    @pytest.mark.parametrize(("given", "says"), rows)
    def test(given: Any, says: str) -> None:
        with pytest.raises(error, match=says):
            call(given)

    return test

"""Chooses the test cases that `make test` runs. MEMSTATE_PROOF=1, as in `make proof`, runs all of them.

`tests/conftest.py` applies three rules to every test:

* `@pytest.mark.proof`: the test runs in full runs only.
* `@pytest.mark.sample`: a parametrized test runs so many cases that each value of each parameter occurs.
  `@pytest.mark.sample(3)`: the test runs three cases, chosen the same way. Each backend has its own sample.
* Outside tests/kernels, no test runs on the interpreter, because it runs the same host code as the reference about 20
  times slower. `@pytest.mark.sample(interpreter=4)` asks for four cases, for tests that need kernels.

A test that is named on the command line (`file.py::test_name`) runs in full.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from zlib import crc32

import pytest

PROOF = bool(os.environ.get("MEMSTATE_PROOF"))
KERNELS = "tests/kernels/"  # where both backends run in full, because the tests compare them


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns the tests that only a full run executes."""
    skipped: set[pytest.Item] = set()
    groups: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("proof"):
            skipped.add(item)
        elif hasattr(item, "callspec"):
            function = item.nodeid.partition("[")[0]
            groups[function, str(item.callspec.params.get("backend"))].append(item)
    for (function, backend), cases in groups.items():
        mark = cases[0].get_closest_marker("sample")
        most: int | None = len(cases)
        if backend == "interpreter" and not function.startswith(KERNELS):
            most = mark.kwargs.get("interpreter", 0) if mark else 0
        elif mark and not (mark.kwargs and not mark.args):
            most = mark.args[0] if mark.args else None
        skipped.update(set(cases) - set(covering(cases, most)))
    return skipped


def covering(cases: Sequence[pytest.Item], most: int | None) -> list[pytest.Item]:
    """Returns cases in which every value of every parameter occurs, or `most` cases.

    The next case is always one with the most values that have not occurred yet. Among several such cases, a hash of the
    name decides, so that different tests choose different cases.
    """
    if most is not None and most >= len(cases):
        return list(cases)
    left = {value for case in cases for value in _values(case)}
    rest = sorted(cases, key=lambda case: crc32(case.nodeid.encode()))
    chosen: list[pytest.Item] = []
    while left if most is None else len(chosen) < most:
        best = max(rest, key=lambda case: len(left & _values(case)))
        rest.remove(best)
        chosen.append(best)
        left -= _values(best)
    return chosen


def _values(case: pytest.Item) -> set[tuple[str, object]]:
    plain = (str, int, float, type(None))
    given = case.callspec.params.items()  # type: ignore[attr-defined]
    return {(name, value if isinstance(value, plain) else id(value)) for name, value in given}

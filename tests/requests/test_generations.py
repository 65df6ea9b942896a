"""Generations of handles."""

import numpy as np

from memstate.requests.handles import risen


def test_generations_start_again_behind_the_largest() -> None:
    assert risen(np.array([0, 7, 2**31 - 1], np.int32)).tolist() == [1, 8, 0]
    assert risen(np.array([5], np.int32)).dtype == np.int32

"""A layout and tracking strategies that many tests use."""

from collections.abc import Callable

import pytest
import torch

import memstate as ms

LAYOUT = ms.StateLayout((ms.Plane("long", (3,), torch.int64), ms.Plane("short", (5,), torch.int32)), layers=2)
I = 4  # noqa: E741 - tokens between two boundaries
MAKERS: dict[str, Callable[[], ms.Tracking]] = {
    "none": lambda: ms.NoTracking(I),
    "ping-pong": lambda: ms.PingPong(I),
    "lazy": lambda: ms.LazyPingPong(I),
    "redirect": lambda: ms.Redirect(I),
}

every_strategy = pytest.mark.parametrize("name", MAKERS)

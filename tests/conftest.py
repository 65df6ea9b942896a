"""Backends under test: the reference everywhere, the kernels interpreted on a CPU or compiled on a GPU."""

import os
from collections.abc import Iterator

import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when the kernels are imported

import pytest  # noqa: E402

from memstate.kernels.dispatch import Backend  # noqa: E402
from tests.support.poison import Freed, fresh_memory  # noqa: E402

KERNEL_BACKEND = pytest.param("cuda", marks=pytest.mark.gpu) if CUDA else "interpreter"


@pytest.fixture(params=["reference", KERNEL_BACKEND])
def backend(request: pytest.FixtureRequest) -> Backend:
    """A fresh backend with its counts at zero."""
    return Backend(request.param, torch.device("cuda" if CUDA else "cpu"))


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random inputs, repeatable when a test fails: the seed is in the test's output."""
    seed = int(os.environ.get("MEMSTATE_SEED", torch.seed() % 2**31))
    print(f"MEMSTATE_SEED={seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Freed]:
    """Fresh memory and freed slots hold rubbish in every test."""
    with fresh_memory():
        yield Freed(monkeypatch)

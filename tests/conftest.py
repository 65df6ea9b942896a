"""Backends under test: the reference everywhere, the kernels interpreted on a CPU or compiled on a GPU.

With MEMSTATE_COMPILED, the backend "interpreter" has compiled kernels that run on the CPU: see tests/support/ptx.

`make test` runs a sample of the long tests and MEMSTATE_PROOF=1 all of them: see tests/support/sampling.py.
"""

import gc
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from tests import COMPILED

CUDA = torch.cuda.is_available()
if not CUDA and not COMPILED:
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when the kernels are imported

import pytest  # noqa: E402

pytest.register_assert_rewrite("tests.integrations.servers")

import memstate  # noqa: E402
from memstate.kernels.dispatch import Backend  # noqa: E402
from tests.support import alike, compiled, offered, skips  # noqa: E402
from tests.support.cputime import Meter  # noqa: E402
from tests.support.poison import Freed, fresh_memory  # noqa: E402
from tests.support.sampling import PROOF, left_out  # noqa: E402

if not CUDA and not COMPILED:
    try:
        from tests.support.quick_interpreter import install
    except ImportError:  # Triton is not installed
        pass
    else:
        install()

if COMPILED:
    compiled.count_calls()
OFFERED = offered.offer()
KERNEL_BACKEND = pytest.param("cuda", marks=pytest.mark.gpu) if CUDA else "interpreter"


def pytest_configure(config: pytest.Config) -> None:
    """Measures the CPU seconds of each case."""
    config.pluginmanager.register(Meter())


def pytest_collection() -> None:
    """Disables the garbage collector, which would scan thousands of collected tests again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Enables the garbage collector again, which from now on leaves out the collected modules and tests."""
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out tests that only a full run has, unless the command names a test, and those of other backends."""
    named = PROOF or any("::" in argument for argument in config.args)
    skipped = {*([] if named else left_out(items)), *(compiled.others(items) if COMPILED else [])}
    config.hook.pytest_deselected(items=[item for item in items if item in skipped])
    items[:] = [item for item in items if item not in skipped]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Writes what was skipped and which versions ran at the end, because -q hides a header."""
    skips.pytest_terminal_summary(terminalreporter)
    versions = []
    for name in ("torch", "triton", "transformers"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    python = f"Python {platform.python_version()}"
    if COMPILED:
        terminalreporter.write_line(compiled.summary())
    terminalreporter.write_line(", ".join(("tried with " + python, f"memstate {memstate.__version__}", *versions)))


@pytest.fixture(params=["reference", KERNEL_BACKEND])
def backend(request: pytest.FixtureRequest) -> Backend:
    """A new backend whose counts are zero."""
    return Backend(request.param, torch.device("cuda" if CUDA else "cpu"))


@pytest.fixture
def generator() -> torch.Generator:
    """A generator with a fresh seed, which is in the test's output, so that a failure can be repeated."""
    seed = int(os.environ.get("MEMSTATE_SEED", torch.seed() % 2**31))
    print(f"MEMSTATE_SEED={seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the arguments of kernels that are launched without Triton's checks: they must be those of the
    compilation.
    """
    alike.hold(monkeypatch)


@pytest.fixture(autouse=True)
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Freed | None]:
    """Fills fresh memory and freed slots with rubbish in every test, except in scripts, whose model does so."""
    if request.node.get_closest_marker("script"):
        yield None
        return
    with fresh_memory():
        yield Freed(monkeypatch)

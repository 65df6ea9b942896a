"""Tests kept kernels: compiled kernels that memstate remembers, and launches without Triton's handling of arguments."""

from pathlib import Path

from tests.support.kernel_runs import not_interpreted

ROOT = Path(__file__).parents[2]


def test_a_kept_kernel_is_launched_as_triton_would_launch_it() -> None:
    """Both ways launch the same kernel with the same grid, stream and arguments, for two batch sizes, twice."""
    said = not_interpreted("-m", "tests.support.kept_launches")
    assert said["differ"] == said["never"] == [] and not said["interpreted"]
    # A launch without a kept kernel goes through Triton every time. With kept kernels, only the first launch of each
    # compiled kernel does.
    compiled = 2 * 2 + 1 + 2 + 2 + 1 + 1 + 1  # plan, ownership, claim, release, data, filled data, rows
    assert said["runs"] == 2 * 7 * 4 and said["handled"] == said["runs"] + compiled

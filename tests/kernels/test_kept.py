"""Tests that a kept kernel is launched as Triton would launch it, but without Triton's handling of arguments."""

from pathlib import Path

from tests.support.kernel_runs import not_interpreted

ROOT = Path(__file__).parents[2]


def test_a_kept_kernel_is_launched_as_triton_would_launch_it() -> None:
    """Both ways launch the same kernel with the same grid, stream and arguments, for two batch sizes, twice."""
    said = not_interpreted("-m", "tests.support.kept_launches")
    assert said["differ"] == [] and not said["interpreted"]
    # Each run goes through Triton once. A kept launch goes through Triton only the first time for each compiled kernel.
    compiled = 2 * 2 + 1 + 1 + 2 + 2
    assert said["runs"] == 2 * 5 * 4 and said["handled"] == said["runs"] + compiled

"""Runs SGLang's own tests with our classes in the place of SGLang's.

    SGLANG_TESTS=<a source tree of SGLang> python -m tests.proof.sglang_tests [PATH...]

It needs the environment of docs/sglang.md, and a tree of the installed version. PATHs are in the tree; by default the
tests of slots, pools, prefix cache and sessions. `--theirs` runs them with SGLang's classes, for comparison.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from memstate.cli.bench.no_torchvision import leave_out_torchvision

FILES = (
    "mem_cache/test_mamba_slot_allocator.py",
    "mem_cache/test_mamba_unittest.py",
    "mem_cache/test_mamba_donated_alloc_ratio.py",
    "mem_cache/test_mamba_path_state_cap.py",
    "mem_cache/test_replayssm_ring_accounting.py",
    "mem_cache/test_unified_radix_cache_unittest.py",
    "mem_cache/test_streaming_session_unit.py",
    "managers/test_batch_result_processor_mamba_boundary.py",
    "managers/test_mamba_checkpoint_depth.py",
)
UNIT = "test/registered/unit"


def main() -> int:
    """Returns pytest's exit code."""
    tree = os.environ.get("SGLANG_TESTS")
    if not tree:
        print("SGLANG_TESTS is not set: give the folder of SGLang's sources", file=sys.stderr)
        return 2
    leave_out_torchvision()
    import sglang.srt.disaggregation.decode
    import sglang.srt.managers.schedule_batch
    import sglang.srt.mem_cache.unified_radix_cache
    import sglang.srt.utils
    import torch

    from memstate.integrations.sglang import in_place

    if not torch.cuda.is_available():
        sglang.srt.utils.get_device = sglang.srt.utils.common.get_device = lambda *_: "cpu"

    args = sys.argv[1:]
    given = [arg for arg in args if arg != "--theirs"] or [
        f"{UNIT}/{file}" for file in FILES if Path(tree, UNIT, file).exists()
    ]
    with nullcontext() if "--theirs" in args else in_place():
        options = ["-q", "-rA", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--rootdir", tree]
        return int(pytest.main([*options, *(str(Path(tree, file)) for file in given)]))


if __name__ == "__main__":
    sys.exit(main())

"""Tests the cost of compiled code: the worst launch decides, narrow moves and what does not compile are excluded."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="without Triton there are no kernels")

from memstate.errors import ConfigurationError
from memstate.kernels import copy
from memstate.kernels.configs import CopyConfig
from memstate_tools.launches import Launch
from memstate_tools.tuning import cost
from memstate_tools.tuning.cost import Compiler, Cost, Figures, worst
from memstate_tools.workload import Workload

DEFAULT = CopyConfig()
ODD = replace(DEFAULT, lanes=256)
FINE = Figures(64, 0, 32, 128, 9, 1.5)
NOTHING = Workload({}, {}, {})


@pytest.mark.parametrize(("spilled", "why"), [(0, ""), (8, "spills 8 bytes a thread for sm_90")])
def test_the_worst_launch_decides(spilled: int, why: str) -> None:
    assert worst("sm_90", [FINE, Figures(90, spilled, 64, 64, 3, 1.0)]) == Cost(90, spilled, 64, 64, 9, why, 1.5)


def test_a_kernel_that_moves_no_state_is_ranked_by_its_registers() -> None:
    without = Figures(40, 0, 0, 0, 2, 0.0)
    assert worst("sm_90", [without]) == Cost(40, 0, 0, None, 2, "", 160.0)
    assert worst("sm_90", [without, FINE]) == Cost(64, 0, 32, 128, 9, "", 1.5)
    assert worst("sm_90", []).why == "launches no kernel"


@pytest.mark.parametrize(("default", "bits", "why"), [
    (128, 128, ""), (128, 64, "moves 64 bits a lane for sm_90, expected 128"), (64, 64, ""),
    (64, 32, "moves 32 bits a lane for sm_90, expected 64"), (None, 64, "moves 64 bits a lane for sm_90, expected 128"),
    (128, None, ""),
])  # fmt: skip
def test_narrow_moves_are_excluded_unless_the_state_has_no_wider_ones(
    default: int | None, bits: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths, compiled = {DEFAULT: default, ODD: bits}, list[Any]()

    def figures(compiler: Compiler, config: Any) -> Cost:
        compiled.append(config)
        return Cost(narrowest_bulk_access_bits=widths[config])

    monkeypatch.setattr(Compiler, "_cost", figures)
    compiler = Compiler(NOTHING, "sm_90")
    assert [compiler.cost(replace(ODD, programs_per_sm=of)).why for of in (8, 2)] == [why] * 2
    assert compiled == [ODD, DEFAULT]  # programs change no code


@pytest.mark.parametrize("said", ["too large", PermissionError(13, "Permission denied", "/cache")])
def test_code_that_does_not_compile_is_excluded(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise said if isinstance(said, Exception) else RuntimeError(f"line 1\n  {said}\n")

    launch = Launch(copy._move, {}, (1,), "sm_90", fails)
    monkeypatch.setattr(Launch, "compiled", property(lambda launch: launch.compile()))
    monkeypatch.setattr(cost, "compiling", lambda target: nullcontext([launch]))
    if isinstance(said, Exception):  # the kernel is not to blame
        with pytest.raises(ConfigurationError, match=r"Permission denied: '/cache'; TRITON_CACHE_DIR names another"):
            Compiler(NOTHING, "sm_90").cost(DEFAULT)
        return
    failed = Compiler(NOTHING, "sm_90").cost(DEFAULT)
    assert failed == Cost(why=failed.why) and failed.why.startswith("does not compile: _move")
    assert failed.why.endswith("too large")

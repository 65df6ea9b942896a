"""Tests what decides about a configuration: the check against the reference, and the cost of compiled code."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

from memstate.errors import ConfigurationError
from memstate.kernels import copy, tuned
from memstate.kernels.configs import (
    CONFIGS,
    Config,
    ConvConfig,
    CopyConfig,
    DeltaConfig,
    GatherConfig,
    Int8Config,
    PackConfig,
    ScatterConfig,
    SelectiveConfig,
)
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate_tools.launches import Launch
from memstate_tools.models import Model, model_of
from memstate_tools.tuning import cost
from memstate_tools.tuning.check import wrong
from memstate_tools.tuning.cost import Compiler, Cost, Figures, worst
from memstate_tools.tuning.subject import Subject
from memstate_tools.workload import Workload

BF16 = torch.bfloat16
OF_MEMSTATE = {name: kind for name, kind in CONFIGS.items() if not kind.functions}


def backend_here() -> Backend:
    return Backend("auto", "cuda" if torch.cuda.is_available() else "cpu")


def subject(kernel: str, states: str = "", dtype: torch.dtype | None = None) -> Subject:
    """Returns a kernel on states that it has."""
    states = states or ("nemotron_h" if kernel == "selective" else "qwen3_next")
    return Subject(kernel, model_of(states, ssm_dtype=dtype))


def check(config: Config, of: Subject, backend: Backend | None = None, seed: int = 7) -> str:
    return wrong(config, of, [1, 3], backend or backend_here(), True, seed)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "config",
    [
        CopyConfig(3, 2, 16, 256), CopyConfig(1, 8, 512, 8192), GatherConfig(2, 1024), ScatterConfig(3, 2, 16, 512),
        PackConfig(3, 2, 16, 256), Int8Config(3, 2, 512), DeltaConfig(512, 32), SelectiveConfig(256, 2),
        ConvConfig(2, 512),
    ],
    ids=str,
)  # fmt: skip
def test_every_kernel_is_right_under_another_configuration(config: Config) -> None:
    assert check(config, subject(config.kernel)) == ""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kernel", "axis"),
    [(kernel, axis) for kernel, kind in OF_MEMSTATE.items()
     for axis in fields(kind) if not axis.metadata["bits"] and not kind.by_rows],
    ids=lambda given: getattr(given, "name", given),
)  # fmt: skip
def test_an_axis_that_changes_no_bits_changes_none(kernel: str, axis: Any, dtype: torch.dtype | None = None) -> None:
    """Of delta steps this is true of compiled code only: tests/kernels/test_one_order.py."""

    def written(config: Config) -> list[torch.Tensor]:
        made = subject(kernel, dtype=dtype).workload(3, backend_here(), 7, toy=True)
        with tuned.trying(config):
            for act in made.acts.values():
                act()
        return [tensor.contiguous().view(torch.uint8) for tensor in made.written.values()]

    default = OF_MEMSTATE[kernel]()
    pairs = zip(written(default), written(replace(default, **{axis.name: axis.metadata["values"][-1]})), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_block_of_2_byte_planes_changes_no_bits_of_int8_records() -> None:
    block = next(axis for axis in fields(Int8Config) if axis.name == "block")
    test_an_axis_that_changes_no_bits_changes_none("pack_int8", block, torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "op", "says"),
    [
        (DeltaConfig(), "gated_delta_step", "gated delta: out, ssm differs from the reference, batch 1, seed 7"),
        (Int8Config(), "pack_int8", "pack int8: records differs"),
    ],
    ids=str,
)
def test_what_another_kernel_does_wrong_is_noticed(config: Any, op: str, says: str) -> None:
    backend = backend_here()
    true = getattr(backend, op)

    def fault(*given: Any) -> Any:
        out = true(*given)
        for tensor in given:
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.dtype == torch.uint8):
                tensor.add_(1)
        return out

    setattr(backend, op, fault)
    assert check(config, subject(config.kernel), backend).startswith(says)


def test_other_bits_than_those_of_the_default_are_noticed() -> None:
    """An axis that is said to change no bits changes one, by less than the reference allows."""
    small = StateLayout([Plane("conv", (1, 48), BF16), Plane("ssm", (2, 16, 8), torch.float32)], 1)
    of, backend = Subject("gated_delta", Model(small, "delta")), backend_here()
    true = backend.gated_delta_step

    def step(*given: Any, **more: Any) -> torch.Tensor:
        out = true(*given, **more)
        found = tuned.config_of(DeltaConfig, backend.device, 16, 8, 4, False, False)
        given[5].mul_(1 + 1e-7 * (found.block_value == 64))
        return out

    backend.gated_delta_step = step  # type: ignore[method-assign]
    assert wrong(DeltaConfig(512, 32), of, [1], backend, False, 7) == ""
    says = "gated delta: ssm has other bits than under DeltaConfig(warp_elements=512, block_value=16), batch 1, seed 7"
    assert wrong(DeltaConfig(512, 64), of, [1], backend, False, 7) == says


@pytest.mark.parametrize(
    ("mine", "other", "differ"),
    [
        ([1.0, 0.0], [1.0 + 5e-6, 0.0], False),
        ([1.0, 0.0], [1.0 + 5e-5, 0.0], True),
        ([float("-inf"), 1.0], [float("-inf"), 1.0], False),
        ([float("-inf"), 1.0], [float("-inf"), 2.0], True),  # what is infinite hides no other error
        ([float("inf"), 1.0], [0.0, 1.0], True),
        ([float("nan"), 1.0], [float("nan"), 1.0], False),
        ([float("nan"), 1.0], [0.0, 1.0], True),
        ([0.0, 0.0], [0.0, 1e-30], True),
        ([1.0] * 100_001, [1.0] * 100_000 + [1.001], True),  # one among many
    ],
    ids=lambda values: str(values)[:40],
)
def test_results_may_differ_by_rounding_only(mine: list[float], other: list[float], differ: bool) -> None:
    one, two = (Workload({}, {}, {"out": torch.tensor(values)}, exact=False) for values in (mine, other))
    assert one.differing(two) == ("out" if differ else "")


# -- copies ------------------------------------------------------------------------------------------------------------


def planted(name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces an operation by `fault`, which gets the true operation before its arguments."""
    true = getattr(copy, name)
    monkeypatch.setattr(copy, name, lambda *given: fault(true, *given))


def checked_copies() -> str:
    return check(CopyConfig(), subject("copy", "lfm2"), seed=torch.seed() % 2**31)


def _skip_last(copy_slots: Any, planes: Any, dst: Any, src: Any) -> None:
    copy_slots(planes, dst[:-1].contiguous(), src[:-1].contiguous())


def _behind(copy_slots: Any, planes: Any, dst: Any, src: Any) -> None:
    copy_slots(planes, dst, src)
    block = planes.blocks[0]
    torch.empty(0, dtype=torch.uint8, device=block.device).set_(block.untyped_storage())[-1] += 1


def _null(zero_slots: Any, planes: Any, ids: Any) -> None:
    zero_slots(planes, ids)
    planes.blocks[0][:, 0] = 0


def _first_tile_only(run_data: Any, planes: Any, slots: Any, packet: Any) -> None:
    run_data(planes._replace(tiles=planes.tiles[:1]), slots, packet)


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("copy_slots", _skip_last, "copy_slots: arena 0 differs from the reference, batch 1, seed [0-9]+"),
        ("copy_slots", _behind, "copy_slots: memory behind arena 0 differs"),
        ("zero_slots", _null, "zero_slots: arena 0"),
        ("run_data", _first_tile_only, "run_data: arena "),
        (
            "run_data",
            Mock(side_effect=RuntimeError("out of\nresources")),
            "run_data raises RuntimeError: out of resources",
        ),
    ],
)
def test_a_wrong_copy_is_noticed(name: str, fault: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(name, fault, monkeypatch)
    assert re.match(says, checked_copies())


def test_a_cache_that_cannot_be_written_is_not_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    planted("run_data", Mock(side_effect=PermissionError(13, "Permission denied", "/cache")), monkeypatch)
    with pytest.raises(ConfigurationError, match=r"'/cache'; TRITON_CACHE_DIR names another folder"):
        checked_copies()


# -- the cost of compiled code --------------------------------------------------------------------


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

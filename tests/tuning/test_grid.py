"""Tests what a sweep tries: kernels, their axes, the order of configurations; and what it refuses at once."""

from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels import interpreter, own
from memstate.kernels.configs import CONFIGS, ConvConfig, CopyConfig
from memstate_tools import models, tuning
from memstate_tools.models import model_of
from memstate_tools.tuning.grid import axes_of, combinations, one_at_a_time
from memstate_tools.tuning.subject import subjects
from tests.support.refusals import refusals
from tests.support.running_mean import running_mean
from tests.support.written import registered

FREE_AXIS = "programs_per_sm"  # the compiled code does not depend on the number of programs
OF_MEMSTATE = [name for name, kind in CONFIGS.items() if not kind.functions]
CONV = axes_of(ConvConfig, timed=True)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("kernel", OF_MEMSTATE)
def test_one_axis_changes_at_a_time_and_the_cheapest_first(kernel: str, timed: bool) -> None:
    kind = CONFIGS[kernel]
    default, *others = configs = one_at_a_time(kind, axes_of(kind, timed))
    assert default == kind() and len(set(configs)) == len(configs) > 3
    changed = [[name for name, value in asdict(config).items() if value != asdict(default)[name]] for config in others]
    assert all(len(names) == 1 for names in changed)
    order = list(dict.fromkeys(names[0] for names in changed))
    assert set(order) == set(asdict(default)) - (set() if timed else {FREE_AXIS})
    # the axis that needs no compilation comes first
    assert timed is False or FREE_AXIS not in order or order[0] == FREE_AXIS


def test_values_of_the_caller_replace_the_usual_ones() -> None:
    axes = axes_of(CopyConfig, False, {"warps": [16], "lanes": []})
    assert list(axes) == ["warps", "entries", "lanes"] and axes["entries"] == (256, 512, 128)
    assert one_at_a_time(CopyConfig, axes)[:3] == [CopyConfig(), CopyConfig(warps=16), CopyConfig(entries=512)]


def test_the_best_values_are_combined_by_what_they_promise() -> None:
    goodness = dict.fromkeys(one_at_a_time(ConvConfig, CONV), 1.0)
    goodness |= {ConvConfig(warps=2): 3.0, ConvConfig(window_bytes=1024): 2.0, ConvConfig(window_bytes=4096): 0.5}
    combined = combinations(ConvConfig, CONV, goodness)
    assert combined == [ConvConfig(window_bytes=1024, warps=2)]  # the others of the best values were tried before
    assert combinations(ConvConfig, CONV, {**goodness, ConvConfig(warps=2): 0.0})[0].warps == 4
    assert combinations(ConvConfig, CONV, {ConvConfig(): 1.0, ConvConfig(warps=2): 0.0}) == []
    many = axes_of(CopyConfig, timed=True)
    assert len(combinations(CopyConfig, many, dict.fromkeys(one_at_a_time(CopyConfig, many), 1.0))) == 11


# -- kernels and states ------------------------------------------------------------------------------------------------


def test_kernels_are_those_of_the_model_and_ones_own() -> None:
    def tried(kernels: object, *states: str) -> list[tuple[object, str]]:
        found = subjects(kernels, map(model_of, states))
        return [(each.kernel, "" if each.model is None else each.model.layout.planes[0].name) for each in found]

    moved = [(name, "conv") for name in ("copy", "gather", "scatter", "pack")]
    assert tried("all", "lfm2") == [*moved, ("conv", "conv")]
    assert [name for name, _ in tried("all", "qwen3_next")] == [n for n in OF_MEMSTATE if n != "selective"]
    with registered():
        assert tried(["running_mean", "copy", running_mean], "lfm2") == [(running_mean, ""), ("copy", "conv")]
        assert tried("all", "lfm2") == [*moved, ("conv", "conv")]


@pytest.mark.parametrize("field", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_a_model_has_the_dtype_that_its_config_names(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.CONFIGS, "half", models.CONFIGS["qwen3_next"] | {field: "bfloat16"})
    assert model_of("half").plane("ssm").dtype == torch.bfloat16
    assert model_of("half", ssm_dtype=torch.float32) == model_of("qwen3_next")
    assert model_of("qwen3_next").plane("ssm").dtype == torch.float32


def test_models_have_the_rules_of_their_states() -> None:
    names = "qwen3_next", "kimi_linear", "nemotron_h", "falcon_mamba", "mamba3", "lfm2"
    assert [model_of(name).rule for name in names] == ["delta", "kda", "mamba2", "mamba1", "mamba3", ""]


@pytest.mark.parametrize("name", models.CONFIGS)
def test_a_layout_says_the_rule_of_its_states(name: str) -> None:
    """Without the tails of a configuration, KDA's states look like those of the delta rule."""
    model = model_of(name)
    assert model_of(model.layout).rule == {"kda": "delta"}.get(model.rule, model.rule)
    assert model.has("conv") == ("conv" in model.names) and model.has("copy")


# -- what is refused before any work -----------------------------------------------------------------------------------


test_bad_requests_are_refused = refusals(
    InvalidArgument,
    ({"kernels": []}, r"kernels \[\]: expected copy, gather"),
    ({"kernels": len}, "kernels <built-in function len>: expected copy"),
    ({"kernels": [len]}, "kernel <built-in function len>: expected copy"),
    ({"kernels": replace(running_mean, name="copy")}, "kernel 'copy': the name is taken; give another"),
    ({"kernels": [running_mean, replace(running_mean, state=[])]}, "kernel 'running_mean': the name is taken"),
    ({"limit": 1.5}, "limit 1.5: at least 1"),
    ({"dtypes": []}, r"dtypes \[\]: expected dtypes of torch"),
    ({"dtypes": ["float32"]}, r"dtypes \['float32'\]: expected dtypes of torch"),
    ({"batches": [1.0]}, r"batches \[1.0\]"),
    ({"batches": [True]}, r"batches \[True\]"),
    call=lambda given: tuning.sweep(**given),
)


def test_a_package_whose_kernel_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "load", Mock(return_value={"ema": "entry point ema: no module"}))
    with pytest.raises(ConfigurationError, match="entry point ema: no module"):
        tuning.sweep("ema")


@pytest.mark.skipif(not interpreter.interpreted(), reason="what a process that interprets kernels does")
def test_a_process_that_interprets_kernels_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="kernels are interpreted here: unset TRITON_INTERPRET"):
        tuning.sweep("gather", "lfm2", limit=1)

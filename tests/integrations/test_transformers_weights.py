"""Tests that managers and stores of a model refuse a model with an equal layout and other weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import memstate as ms
from tests.support.tiny_models import tiny, without_gpu_kernels
from tests.support.tiny_served import NEW, TEXT, alone, managed

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import weights
from memstate.integrations.transformers.weights import weights_of
from tests.integrations.servers import stored

FAMILY = "lfm2"


def loaded(path: Path, seed: int | None = None) -> Any:
    """Returns the model at a path. If a seed is given, first writes a model of this seed to the path."""
    if seed is not None:
        tiny(FAMILY, seed=seed).save_pretrained(path)
    with without_gpu_kernels():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def answer(model: Any, mem: ms.StateManager) -> tuple[int, bool]:
    """Serves a prompt; returns its cached tokens, and whether the answer is that of the model alone."""
    (one,) = mst.serve(model, mem, [mst.Prompt(TEXT, most=NEW)])
    return one.cached, one.tokens == alone(model, TEXT, {})


def test_new_weights_at_the_same_path_are_refused_by_the_manager_of_the_old(tmp_path: Path) -> None:
    model = loaded(tmp_path, 0)
    mem = managed(model)
    assert answer(model, mem) == (0, True)
    assert answer(loaded(tmp_path), mem) == (24, True)  # the same weights, loaded again
    new = loaded(tmp_path, 1)
    for make in (mst.Server, mst.StateCache):
        with pytest.raises(ms.ConfigurationError, match=f"{weights_of(model)}.* has the weights {weights_of(new)}"):
            make(new, mem)
    assert answer(new, managed(new)) == (0, True)
    assert mem.audit().clean


def test_records_of_other_weights_are_not_found_in_a_store(tmp_path: Path) -> None:
    answers = []
    for seed in (0, None, 1, None, 0):
        model = loaded(tmp_path / "model", seed)
        mem = managed(model, tiers=stored(tmp_path / "records", stop="wait_complete"))
        answers.append(answer(model, mem))
        mem.close()
    assert answers == [(0, True), (24, True), (0, True), (24, True), (24, True)]


@pytest.mark.parametrize("change", [
    lambda model: model.model.layers[0].conv.conv.weight.add_(1e-3),
    lambda model: model.load_state_dict(tiny(FAMILY, seed=1).state_dict()),
    lambda model: setattr(model.model.layers[0].conv.conv, "weight", nn.Parameter(torch.ones(32, 1, 3))),
], ids=["an operation", "a state dict", "a new tensor"])  # fmt: skip
def test_weights_that_changed_in_memory_are_noticed_by_the_next_server(change: Callable[[Any], Any]) -> None:
    model = copy.deepcopy(tiny(FAMILY))
    mem = managed(model)
    assert answer(model, mem) == (0, True)
    with torch.no_grad():
        change(model)
    for make in (mst.Server, mst.StateCache):
        with pytest.raises(ms.ConfigurationError, match=r"weights [0-9a-f]{32}.*make a manager for it"):
            make(model, mem)
    assert answer(model, managed(model)) == (0, True)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "glm5_next"])
def test_a_name_is_that_of_the_content_wherever_it_is_and_however_it_got_there(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    name = weights_of(model)
    assert len(name) == 32 and weights_of(copy.deepcopy(model)) == name
    assert weights_of(tiny(family, seed=1)) != name
    assert weights_of(tiny(family, dtype=torch.bfloat16)) != name
    other = copy.deepcopy(model)
    other.config.name_or_path = str(tmp_path)
    assert weights_of(other) == name
    other = copy.deepcopy(model)
    other.config.get_text_config().rms_norm_eps = 1e-3
    assert weights_of(other) != name


def test_weights_without_memory_are_told_from_all_others_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    models = [copy.deepcopy(tiny(FAMILY)) for _ in range(2)]
    for model in models:
        model.model.layers[1] = model.model.layers[1].to("meta")
    with caplog.at_level("WARNING", "memstate.transformers"):
        names = [weights_of(model) for model in (*models, *models)]
    assert names[:2] == names[2:] and len({*names, weights_of(tiny(FAMILY))}) == 3
    assert [record.getMessage().split(" model=")[0] for record in caplog.records] == ["weights unreadable"] * 2
    assert "tensor='model.layers.1." in caplog.text and "meta device" in caplog.text


def test_adapters_that_are_switched_change_the_name() -> None:
    model, names = copy.deepcopy(tiny(FAMILY)), set()
    part = model.model.layers[0]
    for part.active_adapters, part.disable_adapters in ((["a"], False), (["b"], False), (["b"], True)):
        names.add(weights_of(model))
    assert len(names) == 3


def sums(tensor: Tensor) -> list[Any]:
    return [weights._sums(leaf) for leaf in weights._leaves(tensor)]


@pytest.mark.parametrize("dtype", [
    torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.bool, torch.uint8,
], ids=str)  # fmt: skip
def test_every_change_of_a_tensor_changes_its_sums(
    dtype: torch.dtype, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "CHUNK", 4)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (11 * dtype.itemsize,), generator=generator)
    raw = raw.to(torch.uint8)
    known = sums(raw.view(dtype))
    # memory that is not aligned to 16 bytes
    assert sums(torch.cat([raw[: dtype.itemsize], raw])[dtype.itemsize :].view(dtype)) == known
    assert sums(raw.view(dtype)[None].expand(2, -1).T[:, 0]) == known
    for place in range(len(raw)):
        for bit in range(1 if dtype == torch.bool else 8):
            changed = raw.clone()
            changed[place] ^= 1 << bit
            assert sums(changed.view(dtype)) != known


def test_changes_of_several_words_do_not_cancel_out() -> None:
    words, signs = torch.arange(1, 9), torch.tensor([-(2**63), -(2**63) + 2**31, 2**31 + 2**15, 2**12])
    for first in range(8):
        for second in range(first):
            variants = [words.clone() for _ in range(2 + len(signs))]
            variants[1][[first, second]] = words[[second, first]]
            for sign, changed in zip(signs, variants[2:], strict=True):
                changed[[first, second]] ^= sign
            assert len({str(sums(one)) for one in variants}) == len(variants)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weight = torch.randn(64, 64, dtype=dtype)
        changes = [weight, -weight, weight.flip(0), weight.flip(1), weight.T, torch.cat([weight[32:], weight[:32]])]
        assert len({str(sums(one)) for one in changes}) == len(changes)


def test_tensors_of_several_parts_and_of_no_elements_are_read() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    assert sums(TwoTensor(one, other)) == sums(one) + sums(other)
    assert sums(torch.arange(10)) == [[5440747637206019416]]  # these sums are the same on all machines
    assert sums(torch.ones(0)) == [[0]] and sums(torch.tensor(5)) == sums(torch.tensor([5]))

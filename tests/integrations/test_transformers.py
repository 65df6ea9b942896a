"""Tests layouts of Transformers models, and compares `StateCache` with the model's own cache.

Logits may differ by 1e-5 of the largest logit: on slots, windows lack their oldest input and kernels sum in another
order. A control spoils a state in its slot and checks that the comparison fails.
"""

import functools
import inspect
import sys
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.tiny_models import COPIES, FAMILIES, FP32_ONLY, tiny

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from memstate.integrations.transformers.layout import layout_of
from memstate.integrations.transformers.on_slots import FUNCTIONS, _either, install
from memstate.integrations.transformers.own import cache_argument, own_cache
from memstate.integrations.transformers.probe import Findings, ProbedState, probe
from tests.integrations.servers import hooked, raising

PROMPT = torch.tensor([[5, 17, 40, 9, 33, 71, 8], [60, 4, 12, 88, 23, 51, 30]])
BOUND = 1e-5  # allowed difference, as a part of the largest logit
QUIET = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}


SETTINGS: dict[str, Any] = {"slots": 24, "max_requests": 8, "tracking": ms.Redirect(every=4), "backend": "reference"}


def managed(model: Any, **settings: Any) -> ms.StateManager:
    return mst.manager(model, **{**SETTINGS, **settings})


def steps(model: Any, cache: Any, forwards: Sequence[Tensor]) -> list[Tensor]:
    """Runs the forwards of a batch on a cache, and returns the last logits of each forward."""
    argument = cache_argument(model)
    with torch.no_grad():
        return [model(input_ids=ids, use_cache=True, **{argument: cache}).logits[:, -1] for ids in forwards]


def chosen(model: Any) -> list[Tensor]:
    """Returns the inputs of six forwards: the prompt, then five tokens that the model chooses with its own cache."""
    forwards, cache, argument = [PROMPT], own_cache(model), cache_argument(model)
    with torch.no_grad():
        for _ in range(5):
            logits = model(input_ids=forwards[-1], use_cache=True, **{argument: cache}).logits
            forwards.append(logits[:, -1:].argmax(-1))
    return forwards


def caching(cache: mst.StateCache) -> dict[str, Any]:
    return {**QUIET, cache.argument: cache}


def ways(family: str) -> list[str]:
    """Returns the settings of `kernels` with which a family can decode."""
    return ["gathered"] if family in COPIES else ["gathered", "slots"]


def apart(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Returns the largest difference between logits, as a part of the largest logit."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_own_cache_and_a_spoiled_state_is_noticed(family: str) -> None:
    model = tiny(family)
    forwards, mem = chosen(model), managed(model)
    expected = steps(model, own_cache(model), forwards)
    for kernels in ways(family):
        with mst.StateCache(model, mem, kernels=kernels) as cache:
            assert apart(steps(model, cache, forwards), expected) < BOUND
            assert cache.kernels == kernels
        for name in mem.planes:
            with mst.StateCache(model, mem, kernels=kernels) as cache:
                steps(model, cache, forwards[:1])
                mem.planes[name].neg_()  # changes the state that the next step reads
                assert apart(steps(model, cache, forwards[1:2]), expected[1:2]) > 10 * BOUND, name
    mem.audit().raise_if_leaking()
    assert mem.free_slots == 24


def test_decode_on_slots_copies_and_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = tiny("qwen3_next"), [PROMPT, PROMPT[:, :1], PROMPT[:, :1]]
    mem = managed(model, tracking=ms.Redirect(every=1))  # each step takes a snapshot
    with mst.StateCache(model, mem, kernels="slots") as cache:
        steps(model, cache, rows)
        for call in ("gather", "scatter", "copy"):
            monkeypatch.setattr(ms.Planes, call, None)  # a call would fail
        before = mem.stats()
        steps(model, cache, [PROMPT[:, 1:2]] * 4)
        after = mem.stats()
    assert (after.snapshots - before.snapshots, after.copied_bytes) == (8, 0)
    assert after.launches - before.launches == 4  # one plan per step; kernels of the forward do not count


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2", "mamba"])
def test_the_kernels_themselves_decode_on_slots(family: str) -> None:
    model = tiny(family)
    forwards, mem = chosen(model)[:3], managed(model, backend="interpreter")
    with mst.StateCache(model, mem, kernels="slots") as cache:
        assert apart(steps(model, cache, forwards), steps(model, own_cache(model), forwards)) < BOUND


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_the_same_tokens_for_padded_batches_and_beams(family: str) -> None:
    model, mem = tiny(family), managed(tiny(family))
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    for settings in ({"attention_mask": mask}, {"num_beams": 3}):
        expected = model.generate(PROMPT, **QUIET, **settings)
        for kernels in ways(family):
            with mst.StateCache(model, mem, kernels=kernels) as cache:
                assert torch.equal(model.generate(PROMPT, **caching(cache), **settings), expected), kernels
    assert mem.free_slots == 24


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_has_every_state_of_the_own_cache(family: str) -> None:
    model, cache = tiny(family), own_cache(tiny(family))
    described = mst.layout(model)
    assert described.on_slots == (family not in COPIES)
    steps(model, cache, [PROMPT])
    # on slots, windows lack their oldest input, which no layer reads
    planes, short = {plane.name: plane for plane in described.state.planes}, int(described.on_slots)
    expected = {
        (number, kind, state): (tuple(tensor[0, ..., short if kind == "conv" else 0 :].shape), tensor.dtype)
        for number, layer in enumerate(cache.layers)
        for kind in ("conv", "recurrent")
        for state, tensor in getattr(layer, f"{kind}_states", {}).items()
        if tensor is not None
    }
    places = {}
    for place in described.places:
        plane = planes[place.plane]
        places[place.layer, place.kind, place.state] = plane.shape, plane.dtype
    assert places == expected
    where = {(place.plane, place.number) for place in described.places}
    assert len(where) == len(expected)  # no two states share a place
    elements = sum(torch.Size(shape).numel() for shape, _ in expected.values())
    held = sum(described.state.layers_of(plane) * plane.elements for plane in described.state.planes)
    assert held == elements  # no byte of a slot is wasted


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FP32_ONLY])
def test_a_trial_chooses_alike_in_every_precision(family: str, dtype: torch.dtype) -> None:
    described = mst.layout(tiny(family, dtype=dtype))
    assert described.on_slots == (family not in COPIES)
    assert bool(described.tails) == (described.on_slots and described.continues)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "name", "mistake"), [
    ("qwen3_next", "torch_chunk_gated_delta_rule", {"use_qk_l2norm_in_kernel": False}),
    ("kimi_linear", "chunk_kimi_delta_attention", {"scale": 2.0}),
    ("bamba", "mamba2_chunk_scan", {"dt_softplus": False}),
    ("lfm2", "causal_conv1d_fn", {"activation": "silu"}),
])  # fmt: skip
def test_guesses_are_checked_on_copies_where_a_kernel_computes_something_else(
    family: str, name: str, mistake: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny(family, seed=6)
    install(model)
    module = sys.modules[type(model).__module__]
    own = getattr(module, name).__wrapped__
    monkeypatch.setattr(module, name, _either(own, changed_kernel(FUNCTIONS[name], mistake)))
    with caplog.at_level("INFO", "memstate.transformers"):
        described = mst.layout(model)
    assert (described.on_slots, described.tails) == (True, ())
    assert f"checks guesses on copies of its states: the kernel for {name} differs by" in caplog.text
    assert managed(model, forward=ms.Forward(tail=4)).layout.rows is None


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("family", "name", "mistake"),
    [
        ("qwen3_next", "torch_recurrent_gated_delta_rule", {"use_qk_l2norm_in_kernel": False}),
        ("bamba", "mamba2_selective_state_update", {"dt_softplus": False}),
        ("mamba", "mamba_selective_state_update", {"D": None}),
    ],
)
def test_a_trial_finds_a_kernel_that_computes_something_else(
    family: str, name: str, mistake: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    model = tiny(family, seed=1, dtype=dtype)
    install(model)
    module = sys.modules[type(model).__module__]
    own = getattr(module, name).__wrapped__
    monkeypatch.setattr(module, name, _either(own, changed_kernel(FUNCTIONS[name], mistake)))
    with caplog.at_level("INFO", "memstate.transformers"):
        assert not mst.layout(model).on_slots
    assert f"the kernel for {name} differs by" in caplog.text


def changed_kernel(kernel: Any, mistake: dict[str, Any]) -> Any:
    @functools.wraps(kernel)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(kernel).bind(*args, **kwargs)
        given.arguments.update(mistake)
        return kernel(*given.args, **given.kwargs)

    return wrong


def test_a_trial_finds_a_layer_that_reads_the_oldest_input_of_a_window(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, forward = tiny("lfm2", seed=1), type(tiny("lfm2").model.layers[0].conv).forward

    def peeking(self: Any, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        cache = kwargs.get(cache_argument(model))
        window = cache.layers[self.layer_idx].conv_states[0] if cache is not None else None
        oldest = 0 if not isinstance(window, Tensor) else window[..., 0].mean()
        return forward(self, hidden_states, **kwargs) + oldest

    monkeypatch.setattr(type(model.model.layers[0].conv), "forward", peeking)
    with caplog.at_level("INFO", "memstate.transformers"):
        described = mst.layout(model)
    assert not described.on_slots and described.state.planes[0].shape == (32, 3)
    assert "a layer reads the oldest input of a window" in caplog.text


def test_a_trial_finds_a_state_that_no_kernel_updates(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("lfm2", seed=2)
    layer, forward = model.model.layers[2].conv, type(model.model.layers[2].conv).forward

    def forgetful(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self is layer and hidden_states.shape[1] == 1:
            return hidden_states
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(layer), "forward", forgetful)
    with caplog.at_level("INFO", "memstate.transformers"):
        assert not mst.layout(model).on_slots
    assert "no kernel updates the conv state 0 of layer 2" in caplog.text


def test_a_model_that_reads_pads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(tiny("qwen3_next")).takes_pads
    model = tiny("qwen3_next", seed=1)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, "apply_mask_to_padding_states", lambda states, mask: states)
    assert not probe(model).takes_pads


def test_planes_of_unequal_numbers_of_states_have_layers_of_their_own() -> None:
    wide = [ProbedState(layer, "conv", 0, (8, 4), torch.bfloat16) for layer in range(6)]
    deep = [ProbedState(layer, "recurrent", 0, (2, 4), torch.float32) for layer in range(0, 6, 2)] * 1
    extra = [ProbedState(5, "recurrent", 1, (3,), torch.float32)]
    model = layout_of(Findings("past_key_values", 6, (*wide, *deep), (), True, True))
    kinds = [(plane.name, plane.shape, model.state.layers_of(plane)) for plane in model.state.planes]
    assert kinds == [("conv", (8, 4), 6), ("ssm", (2, 4), 3)]
    assert [(place.plane, place.number) for place in model.places] == [
        *(("conv", n) for n in range(6)), *(("ssm", n) for n in range(3)),
    ]  # fmt: skip
    model = layout_of(Findings("past_key_values", 6, (*wide, *deep, *extra), (), True, True))
    kinds = [(plane.name, plane.shape, model.state.layers_of(plane)) for plane in model.state.planes]
    assert kinds[1:] == [("ssm", (2, 4), 3), ("ssm2", (3,), 1)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in FP32_ONLY])
def test_states_in_bfloat16_are_handed_over_bit_for_bit(family: str) -> None:
    model = tiny(family, dtype=torch.bfloat16)
    forwards = chosen(model)
    expected = steps(model, own_cache(model), forwards)
    for kernels in ways(family):
        with mst.StateCache(model, managed(model), kernels=kernels) as cache:
            errors = [apart([a], [b]) for a, b in zip(steps(model, cache, forwards), expected, strict=True)]
        # the median, because rounding may send one token to another expert
        assert max(errors) == 0 if kernels == "gathered" else median(errors[1:]) < 0.1


def test_scans_that_start_from_zeros_are_known_and_refused_in_a_second_chunk() -> None:
    known = {family: mst.layout(tiny(family)).continues for family in ("qwen3_next", "bamba", "lfm2", "zaya", "jamba")}
    assert known == {"qwen3_next": True, "bamba": True, "lfm2": True, "zaya": True, "jamba": False}
    model = tiny("jamba")
    with mst.StateCache(model, managed(model)) as cache:
        steps(model, cache, [PROMPT])
        with pytest.raises(ms.InvalidArgument, match="starts from zeros"):
            steps(model, cache, [PROMPT])
        assert cache.lengths == [7, 7]
        cache.reset()
        assert torch.equal(steps(model, cache, [PROMPT])[0], steps(model, own_cache(model), [PROMPT])[0])


@pytest.mark.parametrize("kernels", ["gathered", "slots"])
@pytest.mark.parametrize("settings", [
    {"tracking": ms.PingPong(every=4)}, {"tracking": ms.LazyPingPong(every=4)}, {"tracking": ms.NoTracking()},
    {"forward": ms.Forward(in_place=True)}, {"forward": ms.Forward(pad=-1)}, {"overlap": False},
    {"pages": ms.Pages(size=4, count=40, per_row=8)},
], ids=str)  # fmt: skip
def test_every_strategy_gives_the_same_tokens(settings: dict[str, Any], kernels: Any) -> None:
    model = tiny("qwen3_next")
    mem, expected = managed(model, **settings), model.generate(PROMPT, **QUIET, num_beams=2)
    with mst.StateCache(model, mem, kernels=kernels) as cache:
        assert torch.equal(model.generate(PROMPT, **caching(cache), num_beams=2), expected)
    assert mem.free_slots == 24


def test_snapshots_hold_what_a_run_up_to_them_leaves() -> None:
    model = tiny("bamba")
    forwards = chosen(model)
    for tracking, kernels in product(
        (ms.Redirect(every=4), ms.PingPong(every=4), ms.LazyPingPong(every=4)), ("gathered", "slots")
    ):
        mem = managed(model, tracking=tracking)
        with mst.StateCache(model, mem, kernels=kernels, ends=[]) as cache:
            steps(model, cache, forwards)  # a prompt of 7 tokens, then 5 tokens
            kept = cache.close(publish=True)
        assert [snapshot.length for snapshot in kept if snapshot] == [12, 12]
        with mst.StateCache(model, mem, kernels=kernels) as again:
            steps(model, again, forwards)
            slots = torch.tensor(mem.device.read_slots([*kept, *again.rows]).wait())
            for name in mem.planes:
                assert torch.equal(mem.planes[name][:, slots[:2]], mem.planes[name][:, slots[2:]])
        mem.drop(kept)


def test_a_second_turn_continues_on_the_same_cache() -> None:
    model, more = tiny("qwen3_next"), torch.tensor([[3, 90, 14], [7, 7, 61]])
    runs = []
    mem = managed(model)
    with mst.StateCache(model, mem) as ours:
        for cache in (own_cache(model), ours):
            first = model.generate(PROMPT, **QUIET, past_key_values=cache)
            runs.append(model.generate(torch.cat([first, more], 1), **QUIET, past_key_values=cache))
        assert ours.lengths == [7 + 6 + 3 + 6 - 1] * 2
    assert torch.equal(*runs)


def test_pads_behind_the_end_of_a_row_are_no_tokens_of_a_snapshot() -> None:
    model, mem = tiny("bamba"), managed(tiny("bamba"), tracking=ms.Redirect(every=1))
    free = model.generate(PROMPT, **QUIET)
    end = int(free[0, 8])  # the second new token of the first row ends it
    assert end not in free[1, 7:].tolist()
    model.generation_config.eos_token_id = end
    try:
        with mst.StateCache(model, mem) as cache:
            out = model.generate(PROMPT, **{**caching(cache), "max_new_tokens": 8}, eos_token_id=end)
            assert out[0, 9:].tolist() == [0] * 6  # this row has ended and gets pads while the other goes on
            assert cache.lengths == [9, 14]
            kept = cache.close(publish=True)
            assert [snapshot.length for snapshot in kept if snapshot] == [9, 14]
            mem.drop(kept)
    finally:
        model.generation_config.eos_token_id = None


def test_what_has_no_way_back_is_refused() -> None:
    model = tiny("qwen3_next")
    with mst.StateCache(model, managed(model)) as cache:
        cache.crop(0)
        for call in (lambda: cache.crop(-1), lambda: cache.crop(1), cache.activate_past_recording):
            with pytest.raises(ms.InvalidArgument, match="no way back"):
                call()
        assert not cache.is_croppable
        assert not cache.is_compileable


def test_back_pressure_and_failures_leave_the_manager_usable() -> None:
    model = tiny("qwen3_next")
    mem = managed(model, slots=3)
    (held,) = mem.admit([ms.Request("another")])
    with mst.StateCache(model, mem) as cache:
        with pytest.raises(ms.OutOfSlots):
            steps(model, cache, [PROMPT.repeat(2, 1)])
        assert torch.equal(steps(model, cache, [PROMPT])[0], steps(model, own_cache(model), [PROMPT])[0])
        with pytest.raises(ms.InvalidArgument, match="a batch of 1"):
            steps(model, cache, [PROMPT[:1]])
        with hooked(model.model.layers[2], raising(ArithmeticError)), pytest.raises(ArithmeticError):
            steps(model, cache, [PROMPT[:, :1]])
        with pytest.raises(ms.InvalidArgument, match="raised an exception"):
            steps(model, cache, [PROMPT[:, :1]])
    assert mem.free_slots == 2
    mem.end([held])
    with mst.StateCache(model, mem) as cache:
        steps(model, cache, [PROMPT])
    mem.audit().raise_if_leaking()
    assert mem.free_slots == 3
    with pytest.raises(ms.InvalidArgument, match=r"close\(\) was called"):
        steps(model, cache, [PROMPT])
    with (
        mst.StateCache(model, mem) as cache,
        pytest.raises(ms.InvalidArgument, match="no forward of its model has begun"),
    ):
        model.model(input_ids=PROMPT, past_key_values=cache)  # the call goes to a part of the model, not to the model


def test_rows_of_a_forgotten_cache_are_released_by_the_next() -> None:
    model = tiny("qwen3_next")
    mem = managed(model, slots=3, max_requests=2)
    before = len(model._forward_hooks)
    for _ in range(3):
        model.generate(PROMPT, **QUIET, past_key_values=mst.StateCache(model, mem))
        assert mem.stats().rows_used == 2
    assert len(model._forward_hooks) == before
    model.generate(PROMPT, **QUIET, past_key_values=mst.StateCache(model, mem))
    mem.recover(keep=False)  # recover ends the rows before the new cache looks at them
    with mst.StateCache(model, mem) as cache:
        model.generate(PROMPT, **caching(cache))
    assert mem.free_slots == 3


def test_forks_that_find_no_slot_leave_the_cache_as_it_was() -> None:
    model = tiny("qwen3_next")
    forwards, mem = chosen(model)[:2], managed(model, slots=2)
    with mst.StateCache(model, mem) as cache:
        first = steps(model, cache, forwards[:1])
        with pytest.raises(ms.OutOfSlots):
            cache.batch_repeat_interleave(2)
        expected = steps(model, own_cache(model), forwards)
        assert apart(first + steps(model, cache, forwards[1:]), expected) < BOUND
    assert mem.free_slots == 2

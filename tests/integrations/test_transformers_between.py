"""Tests the layers of a `StateCache` between two forwards: they show the states of the model's own cache."""

from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny
from tests.support.tiny_served import TEXT, managed

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from memstate.integrations.transformers.between import Between
from memstate.integrations.transformers.held import Held
from memstate.integrations.transformers.probe import cache_argument, own_cache

QUIET = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
IDS = torch.tensor([TEXT[:8], TEXT[9:17]])


def shown(cache: Any) -> list[tuple[Any, ...]]:
    """Returns the values that Transformers' own tests read from layers with states."""
    return [
        (
            dict(layer.conv_states), list(layer.recurrent_states.items()), layer.is_conv_states_initialized,
            layer.is_recurrent_states_initialized, layer.has_previous_state, cache.get_conv_state(number),
            cache.get_recurrent_state(number), cache.has_previous_state(number),
        )
        for number, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")
    ]  # fmt: skip


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=["plain", "beams"])
@pytest.mark.parametrize(
    ("family", "way"),
    [("mamba2", {}), ("qwen3_next", {"kernels": "slots"}), ("lfm2", {"prompt": IDS}), ("zaya", {"prompt": IDS})],
)
def test_layers_show_what_those_of_the_own_cache_have(family: str, way: Any, settings: dict[str, int]) -> None:
    model = tiny(family)
    mem, own, argument = managed(model, slots=24, max_requests=8), own_cache(model), cache_argument(model)
    short = mst.layout(model).on_slots  # on slots, windows lack their oldest input
    with mst.StateCache(model, mem, **way) as ours, torch.no_grad():
        caches = (own, ours)
        runs = [model.generate(IDS, **QUIET, **settings, **{argument: cache}) for cache in caches]
        for _ in range(2):
            (expected, actual) = map(shown, caches)
            for one, other in zip(expected, actual, strict=True):
                for a, b in zip(
                    torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(other), strict=True
                ):
                    if not isinstance(a, torch.Tensor):
                        assert a == b
                        continue
                    assert a.shape == b.shape
                    same = a[..., 1:], b[..., 1:]
                    is_window = any(a is window for window in one[0].values()) or a is one[5]
                    torch.testing.assert_close(*(same if short and is_window else (a, b)), rtol=1e-4, atol=1e-5)
            ours.layers[0].conv_states[0].fill_(9)  # this changes only a copy
            for cache in caches:
                model(input_ids=runs[0][:, -1:].repeat(settings.get("num_beams", 1), 1), **{argument: cache})
    assert torch.equal(*runs)
    layer = ours.layers[0]
    assert (layer.conv_states[0], layer.is_conv_states_initialized[0]) == (None, False)


def test_nothing_is_gathered_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("lfm2")
    mem, looks = managed(model), list[int]()
    look = Held.gather
    monkeypatch.setattr(Held, "gather", lambda self: looks.append(1) or look(self))
    with mst.StateCache(model, mem) as cache:
        assert repr(cache.layers[0].conv_states) == "{0: None}"
        model.generate(IDS, past_key_values=cache, **QUIET, num_beams=1)
        assert not looks
        states = cache.layers[0].conv_states
        assert isinstance(states, Between)
        assert [one.shape for one in states.copy().values() if one is not None] == [(2, 32, 3)]
        assert cache.layers[2].conv_states[0] is not None
        assert looks == [1]  # one gather serves all layers
    assert states[0] is None
    del cache
    assert dict(states) == {}

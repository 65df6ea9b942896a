"""Tests Ctrl-C in a forward under `StateCache`, and the layers between two forwards.

The open step is settled, and the manager serves on. The layers show the states of the model's own cache.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import TEXT, managed

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from memstate.integrations.transformers.between import Between
from memstate.integrations.transformers.held import Held
from memstate.integrations.transformers.probe import cache_argument, own_cache
from tests.integrations.servers import Judged, hooked, raising
from tests.proof.injection.points import Tracer

QUIET = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 3}
ROOM = {"slots": 16, "max_requests": 6}
IDS = torch.tensor([TEXT[:9], TEXT[3:12]])
FOLDER = str(Path(mst.__file__).parent)
INTERRUPTS = (KeyboardInterrupt(), SystemExit(), asyncio.CancelledError(), GeneratorExit())


def require_served(model: Any, mem: ms.StateManager, expected: torch.Tensor) -> None:
    """Checks that another cache and a server give right answers, and that nothing leaks."""
    with mst.StateCache(model, mem) as cache:
        assert torch.equal(model.generate(IDS, past_key_values=cache, **QUIET), expected)
    at = Judged(model=model, mem=mem)
    at.ask("later", text=TEXT[:5], most=2)
    at.ends()


@pytest.mark.parametrize("interrupt", INTERRUPTS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("how", ["with", "kept", "forgotten", "prompt", "reset"])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_interrupt_in_a_forward_leaves_no_step_unsettled(interrupt: Any, how: str, overlap: bool) -> None:
    model = tiny("lfm2")
    mem, expected = managed(model, **ROOM, overlap=overlap), model.generate(IDS, **QUIET)
    cache: Any = mst.StateCache(model, mem, prompt=IDS if how == "prompt" else None)
    forwards = iter((None, None, interrupt))

    def third(*_: Any) -> None:
        if (error := next(forwards)) is not None:
            raise error

    with hooked(model.model.layers[3], third), pytest.raises(type(interrupt)):
        model.generate(IDS, past_key_values=cache, **QUIET)
    interrupt.__traceback__ = None
    if how in ("with", "prompt"):
        cache.close()
    if how == "reset":
        cache.reset()
    if how == "forgotten":
        del cache
    require_served(model, mem, expected)
    if how == "kept":
        with pytest.raises(ms.InvalidArgument, match="raised an exception"):
            model(input_ids=IDS[:, :1], past_key_values=cache)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a destructor, it is ignored
@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"prompt": IDS}], ids=["plain", "beams", "prompt"])
def test_an_interrupt_at_any_line_leaves_nothing(settings: dict[str, Any], part: int) -> None:
    """Interrupts the lines of the adapter, a different share of them in each part.

    `tests/proof` interrupts the manager's.
    """
    model, mem, point = tiny("lfm2"), managed(tiny("lfm2"), **ROOM), 1 + 20 * part
    prompt, given = settings.get("prompt"), {**QUIET, **{k: v for k, v in settings.items() if k != "prompt"}}
    expected = model.generate(IDS, **QUIET)

    def generates() -> None:
        with mst.StateCache(model, mem, prompt=prompt) as cache:
            model.generate(IDS, past_key_values=cache, **given)

    while True:
        mem, tracer = managed(model, **ROOM), Tracer(point, KeyboardInterrupt, FOLDER)
        with suppress(KeyboardInterrupt):
            tracer.run(generates)
        if not tracer.place:
            return
        try:
            require_served(model, mem, expected)
        except Exception as error:
            error.add_note(f"interrupted at point {point}, {tracer.place}")
            raise
        point += 160


def test_a_step_that_could_not_be_settled_is_not_forgotten() -> None:
    """The cache's step cannot be settled at first, because the caller has an open step."""
    model = tiny("lfm2")
    mem, expected = managed(model, **ROOM), model.generate(IDS, **QUIET)
    rows = mem.admit([ms.Request("mine", tokens=[1, 2, 3])])
    mem.extend(rows, [3])
    mine = mem.plan(rows, 3)
    with mst.StateCache(model, mem) as cache, pytest.raises(ms.InvalidArgument, match="step 0 comes first"):
        model(input_ids=IDS, past_key_values=cache)
    mem.settle(mine)
    mem.end(rows)
    require_served(model, mem, expected)
    rows = mem.admit([ms.Request("mine", tokens=[1, 2, 3])])
    mem.extend(rows, [3])
    cache = mst.StateCache(model, mem)
    with hooked(model.model.layers[3], raising(KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        model(input_ids=IDS, past_key_values=cache)
    mine = mem.plan(rows, 3)  # the failed step is not the newest now, so it cannot be cancelled
    cache.close()
    mem.settle(mine)
    mem.end(rows)
    require_served(model, mem, expected)


def test_a_cache_whose_rows_the_manager_ended_can_be_closed() -> None:
    model = tiny("lfm2")
    mem = managed(model, **ROOM)
    cache = mst.StateCache(model, mem, ends=[])
    model.generate(IDS, past_key_values=cache, **QUIET)
    mem.recover(keep=False)
    with pytest.raises(ms.StaleHandle):
        cache.close(publish=True)
    with mst.StateCache(model, mem) as cache:
        model.generate(IDS, past_key_values=cache, **QUIET)
        mem.recover(keep=False)
    assert mem.free_slots == 16


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

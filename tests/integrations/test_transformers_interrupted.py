"""Tests Ctrl-C in a forward under `StateCache`: the open step is settled, and the manager serves on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import TEXT, managed

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from tests.integrations.servers import Interrupt, Judged, hooked, raising

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


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"prompt": IDS}], ids=["plain", "beams", "prompt"])
def test_an_interrupt_at_any_line_leaves_nothing(settings: dict[str, Any], part: int) -> None:
    """Interrupts the lines of the adapter, a different share of them in each part.

    `tests/proof` interrupts the manager's.
    """
    model, line = tiny("lfm2"), 11 * part
    prompt, given = settings.get("prompt"), {**QUIET, **{k: v for k, v in settings.items() if k != "prompt"}}
    expected = model.generate(IDS, **QUIET)
    while True:
        mem, interrupt = managed(model, **ROOM), Interrupt(line, FOLDER)
        with interrupt.tracing(), mst.StateCache(model, mem, prompt=prompt) as cache:
            model.generate(IDS, past_key_values=cache, **given)
        if not interrupt.where:
            return
        cache = None
        try:
            require_served(model, mem, expected)
        except Exception as error:
            error.add_note(f"interrupted at line {line}, {interrupt.where}")
            raise
        line += 88


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

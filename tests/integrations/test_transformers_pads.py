"""Tests that `StateCache` publishes a state only if no pad went through the layers among its tokens."""

import copy
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support.tiny_models import tiny
from tests.support.tiny_served import TEXT, alone, managed

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from memstate.integrations.transformers.lengths import Lengths
from memstate.integrations.transformers.probe import own_cache
from memstate.integrations.transformers.watch import Call

QUIET = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
ROOM = {"slots": 24, "max_requests": 8}
IDS = torch.tensor([TEXT[:8], TEXT[9:17]])


@pytest.mark.parametrize("where", ["between", "right"])
@pytest.mark.parametrize("kernels", ["gathered", "slots"])
def test_a_turn_with_pads_is_read_as_by_the_own_cache_and_is_not_filed(kernels: Any, where: str) -> None:
    model = tiny("qwen3_next")
    mem, new = managed(model, **ROOM), [TEXT[3:12], TEXT[4:7]]
    pads = [0] * 6
    more = torch.tensor([new[0], pads + new[1] if where == "between" else new[1] + pads])
    runs = []
    for ours in (False, True):
        cache = mst.StateCache(model, mem, prompt=IDS, kernels=kernels) if ours else own_cache(model)
        turn = model.generate(IDS, past_key_values=cache, **QUIET)
        given, mask = torch.cat([turn, more], 1), torch.ones(2, turn.shape[1] + 9, dtype=torch.long)
        mask[1, turn.shape[1] :] = more[1] != 0
        runs.append(model.generate(given, attention_mask=mask, past_key_values=cache, **QUIET))
    assert torch.equal(*runs)
    assert cache.lengths == [len(runs[0][0]) - 1, turn.shape[1] - 1]
    cache.close()
    for entry, tokens in enumerate(new):
        text = [*turn[entry].tolist(), *tokens, *runs[0][entry, given.shape[1] :].tolist(), 9]
        (one,) = mst.serve(model, mem, [mst.Prompt(text, most=6)])
        assert one.tokens == alone(model, text, {})
        assert one.cached == (28 if entry == 0 else 12)
    mem.audit().raise_if_leaking()


def leaking() -> Any:
    """Returns a model in which pads change states: its convolutions have a bias."""
    model = copy.deepcopy(tiny("lfm2", changes=(("conv_bias", True),)))
    for name, one in model.named_parameters():
        if "conv.conv.bias" in name or "in_proj.bias" in name:
            torch.nn.init.normal_(one, generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("pads", ["right", "left"])
def test_a_batch_whose_pads_change_states_publishes_the_rows_without_pads(pads: str) -> None:
    model = tiny("qwen3_next") if pads == "right" else leaking()
    mask = torch.ones_like(IDS)
    mask[1, -3:] = 0
    mask = mask if pads == "right" else mask.flip(1)
    mem = managed(model, **ROOM, prefix=None, tracking=ms.Redirect(every=4))
    with mst.StateCache(model, mem, ends=[]) as cache:
        model(input_ids=IDS, attention_mask=mask, past_key_values=cache)
        assert cache.lengths == [8, 0]
        kept = cache.close(publish=True)
    assert [one and one.length for one in kept] == [8, None]
    mem.drop(kept)
    assert mem.free_slots == 24


def test_ends_and_pads_that_only_generate_is_given_are_named_or_refused() -> None:
    model, free = tiny("bamba"), tiny("bamba").generate(IDS, **QUIET)
    mem, end, pad = managed(model, **ROOM, prefix=None, pages=ms.Pages(size=1, count=200, per_row=64),
                            tracking=ms.Redirect(every=1)), int(free[0, 9]), 1  # fmt: skip
    assert end not in free[1, 8:].tolist()
    given = {**QUIET, "eos_token_id": end, "pad_token_id": pad, "max_new_tokens": 8}
    for named in ({"ends": end, "pad": pad}, {"ends": [2, end], "pad": pad}, {}):
        with mst.StateCache(model, mem, **named) as cache:
            out = model.generate(IDS, past_key_values=cache, **given)
            assert out[0, 10:].tolist() == [pad] * 6
            if named:
                kept = cache.close(publish=True)
                assert [one.length for one in kept if one] == [10, 15]
                mem.drop(kept)
            else:
                with pytest.raises(ms.InvalidArgument, match=r"2 rows, and neither StateCache\(ends=\)"):
                    cache.close(publish=True)
                model(input_ids=out[:, -1:], past_key_values=cache)  # the cache still works
    for name, wrong in (
        ("ends", "12"), ("ends", True), ("ends", [None]), ("ends", [-1]), ("ends", 97), ("pad", "<pad>"), ("pad", [0]),
        ("pad", 2**70), ("pad", torch.tensor(7)),
    ):  # fmt: skip
        with pytest.raises(ms.InvalidArgument, match=f"{name}=.*: expected a token from 0 to 96"):
            mst.StateCache(model, mem, **{name: wrong})  # type: ignore[arg-type]
    assert mem.free_slots == 24


@pytest.mark.parametrize("own", [True, False])
def test_a_prompt_and_generate_have_one_mask(own: bool) -> None:
    """If the masks differ, `generate` is refused: `prompt=` has read pads as tokens, or has left tokens out."""
    model, mask = tiny("qwen3_next"), torch.ones_like(IDS)
    mask[0, :5] = 0
    mem = managed(model, **ROOM)
    with mst.StateCache(model, mem, prompt=IDS, prompt_mask=mask if own else None) as cache:
        other = {"attention_mask": torch.ones_like(mask) if own else mask}
        with pytest.raises(ms.InvalidArgument, match=r"entry 0: prompt= has read \d+ tokens, .* the same mask"):
            model.generate(IDS, past_key_values=cache, **QUIET, **other)
        same = {"attention_mask": mask if own else torch.ones_like(mask)}  # the cache still works
        expected = model.generate(IDS, **QUIET, **same)
        assert torch.equal(model.generate(IDS, past_key_values=cache, **QUIET, **same), expected)


def test_a_forward_of_no_tokens_is_refused() -> None:
    model = tiny("qwen3_next")
    mem = managed(model, **ROOM)
    with mst.StateCache(model, mem) as cache:
        model(input_ids=IDS, past_key_values=cache)
        with pytest.raises(ms.InvalidArgument, match=r"leaves out the 8 columns .* the whole conversation"):
            model(input_ids=IDS[:, :0], past_key_values=cache)
        assert cache.lengths == [8, 8]


def call(mask: Any = None, ids: Any = ((7, 8, 9), (7, 8, 9)), **more: Any) -> Call:
    shown = torch.tensor(ids)
    return Call(shown, *shown.shape, None if mask is None else torch.tensor(mask), **more)


ALL, LEFT, RIGHT, HOLE = (1, 1, 1), (0, 1, 1), (1, 1, 0), (1, 0, 1)
AT = torch.tensor([[3, 4, 5], [3, 4, 5]])


@pytest.mark.parametrize(
    ("first", "second", "settings", "lengths"),
    [
        (call(), call(), {}, [6, 6]),
        (call([ALL, LEFT]), call([[1] * 6, [0, *[1] * 5]]), {}, [6, 5]),
        (call([ALL, LEFT]), call([[1] * 6, [0, *[1] * 5]]), {"takes_pads": False}, [6, 0]),
        (call([ALL, RIGHT]), call([[1] * 6, [*RIGHT, *ALL]]), {}, [6, 0]),
        (call([ALL, HOLE]), call([[1] * 6, [*HOLE, *ALL]]), {}, [6, 0]),
        (call(), call([[1] * 6, [*ALL, *LEFT]]), {}, [6, 3]),
        (call(), call([[1] * 6, [*ALL, 0, 0, 0]]), {}, [6, 3]),
        (call(), call([[1] * 6, [*RIGHT, *ALL]]), {}, [6, 2]),  # the second mask shows a pad in the first forward
        (call(), call([[1] * 6, [*HOLE, *ALL]]), {}, [6, 1]),
        (call([ALL, LEFT]), call(), {}, [6, 2]),  # without a mask, layers read the pad as a token
        (call([ALL, LEFT]), call(), {"attends": False}, [6, 5]),
        (call(), call([ALL, ALL]), {}, [3, 3]),  # the second mask lacks the first columns
        (call(), call([ALL, ALL]), {"attends": False}, [6, 6]),
        (call(), call(readable=False), {}, [3, 3]),
        (call(readable=False), call(), {}, [0, 0]),
        (call(), call(plain=False), {}, [3, 3]),
        (call(), call(plain=False), {"filed": False}, [6, 6]),
        (call(), call(positions=AT), {}, [6, 6]),
        (call(), call(positions=AT[None, :1].expand(3, 1, 3)), {}, [6, 6]),
        (call(), call(positions=AT + torch.tensor([[0], [1]])), {}, [6, 3]),
        (call([ALL, LEFT], positions=torch.tensor([[0, 1, 2], [1, 0, 1]])), call([[1] * 6, [0, *[1] * 5]]), {}, [6, 5]),
        (call(), call(ids=((2,), (5,))), {}, [4, 4]),
        (call(), call(ids=((2,), (0,))), {}, [4, 3]),  # a pad that follows the end token
        (call(ids=((7,), (2,))), call(ids=((2, 1), (0, 1))), {}, [3, 1]),  # this turn begins with an unread pad
        (call(ids=((7,), (2,))), call(ids=((2,), (2,))), {}, [2, 1]),
    ],
)  # fmt: skip
def test_a_row_stops_counting_for_good(
    first: Call, second: Call, settings: dict[str, bool], lengths: list[int]
) -> None:  # fmt: skip
    rows = Lengths(2, frozenset([2]), 0, **{"takes_pads": True, "attends": True, "filed": True, **settings})
    past = 0
    for one in (first, second):
        rows.add(one, rows.look(one, past))
        past += one.columns
    assert rows.tokens.tolist() == lengths
    rows.take([1, 0, 1])  # reorders rows as beam search does
    after = call(ids=((5,), (5,), (5,)))
    if second.mask is None and first.mask is None:
        seen = rows.look(after, past)
        rows.add(after, seen)
        counted = [length + (length == past) for length in lengths]
        assert rows.tokens.tolist() == [counted[1], counted[0], counted[1]]


def test_positions_that_a_loop_leaves_out_are_those_of_the_tokens() -> None:
    """Bamba counts positions from 0 in each forward without positions."""
    model = tiny("bamba")
    mem = managed(model, **ROOM)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    given = torch.cat([IDS, torch.tensor([[5], [6]])], 1)
    with mst.StateCache(model, mem, prompt=given, prompt_mask=mask) as cache, torch.no_grad():
        for token in (given[:, -1:], torch.tensor([[4], [8]]), torch.tensor([[9], [9]])):
            mask = mask if token is given else torch.cat([mask, mask[:, -1:]], 1)
            logits = model(input_ids=token, attention_mask=mask[:, : cache.get_seq_length() + 1], past_key_values=cache)
        assert cache.lengths == [8, 11]
    text, known = [*given[0, 3:].tolist(), 4, 9], dict[tuple[int, ...], torch.Tensor]()
    alone(model, text, known, new=1)
    assert torch.allclose(logits.logits[0, -1], known[tuple(text)], atol=1e-5)


def test_a_row_that_begins_beside_others_begins_as_alone() -> None:
    """This family has a window of token ids. At the start, the window holds the end token, not zeros."""
    model, ids = tiny("qwen4_exp_text"), torch.tensor([[11, 12, 13, 14], [0, 0, 0, 40]])
    quiet, mem = {**QUIET, "attention_mask": ids.ne(0).long()}, managed(model, **ROOM)
    assert [plane.fill for plane in mst.layout(model).state.planes if not plane.dtype.is_floating_point] == [2]
    with mst.StateCache(model, mem, prompt=ids, prompt_mask=quiet["attention_mask"]) as cache:
        assert torch.equal(model.generate(ids, past_key_values=cache, **quiet), model.generate(ids, **quiet))

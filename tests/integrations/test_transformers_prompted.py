"""Tests `StateCache(prompt=)`: `generate` goes on from cached states and from KV in the manager's pages."""

from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.tiny_models import COMMON, COPIES, FAMILIES, PICTURES, small, tiny, without_gpu_kernels
from tests.support.tiny_served import TEXT, alone, managed

pytest.importorskip("transformers")
import memstate.integrations.transformers as mst
from tests.integrations.servers import SPECULATING, hooked, raising

QUIET = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
IDS = torch.tensor([TEXT[:19], TEXT[5:24]])
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
PURE = ("mamba", "falcon_mamba", "mamba2")  # without attention, `generate` feeds all tokens again
FOUND = [family for family in FAMILIES if family not in PURE]
# families that cannot decode on slots, or whose scans start from zeros
GOING_BACK = [family for family in FOUND if family not in (*COPIES, "zamba", "jamba")]
ROOM = {"slots": 24, "max_requests": 8}


def generated(model: Any, mem: ms.StateManager, kernels: Any = "auto", **settings: Any) -> tuple[Tensor, list[int]]:
    with mst.StateCache(model, mem, kernels=kernels, prompt=IDS, prompt_mask=settings.get("attention_mask")) as cache:
        return model.generate(IDS, past_key_values=cache, **QUIET, **settings), cache.cached


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FOUND)
def test_a_prompt_goes_on_from_what_an_earlier_one_left(family: str) -> None:
    model = tiny(family)
    mem, kernels = managed(model, **ROOM), "slots" if mst.layout(model).on_slots else "auto"
    for settings, cached in (
        ({}, [[0, 0], [16, 16]]), ({"attention_mask": MASK}, [[0, 16], [12, 16]]), ({"num_beams": 3}, [[16, 16]] * 2),
    ):  # fmt: skip
        expected = model.generate(IDS, **QUIET, **settings)
        for way, lengths in zip((kernels, "auto"), cached, strict=True):
            out, starts = generated(model, mem, way, **settings)
            assert torch.equal(out, expected), (settings, way)
            assert starts == lengths
    mem.audit().raise_if_leaking()
    assert mem.stats().rows_used == 0


@pytest.mark.parametrize("kept", [torch.zeros(3, 1, dtype=torch.long), torch.full((1, 1), -4)])
def test_pictures_of_another_batch_do_not_move_a_prompt(kept: Tensor) -> None:
    with without_gpu_kernels():
        from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        text = {**COMMON, **FAMILIES["qwen3_5_text"], "head_dim": 16, "rope_parameters": rope, "pad_token_id": 0}
        config = CONFIG_MAPPING["qwen3_5"](text_config=text, vision_config={**PICTURES, "patch_size": 8})
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    expected, mem = model.generate(IDS, **QUIET), managed(model, **ROOM)
    model.model.rope_deltas = kept
    assert torch.equal(generated(model, mem)[0], expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", PURE)
def test_a_model_whose_generate_does_not_ask_its_cache_goes_on_from_a_prompt(family: str) -> None:
    model, more = tiny(family), torch.tensor([[3, 90, 14], [7, 7, 61]])
    mem = managed(model, **ROOM)
    for cached in ([0, 0], [16, 16]):
        for settings in ({}, {"num_beams": 3}):
            with mst.StateCache(model, mem, prompt=IDS) as cache:
                assert cache.cached == cached
                answer = model.generate(IDS, **{cache.argument: cache}, **QUIET, **settings)
                assert torch.equal(answer, model.generate(IDS, **QUIET, **settings)), settings
            cached = [16, 16]
    # without memstate, these models read pads as tokens
    with mst.StateCache(model, mem, prompt=IDS, prompt_mask=MASK) as cache:
        out = model.generate(IDS, **{cache.argument: cache}, **QUIET, attention_mask=MASK)
        assert out[0, 19:].tolist() == model.generate(IDS[:1, 5:], **QUIET)[0, 14:].tolist()
        turn = [*out[1].tolist(), *more[1].tolist()]
        if mst.layout(model).continues:
            unread = torch.cat([out[:, -1:], more], 1)
            again = model.generate(unread, **{cache.argument: cache}, **QUIET)[1, 4:].tolist()
            assert again == model.generate(torch.tensor([turn]), **QUIET)[0, len(turn) :].tolist()


def test_generate_and_serve_share_a_prefix_cache_and_turns_go_on() -> None:
    model, more = tiny("lfm3"), torch.tensor([[3, 90, 14], [7, 7, 61]])
    mem, runs = managed(model, **ROOM), list[Tensor]()
    own = model.generate(IDS, **QUIET)
    runs.append(model.generate(torch.cat([own, more], 1), **QUIET))
    with mst.StateCache(model, mem, prompt=IDS) as cache:
        turn = model.generate(IDS, past_key_values=cache, **QUIET)
        runs.append(model.generate(torch.cat([turn, more], 1), past_key_values=cache, **QUIET))
        assert cache.lengths == [19 + 6 + 3 + 6 - 1] * 2
    assert torch.equal(*runs)
    text = [*runs[0][0].tolist(), 5, 6]
    (one,) = mst.serve(model, mem, [mst.Prompt(text, most=6)])
    assert (one.cached, one.tokens) == (32, alone(model, text, {}))
    longer = torch.tensor([[*text, *one.tokens, 9]])
    with mst.StateCache(model, mem, prompt=longer) as cache:
        assert cache.cached == [40]


def test_samples_of_a_prompt_fork_its_rows() -> None:
    model = tiny("falcon_h1")
    settings = {"do_sample": True, "max_new_tokens": 6, "pad_token_id": 0, "num_return_sequences": 3}
    torch.manual_seed(4)
    expected = model.generate(IDS, **settings)
    mem = managed(model, **ROOM)
    torch.manual_seed(4)
    with mst.StateCache(model, mem, prompt=IDS) as cache:
        assert torch.equal(model.generate(IDS, past_key_values=cache, **settings), expected)
        assert len(cache.rows) == 6


def test_snapshots_have_kv_and_pads_behind_an_end_are_left_out() -> None:
    model = tiny("bamba")
    mem = managed(model, **ROOM, pages=ms.Pages(size=1, count=200, per_row=64), tracking=ms.Redirect(every=1))
    ids = torch.tensor([TEXT[:19], TEXT[8:27]])
    free = model.generate(ids, **QUIET)
    end = int(free[0, 20])  # the second new token ends the first row
    assert end not in free[1, 19:].tolist()
    model.generation_config.eos_token_id = end
    try:
        with mst.StateCache(model, mem, prompt=ids) as cache:
            model.generate(ids, past_key_values=cache, **QUIET, eos_token_id=end)
            assert cache.lengths == [21, 24]
        with mst.StateCache(model, mem, prompt=free) as cache:
            assert cache.cached == [21, 24]  # the first row was cached up to its end
            model.generate(free, past_key_values=cache, **QUIET, eos_token_id=end)
            kept = cache.close(publish=True)
        snapshots = [one for one in kept if one]  # a row that was fed a pad has no snapshot
        assert [len(one.pages) for one in snapshots] == [one.length for one in snapshots] == [30]
        mem.drop(kept)
    finally:
        model.generation_config.eos_token_id = None
    mem.audit().raise_if_leaking()


def test_what_a_prompt_cannot_be_is_refused_by_name() -> None:
    model = tiny("lfm2")
    mem = managed(model, **ROOM)
    right = MASK.flip(1)
    for settings, why in (
        ({"prompt": IDS, "prompt_mask": right}, "pads at the left"), ({"prompt": IDS[0]}, "batch column"[:5]),
        ({"prompt": IDS, "prompt_mask": MASK[:1]}, "the same shape"), ({"prompt": IDS.tolist()}, "ids of generate"),
    ):  # fmt: skip
        with pytest.raises(ms.InvalidArgument, match=why):
            mst.StateCache(model, mem, **settings)
    with mst.StateCache(model, mem, prompt=IDS) as cache:
        with pytest.raises(ms.InvalidArgument, match="the ids that prompt= had"):
            model.generate(IDS + 1, past_key_values=cache, **QUIET)
        with pytest.raises(ms.InvalidArgument, match="no embeddings"):
            model(inputs_embeds=torch.zeros(2, 1, 32), past_key_values=cache)
        assert torch.equal(model.generate(IDS, past_key_values=cache, **QUIET), model.generate(IDS, **QUIET))
        cache.reset()
        assert torch.equal(model.generate(IDS, past_key_values=cache, **QUIET), model.generate(IDS, **QUIET))


def test_a_prompt_without_room_or_with_a_forward_that_raises_leaves_nothing() -> None:
    model = tiny("lfm2")
    mem = managed(model, slots=24, max_requests=1)
    with pytest.raises(ms.OutOfRows):
        mst.StateCache(model, mem, prompt=IDS)
    mem = managed(model, **ROOM)
    for mask in (None, MASK):  # with a mask, rows have different lengths, and each takes its own forward
        with hooked(model.model.layers[2], raising(ArithmeticError)), pytest.raises(ArithmeticError):
            mst.StateCache(model, mem, prompt=IDS, prompt_mask=mask)
    assert mem.stats().rows_used == 0
    assert mem.free_slots == 24
    with mst.StateCache(model, mem, prompt=IDS) as cache:
        model.generate(IDS, past_key_values=cache, **QUIET)
    mem.audit().raise_if_leaking()


TWICE = torch.tensor([TEXT[:9] * 2])  # a prompt in which prompt lookup finds guesses
LONGER = torch.tensor([[*TEXT[:30], *TEXT[:3]]])  # prompt lookup guesses more tokens than a tail has
LONG: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 30}
ASSISTED: dict[str, Any] = {
    **SPECULATING, "tracking": ms.Redirect(every=8), "pages": ms.Pages(size=4, count=60, per_row=20), "debug": True,
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("assistant", ["its own text", "a smaller model"])
@pytest.mark.parametrize("family", GOING_BACK)
def test_assisted_generation_goes_back_by_the_wrong_guesses(family: str, assistant: str) -> None:
    model, columns = tiny(family), list[int]()
    settings = {"prompt_lookup_num_tokens": 4} if assistant == "its own text" else {"assistant_model": small()}
    expected, mem = alone(model, TWICE[0].tolist(), {}, 30), managed(model, **ASSISTED)
    with mst.StateCache(model, mem, prompt=TWICE, kernels="slots") as cache:
        with hooked(model, lambda _, args, given: columns.append(given["input_ids"].shape[1])):
            out = model.generate(TWICE, past_key_values=cache, **LONG, **settings)
        assert out[0, 18:].tolist() == expected
        assert mem.info(cache.rows[0]).length == 18 + 30 - 1
    assert max(columns) > 1
    mem.audit().raise_if_leaking()
    with mst.StateCache(model, mem, prompt=out) as cache:
        assert cache.cached == [40] or 0 in expected  # a row that is fed pads is cached up to its end
    mem.close()


def test_right_guesses_save_forwards_of_generate() -> None:
    model, columns = tiny("lfm2"), list[int]()
    mem = managed(model, **ASSISTED)
    counted = hooked(model, lambda _, args, given: columns.append(given["input_ids"].shape[1]))
    with mst.StateCache(model, mem, prompt=TWICE, kernels="slots") as cache, counted:
        model.generate(TWICE, past_key_values=cache, prompt_lookup_num_tokens=4, **LONG)
    assert len(columns) < 20


def test_turns_go_on_behind_guesses() -> None:
    model, more = tiny("qwen3_next"), torch.tensor([[3, 90, 14]])
    mem, own = managed(model, **ASSISTED), TWICE
    settings = {**LONG, "max_new_tokens": 6}
    for tokens in (TWICE[:, :0], more, TEXT[:17]):
        own = model.generate(torch.cat([own, torch.as_tensor(tokens).view(1, -1)], 1), **settings)
    with mst.StateCache(model, mem, prompt=TWICE, kernels="slots") as cache:
        out = model.generate(TWICE, past_key_values=cache, prompt_lookup_num_tokens=4, **settings)
        out = torch.cat([out, more], 1)
        out = model.generate(out, past_key_values=cache, prompt_lookup_num_tokens=4, **settings)
        out = torch.cat([out, torch.tensor([TEXT[:17]])], 1)  # these guesses have more tokens than a tail
        out = model.generate(out, past_key_values=cache, **settings)
        with pytest.raises(ms.InvalidArgument, match=r"crop\(-1\): the last forward had 0 guesses"):
            cache.crop(-1)
    assert torch.equal(out, own)


def test_a_model_takes_assistants_only_while_a_cache_with_tails_is_open() -> None:
    model = tiny("qwen3_next")
    plain, mem = managed(model), managed(model, **ASSISTED)
    for settings in ({}, {"prompt": TWICE}):
        with mst.StateCache(model, plain, **settings) as cache, pytest.raises(ValueError, match="stateful"):
            model.generate(TWICE, past_key_values=cache, prompt_lookup_num_tokens=4, **LONG)
    cache = mst.StateCache(model, mem, prompt=TWICE, kernels="slots")
    model.generate(TWICE, past_key_values=cache, prompt_lookup_num_tokens=4, **LONG)
    del cache
    with pytest.raises(ValueError, match="stateful"):
        model.generate(TWICE, prompt_lookup_num_tokens=4, **LONG)


def test_caches_that_are_forgotten_and_several_of_them_leave_the_flag_to_those_that_are_open() -> None:
    model = tiny("qwen3_next")
    mem, again = managed(model, **ASSISTED), {"prompt_lookup_num_tokens": 4, **LONG}
    first = mst.StateCache(model, mem, prompt=TWICE, kernels="slots")
    second = mst.StateCache(model, mem, prompt=TWICE, kernels="slots")
    first.reset()
    del first
    model.generate(TWICE, past_key_values=second, **again)
    del second
    third = mst.StateCache(model, mem, prompt=TWICE, kernels="slots")
    with hooked(model.model.layers[2], raising(ArithmeticError)), pytest.raises(ArithmeticError):
        model.generate(TWICE, past_key_values=third, **again)
    del third
    with pytest.raises(ValueError, match="stateful"):
        model.generate(TWICE, **again)
    mem.audit().raise_if_leaking()


def test_guesses_that_cannot_be_checked_are_refused_by_name() -> None:
    """After the refusal, the cache can be used on, or closes without a leak."""
    model = tiny("qwen3_next")
    mem, again = managed(model, **ASSISTED), {"prompt_lookup_num_tokens": 4, **LONG}
    few, many = torch.tensor([[5]]), r"a forward of \d+ tokens, .* tails keep 16: .* 15 tokens at most"
    lookup = {"prompt_lookup_num_tokens": 17, **LONG}
    for ids, settings, told in ((few, {"assistant_model": small(), **LONG}, "behind 0 tokens"), (LONGER, lookup, many)):
        cache = mst.StateCache(model, mem, prompt=ids, kernels="slots")
        with pytest.raises(ms.InvalidArgument, match=told):
            model.generate(ids, past_key_values=cache, **settings)
        cache.close()
    with mst.StateCache(model, mem, prompt=TWICE, kernels="slots") as cache:
        for wrong in (-1.5, None, "a"):
            with pytest.raises(ms.InvalidArgument, match=r"^crop\(.*\): expected a whole number"):
                cache.crop(wrong)  # type: ignore[arg-type]
        assert model.generate(TWICE, past_key_values=cache, **again).shape[1] == 48
    mem.audit().raise_if_leaking()


def test_a_cache_whose_last_forward_raises_is_closed() -> None:
    """`close` runs a forward for pending tokens, and this forward raises."""
    model = tiny("qwen3_next")
    mem = managed(model, **ASSISTED)
    cache = mst.StateCache(model, mem, prompt=TWICE, kernels="slots")
    cache.activate_past_recording()
    with torch.no_grad():
        model(input_ids=torch.tensor([[int(TWICE[0, -1]), 3, 4, 5, 6]]), past_key_values=cache, use_cache=True)
    cache.crop(-1)
    assert mem.info(cache.rows[0]).pending == 4
    with hooked(model.model.layers[2], raising(ArithmeticError)), pytest.raises(ArithmeticError):
        cache.close()
    assert cache.close() == []
    assert mem.stats().rows_used == 0
    mem.audit().raise_if_leaking()


def test_a_cache_that_read_guesses_begins_anew_after_a_reset() -> None:
    model = tiny("qwen3_next")
    mem = managed(model, **ROOM, **SPECULATING)
    with mst.StateCache(model, mem, prompt=TWICE[:1], kernels="slots") as cache:
        expected = model.generate(TWICE[:1], **LONG)
        assert torch.equal(
            model.generate(TWICE[:1], past_key_values=cache, prompt_lookup_num_tokens=4, **LONG), expected
        )
        cache.reset()
        with torch.no_grad():
            model(input_ids=TWICE[:1], past_key_values=cache)
        assert cache.lengths == [TWICE.shape[1]]

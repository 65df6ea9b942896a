"""Tests refusals of the Transformers adapter: models, kernels, managers and requests that do not fit."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from tests.support.sources import ROOT
from tests.support.tiny_models import GPU_ONLY, small, tiny
from tests.support.tiny_served import NEW, TEXT, managed

pytest.importorskip("transformers")
from transformers import GenerationConfig, LogitsProcessor

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import own, probe
from tests.integrations.servers import SPECULATING, Judged, answer
from tests.support.own_model import own_model


@pytest.mark.parametrize("family", own.ELSEWHERE)
def test_families_whose_state_is_elsewhere_are_refused_and_on_the_page(family: str) -> None:
    model = SimpleNamespace(config=SimpleNamespace(model_type=family))
    with pytest.raises(ms.ConfigurationError, match=f"{family} {own.ELSEWHERE[family]}: .* that families share"):
        own.cache_argument(model)
    assert f"| `{family}` | " in (ROOT / "docs" / "transformers.md").read_text()


@pytest.mark.parametrize("function", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_kernels_that_need_a_gpu_are_named_where_a_model_on_a_cpu_got_them(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe.GPU_ONLY == GPU_ONLY
    model = tiny("qwen3_next", seed=3)
    inside: dict[str, Any] = {"__name__": "fla.ops.gated_delta_rule"}
    exec("def kernel(*args, **kwargs):\n    raise RuntimeError('0 active drivers')", inside)
    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module, function, inside["kernel"])
    why = r"kernels of fla, which need a GPU: .* environment without fla"
    with pytest.raises(ms.ConfigurationError, match=why) as hid:
        mst.manager(model, slots=2, max_requests=1)
    assert hid.value.__cause__ is None  # the message hides the error of the driver
    inside["__name__"] = "another.module"  # an error with another cause shows its own text
    with pytest.raises(ms.ConfigurationError, match=r"cannot read 8 tokens .* RuntimeError: 0 active drivers$") as hid:
        mst.manager(model, slots=2, max_requests=1)


FEW, IDS = {"slots": 4, "max_requests": 2}, torch.tensor([TEXT])
NO_PAGES = {"pages": None, "prefix": None}
OTHER = r"the manager has .*: use mst\.manager"


def made(make: Any, of: Any, manager: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Makes a cache or a server with a manager of its own."""
    return make(of, managed(of, **(manager or {})), **settings)


def elsewhere(make: Any, of: Any) -> Any:
    """Makes a cache or a server with the manager of another model."""
    return make(of, managed(tiny("qwen3_next")))


@pytest.mark.parametrize(("make", "error", "why"), [
    (lambda: mst.manager(tiny("deepseek_v4"), **FEW), ms.ConfigurationError,
     r"^deepseek_v4 keeps the windows .*presets\.from_config has the planes"),
    (lambda: mst.layout(small()), ms.ConfigurationError, "no layer left a recurrent state"),
    (lambda: made(mst.StateCache, tiny("mamba2", changes=(("hidden_act", "gelu"),)), kernels="slots"),
     ms.ConfigurationError, r"copies of its states .* no kernel does: activation 'gelu': expected one"),
    (lambda: elsewhere(mst.Server, tiny("lfm2")), ms.LayoutMismatch, OTHER),
    (lambda: elsewhere(mst.StateCache, tiny("lfm2")), ms.LayoutMismatch, OTHER),
    (lambda: elsewhere(mst.Server, tiny("qwen3_next", dtype=torch.bfloat16)), ms.LayoutMismatch, OTHER),
    (lambda: elsewhere(mst.Server, own_model()), ms.LayoutMismatch, OTHER),
    (lambda: made(mst.StateCache, tiny("zaya"), kernels="slots"), ms.ConfigurationError, "because a layer does"),
    (lambda: made(mst.StateCache, tiny("lfm2"), kernels="other"), ms.ConfigurationError, "expected one of"),
    (lambda: made(mst.StateCache, tiny("lfm2"), NO_PAGES, prompt=IDS), ms.ConfigurationError, "tokens="),
    (lambda: made(mst.Server, tiny("lfm2"), NO_PAGES), ms.ConfigurationError, "tokens="),
    (lambda: made(mst.Server, tiny("lfm2"), chunk=0), ms.InvalidArgument, "chunk 0"),
    (lambda: made(mst.Server, tiny("lfm2"), tokenizer="gpt2"), ms.InvalidArgument, r"'gpt2': .*\(tokenizer_object="),
    (lambda: made(mst.Server, tiny("lfm2"), SPECULATING, assistant=5), ms.ConfigurationError, "a model, or a function"),
    (lambda: made(mst.Server, tiny("lfm2"), assistant=small()), ms.ConfigurationError, r"Forward\(tail=16\)"),
    (lambda: made(mst.Server, tiny("lfm2"), SPECULATING, assistant=small(98)), ms.ConfigurationError,
     "98 tokens, and the model one of 97"),
    (lambda: made(mst.Server, tiny("lfm2"), SPECULATING, assistant=tiny("lfm2")), ms.ConfigurationError,
     "cannot forget rejected tokens"),
    (lambda: mst.manager(tiny("lfm2"), **FEW, tokens=64, pages=ms.Pages(size=16, count=8, per_row=4)),
     ms.ConfigurationError, r"tokens=64 and pages=Pages\(.*: give one"),
])  # fmt: skip
def test_what_does_not_fit_a_model_is_refused(make: Callable[[], object], error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        make()


def test_managers_that_fit_are_taken() -> None:
    mem = ms.StateManager(mst.layout(tiny("qwen3_next")).state, **FEW)
    mst.StateCache(tiny("qwen3_next"), mem).close()
    mst.Server(tiny("mamba2"), mst.manager(tiny("mamba2"), **FEW))  # without attention, the manager needs no pages
    mst.Server(tiny("lfm2"), mst.manager(tiny("lfm2"), **FEW, tokens=64))


@pytest.mark.parametrize(("family", "fields", "why"), [
    ("lfm2", {"num_beams": 2}, "asks for beam_search"),
    ("lfm2", {"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
    ("lfm2", {"dola_layers": "high"}, "dola_generation"),
    ("lfm2", {"max_time": 0.001}, r"max_time: .*timeout="),
    ("lfm2", {"token_healing": True}, "token_healing"),
    ("lfm2", {"num_return_sequences": 2}, "Greedy methods"),
    ("lfm2", {"num_return_sequences": 2, "do_sample": True}, "one answer"),
    ("lfm2", {"stop_strings": ["a"]}, "tokenizer="),
    ("lfm2", {"max_length": 9}, "9 tokens, and max_length=9 counts them"),
    ("lfm2", {"do_sample": True, "temperature": 0.0}, "temperature"),
    ("lfm2", {"prompt_lookup_num_tokens": 3}, r"Forward\(tail=16\)\)"),
    ("lfm2", {"stop_strings": ["a", ""]}, "empty text"),
    ("lfm2", {"stop_strings": [5]}, "sequence of str"),
    ("lfm2", {"stop_strings": b"x"}, "sequence of str"),
    ("lfm2", {"eos_token_id": {5}}, "."),
    ("jamba", {"prompt_lookup_num_tokens": 3}, "starts from zeros"),
])  # fmt: skip
def test_a_request_for_what_serve_does_not_do_is_refused(family: str, fields: dict[str, Any], why: str) -> None:
    config, at = GenerationConfig(), Judged(family, prefix=ms.Prefix())
    for name, value in fields.items():  # set here, as the constructor refuses some values
        setattr(config, name, value)
    with pytest.raises(ms.InvalidArgument, match=f"{why}"):
        at.ask("bad", config=config, most=None, session=at.mem.sessions.open("chat"))
    at.ends()


async def later(event: mst.Event) -> None:
    """A coroutine function as listener: nobody would await its result."""


@pytest.mark.parametrize(("settings", "why"), [
    *[({"timeout": timeout}, "timeout=.*expected seconds") for timeout in ("5", [1], True, float("nan"), 0)],
    ({"priority": 1.5}, "priority=1.5: expected a whole number"), ({"tenant": []}, "tenant"),
    *[({"seed": seed}, "seed=.*whole number of 64 bits") for seed in ("x", 1.5, 2**70, True)],
    *[({"most": most}, "most .*: expected 1 or more") for most in ("3", 2.5, True, 0)],
    *[({"processors": given}, "processors .*: expected a sequence") for given in (None, LogitsProcessor())],
    *[({"config": config}, "config=.*expected a GenerationConfig") for config in ({}, "x", GenerationConfig)],
    *[({"to": to}, "to=.*expected a function that is not async") for to in (5, later)],
    ({"tokens": torch.empty(3, device="meta", dtype=torch.long)}, "expected a row of ids"),
    *[({"salt": salt}, "salt") for salt in (1.0, True, ["a"])], ({"kind": ""}, "kind=''"),
    *[({"logprobs": n}, r"logprobs .*: expected 0 or more") for n in (-1, 1.0, True)],
    ({"config": GenerationConfig(num_return_sequences=10**9, do_sample=True)}, "0 is above max_requests=3"),
])  # fmt: skip
def test_a_setting_that_cannot_be_meant_is_refused_with_its_value(settings: dict[str, Any], why: str) -> None:
    at, settings = Judged("lfm2"), {"tokens": TEXT[:9], **settings}
    to = settings.pop("to", None)
    with pytest.raises(ms.InvalidArgument, match=f"(prompt 'bad'.*|^){why}"):
        at.server.submit(mst.Prompt(id="bad", **settings), to)
    at.ends()


@pytest.mark.parametrize("kind", [int, tuple, np.array, torch.tensor, lambda ends: [torch.tensor(end) for end in ends]])
def test_ends_of_text_are_those_that_generate_takes(kind: Any) -> None:
    at, config = Judged("lfm2"), GenerationConfig(max_new_tokens=NEW)
    said = answer(at.model, TEXT[:9])
    config.eos_token_id = said[2] if kind is int else kind([96, said[2]])
    at.ask(*"ab", config=config, most=None)
    at.rest()
    at.ask("c", config=GenerationConfig(eos_token_id=said[1]))  # another configuration, in the same server
    assert [(one.tokens, one.stop) for one in at.ends(others="end").values()] == [
        (said[:length], said[length - 1]) for length in (3, 3, 2)
    ]


def test_priorities_of_numpy_are_numbers_like_others() -> None:
    at = Judged("lfm2", max_requests=1)
    for id, priority in (("first", np.int8(-128)), ("low", 0), ("high", np.uint8(3))):
        at.ask(id, most=1, priority=priority)
    assert [one.id for _ in range(9) for one in at.step() if isinstance(one, mst.Served)] == ["high", "low", "first"]

"""What cannot run: states elsewhere, kernels for a GPU on a CPU, managers and requests that do not fit a model."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from tests.support.sources import ROOT
from tests.support.tiny_models import GPU_ONLY, tiny, without_gpu_kernels
from tests.support.tiny_served import TEXT, managed

pytest.importorskip("transformers")
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.xlstm.modeling_xlstm import xLSTMCache

import memstate.integrations.transformers as mst
from memstate.integrations.transformers import probe
from tests.integrations.servers import SPECULATING
from tests.support.own_model import own_model

IDS = torch.zeros(3, 5, dtype=torch.long, device="meta")


def without_weights(family: str) -> Any:
    settings = {
        "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }  # fmt: skip
    with without_gpu_kernels(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings)).bfloat16().eval()


def rwkv(model: Any) -> None:
    state = model(input_ids=IDS, use_cache=True).state
    assert isinstance(state, list) and all(isinstance(one, Tensor) for one in state)


def xlstm(model: Any) -> None:
    cache = xLSTMCache(model.config, 3, device="meta")
    assert not isinstance(cache, Cache) and not hasattr(cache, "layers")
    assert isinstance(cache.rnn_state, dict)


def recurrent_gemma(model: Any) -> None:
    cache = DynamicCache(config=model.config)
    model(input_ids=IDS, use_cache=True, past_key_values=cache)
    empty = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    assert len(empty) == 2
    assert not any(any(probe.states_of(layer, kind).values()) for layer in empty for kind in probe.KINDS)
    held = [
        getattr(part, name)
        for part in model.modules()
        for name in ("recurrent_states", "conv1d_state")
        if hasattr(part, name)
    ]
    assert len(held) == 4 and {len(one) for one in held} == {3}  # two layers, a batch of 3


def minimax(model: Any) -> None:
    with pytest.raises(ValueError, match="uses cache of its own and is not compatible"):
        model(input_ids=IDS, use_cache=True, past_key_values=DynamicCache(config=model.config))
    cache = model(input_ids=IDS, use_cache=True).past_key_values
    assert any(isinstance(one, Tensor) for one in cache.linear_cache)
    assert not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)


CLAIMS: dict[str, tuple[Callable[[Any], None], str]] = {
    "rwkv": (rwkv, "takes and returns a list of tensors"),
    "xlstm": (xlstm, "has a cache class of its own, xLSTMCache, which is a dict of tensors"),
    "recurrent_gemma": (recurrent_gemma, "attributes of its modules"),
    "minimax": (minimax, "accepts only its own MiniMaxCache, which has its states in a list beside the layers"),
}


@pytest.mark.parametrize("family", CLAIMS)
def test_families_whose_state_is_elsewhere_are_refused_with_what_is_true_of_them(family: str) -> None:
    claim, why = CLAIMS[family]
    model = without_weights(family)
    claim(model)
    with pytest.raises(ms.ConfigurationError, match=why):
        mst.layout(model)


def test_every_claim_is_tried_and_on_the_page() -> None:
    assert set(CLAIMS) == set(probe.ELSEWHERE)
    page = (ROOT / "docs" / "transformers.md").read_text()
    assert all(f"| `{family}` | " in page for family in CLAIMS)


def test_models_without_any_recurrent_state_are_refused_by_name() -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](hidden_size=16, num_hidden_layers=2,
        intermediate_size=16, num_attention_heads=2))  # fmt: skip
    with pytest.raises(ms.ConfigurationError, match="no layer left a recurrent state"):
        mst.layout(model)


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
    with pytest.raises(ms.ConfigurationError, match=r"kernels of fla, which need a GPU: .* environment without fla"):
        mst.manager(model, slots=2, max_requests=1)
    inside["__name__"] = "another.module"  # what fails for another reason stays what it is
    with pytest.raises(RuntimeError, match=r"^0 active drivers$"):
        mst.manager(model, slots=2, max_requests=1)


PROMPT, FEW = torch.tensor([TEXT[:9]]), {"slots": 4, "max_requests": 2}
NO_PAGES = {"pages": None, "prefix": None}
OTHER = r"the manager has .*: use mst\.manager"


@pytest.mark.parametrize(("make", "family", "other", "manager", "settings", "error", "why"), [
    ("Server", "lfm2", "qwen3_next", {}, {}, ms.LayoutMismatch, OTHER),
    ("StateCache", "lfm2", "qwen3_next", {}, {}, ms.LayoutMismatch, OTHER),
    ("StateCache", "zaya", "zaya", {}, {"kernels": "slots"}, ms.ConfigurationError, "does not call the functions"),
    ("StateCache", "lfm2", "lfm2", {}, {"kernels": "other"}, ms.ConfigurationError, "expected one of"),
    ("Server", "lfm2", "lfm2", NO_PAGES, {}, ms.ConfigurationError, "tokens="),
    ("StateCache", "lfm2", "lfm2", NO_PAGES, {"prompt": PROMPT}, ms.ConfigurationError, "tokens="),
    ("StateCache", "mamba2", "mamba2", {}, {"prompt": PROMPT}, ms.ConfigurationError, "use serve"),
    ("Server", "lfm2", "lfm2", {}, {"chunk": 0}, ms.InvalidArgument, "chunk 0"),
    ("Server", "lfm2", "lfm2", SPECULATING, {"assistant": 5}, ms.ConfigurationError, "a model, or a function"),
])  # fmt: skip
def test_what_does_not_fit_a_model_is_refused(
    make: str, family: str, other: str, manager: dict[str, Any], settings: dict[str, Any], error: Any, why: str
) -> None:
    mem = managed(tiny(other), **manager)
    with pytest.raises(error, match=why):
        getattr(mst, make)(tiny(family), mem, **settings)


def test_a_model_of_another_dtype_or_of_ones_own_is_refused() -> None:
    mem = managed(tiny("qwen3_next"))
    for model in (tiny("qwen3_next", dtype=torch.bfloat16), own_model()):
        with pytest.raises(ms.LayoutMismatch, match=OTHER):
            mst.Server(model, mem)


def test_an_assistant_that_cannot_draft_is_refused() -> None:
    model = tiny("qwen3_next")

    def small(vocabulary: int) -> Any:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](vocab_size=vocabulary, **sizes))

    for mem, assistant, why in (
        (managed(model), small(97), r"Forward\(speculation=True\)"),
        (managed(model, **SPECULATING), small(98), "98 tokens, and the model one of 97"),
        (managed(model, **SPECULATING), model, "cannot forget rejected tokens"),
    ):
        with pytest.raises(ms.ConfigurationError, match=why):
            mst.Server(model, mem, assistant=assistant)


def test_managers_that_fit_are_taken() -> None:
    mem = ms.StateManager(mst.layout(tiny("qwen3_next")).state, **FEW)
    mst.StateCache(tiny("qwen3_next"), mem).close()
    mst.Server(tiny("mamba2"), mst.manager(tiny("mamba2"), **FEW))  # no layer attends
    mst.Server(tiny("lfm2"), mst.manager(tiny("lfm2"), **FEW, tokens=64))


@pytest.mark.parametrize(("family", "fields", "why"), [
    ("lfm2", {"num_beams": 2}, "2 beams"),
    ("lfm2", {"num_return_sequences": 2}, "Greedy methods"),
    ("lfm2", {"num_return_sequences": 2, "do_sample": True}, "one answer"),
    ("lfm2", {"stop_strings": ["a"]}, "tokenizer="),
    ("lfm2", {"max_length": 9}, "9 tokens, and max_length=9 counts them"),
    ("lfm2", {"do_sample": True, "temperature": 0.0}, "temperature"),
    ("lfm2", {"prompt_lookup_num_tokens": 3}, r"Forward\(speculation=True\), overlap=False"),
    ("jamba", {"prompt_lookup_num_tokens": 3}, "starts from zeros"),
])  # fmt: skip
def test_a_request_for_what_serve_does_not_do_is_refused(family: str, fields: dict[str, Any], why: str) -> None:
    config, model = GenerationConfig(), tiny(family)
    for name, value in fields.items():  # the constructor refuses some of them itself
        setattr(config, name, value)
    mem = managed(model)
    server, chat = mst.Server(model, mem), mem.sessions.open("chat")
    with pytest.raises(ms.InvalidArgument, match=f"prompt 'bad'.*{why}"):
        server.submit(mst.Prompt(TEXT[:9], "bad", config=config, session=chat))
    assert not server.busy


REAL = """
import memstate.integrations.transformers as mst
from transformers import AutoModelForCausalLM, Qwen3NextConfig
from tests.support.tiny_models import COMMON, FAMILIES
model = AutoModelForCausalLM.from_config(Qwen3NextConfig(**{**COMMON, **FAMILIES["qwen3_next"]})).eval()
try:
    mst.manager(model, slots=2, max_requests=1)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.proof
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fla_beside_transformers_is_named_on_a_cpu() -> None:
    pytest.importorskip("fla")
    done = subprocess.run([sys.executable, "-c", REAL], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "ConfigurationError Qwen3NextForCausalLM is on a CPU" in done.stdout, done.stderr

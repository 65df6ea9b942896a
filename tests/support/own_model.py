"""Defines a hybrid Transformers model that is no part of Transformers: memstate knows none of its names."""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

HEADS, SIZE, WIDTH = 2, 6, 3
STATES = ("linear_attention", "hybrid", "hybrid_sliding")  # kinds of layers with states
FULL, SLIDING = ("full_attention", "hybrid"), ("sliding_attention", "hybrid_sliding")  # kinds with attention
LAYERS = ("linear_attention", "full_attention", "moe", "linear_attention")
NAMES = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
ARGUMENT = "cache" if "cache" in NAMES else "past_key_values"  # the name of the cache in calls from `generate`


class OwnConfig(PreTrainedConfig):
    """The configuration. By default two of four layers have states, of different sizes, and one has attention."""

    model_type = "memstate_own"
    vocab_size = 97
    hidden_size = 24
    sliding_window = 6

    def __init__(self, layer_types: Sequence[str] = LAYERS, **settings: Any) -> None:
        self.layer_types, self.num_hidden_layers = list(layer_types), len(layer_types)
        super().__init__(**settings)


def norm(x: Tensor) -> Tensor:
    """Scales each vector to a root mean square of 1."""
    return nn.functional.rms_norm(x, x.shape[-1:])


class Memory(nn.Module):
    """A layer with states: a short convolution, then a decaying sum of outer products, computed token by token."""

    def __init__(self, hidden: int, number: int, values: int) -> None:
        super().__init__()
        self.number, self.sizes = number, [SIZE, SIZE, values]
        self.inner, self.outer = nn.Linear(hidden, sum(self.sizes)), nn.Linear(values, hidden)
        self.taps = nn.Parameter(torch.randn(sum(self.sizes), 1, WIDTH))

    def forward(self, x: Tensor, real: Tensor | None, cache: Any) -> Tensor:
        mixed = self.inner(x).mT if real is None else (self.inner(x) * real[..., None]).mT
        state = cache.get_recurrent_state(self.number)
        window = cache.update_conv_state(mixed, self.number, conv_kernel_size=WIDTH)
        window = nn.functional.pad(window, (WIDTH - 1, 0))
        mixed = nn.functional.conv1d(window, self.taps, groups=sum(self.sizes))[..., -x.shape[1] :]
        q, k, v = mixed.mT.split(self.sizes, -1)
        outputs = []
        for at in range(x.shape[1]):
            new = k[:, at, :, None] * v[:, at, None]
            state = new if state is None else 0.9 * state + new
            outputs.append((q[:, at, None] @ state)[:, 0])
        cache.update_recurrent_state(state, self.number)
        return self.outer(torch.stack(outputs, 1))


class Attention(nn.Module):
    """Attention with two heads. Positions are added to the inputs."""

    def __init__(self, hidden: int, number: int) -> None:
        super().__init__()
        self.number, self.inner, self.outer = number, nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None, positions: Tensor, cache: Any) -> Tensor:
        x = x + torch.sin(positions[..., None] * torch.linspace(0.1, 1, x.shape[-1]))
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.inner(x).chunk(3, -1))
        k, v = cache.update(k, v, self.number)
        heads = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and x.shape[1] > 1)
        return self.outer(heads.transpose(1, 2).flatten(2))


class OwnModel(PreTrainedModel, GenerationMixin):
    """The hybrid model with a head for logits."""

    config_class = OwnConfig
    _supports_sdpa = True

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.embed, self.head = nn.Embedding(config.vocab_size, hidden), nn.Linear(hidden, config.vocab_size)
        kinds = list(enumerate(config.layer_types))
        self.memories = nn.ModuleDict(
            {str(number): Memory(hidden, number, 10 if number else 4) for number, kind in kinds if kind in STATES}
        )
        self.attentions = nn.ModuleDict(
            {str(number): Attention(hidden, number) for number, kind in kinds if kind in (*FULL, *SLIDING)}
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.4)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        cache: Any = None, use_cache: bool = True, **_: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        x, cache = self.embed(input_ids), cache or DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = (cache.get_seq_length() + torch.arange(x.shape[1]))[None]
        given = (self.config, x, attention_mask, cache, position_ids)
        masks = [create_causal_mask(*given), create_sliding_window_causal_mask(*given)]
        real = attention_mask if attention_mask is not None and attention_mask.shape == input_ids.shape else None
        for number, kind in enumerate(self.config.layer_types):
            if kind in STATES:
                x = x + norm(self.memories[str(number)](norm(x), real, cache))
            if kind in (*FULL, *SLIDING):
                x = x + norm(self.attentions[str(number)](norm(x), masks[kind in SLIDING], position_ids, cache))
        return CausalLMOutputWithPast(logits=cast(Any, self.head(norm(x))), **{ARGUMENT: cache})


if ARGUMENT != "cache":  # Transformers before 5.24

    def forward(
        self: OwnModel, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, use_cache: bool = True, *, ours: Any = OwnModel.forward, **_: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        output: CausalLMOutputWithPast = ours(self, input_ids, attention_mask, position_ids, past_key_values)
        return output

    OwnModel.forward = forward  # type: ignore[method-assign, assignment]


def own_model(layer_types: Sequence[str] = LAYERS) -> OwnModel:
    """Returns the model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    return OwnModel(OwnConfig(layer_types)).eval()

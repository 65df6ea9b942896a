"""Runs a model once on a few tokens with its own cache, and reads what the cache holds.

No code here depends on the name of a model family.
"""

import inspect
from math import nan
from traceback import walk_tb
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from memstate.errors import ConfigurationError
from memstate.integrations.transformers.own import TOKENS, cache_argument, copied, own_cache, read, sample, unchanged

KINDS: Final = ("conv", "recurrent")

NEAR: Final = 1e-5  # least tolerance, as a part of the largest value
ROUNDED: Final = 4  # tolerance in eps of the dtype, because sums in another order round differently

# packages of GPU kernels that Transformers uses if they are installed
GPU_ONLY: Final = ("fla", "mamba_ssm", "causal_conv1d")


class ProbedState(NamedTuple):
    """One state of one layer.

    Attributes:
        layer: number of the layer.
        kind: "conv", a window of inputs, or "recurrent".
        state: number of the state within the layer.
        shape: shape of the state of one request.
        dtype: dtype of the elements.
        start: value of each element before the first token: 0, but a window of token ids can begin with an end-of-text
            id.
    """

    layer: int
    kind: str
    state: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: float = 0


class Attended(NamedTuple):
    """The KV of one layer.

    Attributes:
        layer: number of the layer.
        keys: (heads, size of a head) of the keys.
        values: (heads, size of a head) of the values.
        dtype: dtype of the elements.
        window: tokens that a sliding window sees; None: all.
        indexed: (size, dtype) of a key of the layer's index, or None.
        axes: number of axes of the positions that the layer keeps beside its index; 0 if it keeps none.
    """

    layer: int
    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    window: int | None
    indexed: tuple[int, torch.dtype] | None
    axes: int


class Findings(NamedTuple):
    """What a model keeps between two forwards.

    Attributes:
        argument: name of the argument of the model's forward that takes a cache.
        layers: number of layers of the model's cache.
        held: the states, in the order of the layers.
        attended: the KV, in the order of the layers.
        continues: whether the model can read a chunk of several tokens after a state. Mamba-1 cannot: its scans always
            start from zeros.
        takes_pads: whether pads before a prompt leave its states unchanged, so that prompts of several lengths can
            share a forward.
        copies: for each layer that the model adds at the end of its cache, the number of the layer that it copies.
    """

    argument: str
    layers: int
    held: tuple[ProbedState, ...]
    attended: tuple[Attended, ...]
    continues: bool
    takes_pads: bool
    copies: tuple[int, ...] = ()


@torch.no_grad()
def probe(model: Any) -> Findings:
    """Runs a model on 8 tokens of one request with its own cache, in two chunks, and reads the cache.

    Args:
        model: a model of Transformers, with its weights.

    Raises:
        ConfigurationError: the model keeps no recurrent state in a cache, is on a CPU with kernels for a GPU, or
            cannot read the tokens; the `__cause__` of the error says why.

    Syncs: yes.
    """
    try:
        with unchanged(model):
            model.eval()
            return _found(model)
    except ConfigurationError:
        raise
    except Exception as error:
        if model.device.type == "cpu" and (package := _kernels_in(error)):
            raise ConfigurationError(
                f"{type(model).__name__} is on a CPU, and Transformers gave it the kernels of {package}, which need a "
                f"GPU: move the model to one, or use an environment without {package}"
            ) from None
        raise ConfigurationError(
            f"{type(model).__name__} cannot read {2 * TOKENS} tokens of one request with a cache of its own, so its "
            f"layout stays unknown: {type(error).__name__}: {error}"
        ) from error


def _found(model: Any) -> Findings:
    argument, cache, ids = cache_argument(model), own_cache(model), sample(model)
    read(model, argument, cache, ids[:, :TOKENS])
    short = own_cache(model)
    read(model, argument, short, ids[:, :1])
    pairs = enumerate(zip(cache.layers, short.layers, strict=True))
    held = tuple(state for layer, (filled, begun) in pairs for state in _held(layer, filled, begun))
    if not held:
        raise ConfigurationError(
            f"{type(model).__name__}: no layer left a recurrent state in the cache, so there is nothing to manage"
        )
    attended = tuple(kv for layer in range(len(cache.layers)) if (kv := _attended(layer, cache.layers[layer])))
    read(model, argument, cache, ids[:, TOKENS : TOKENS + 1], TOKENS)  # a single token: runs the kernels of decode
    has_recurrent = any(one.kind == "recurrent" for one in held)  # a model with windows only can always continue
    continues = not has_recurrent or felt(model, argument, TOKENS, "recurrent")
    takes_pads, copies = _takes_pads(model, argument), copied(model, cache)
    return Findings(argument, len(cache.layers), held, attended, continues, takes_pads, copies)


def _kernels_in(error: Exception) -> str:
    """Returns the package of kernels that raised an exception, or "" if none did."""
    for frame, _ in walk_tb(error.__traceback__):
        if (package := str(frame.f_globals.get("__name__")).partition(".")[0]) in GPU_ONLY:
            return package
    return ""


def states_of(layer: Any, kind: str) -> dict[int, Tensor | None]:
    """Returns the states of one kind that a layer of a cache holds, by number."""
    states: dict[int, Tensor | None] = layer.conv_states if kind == "conv" else layer.recurrent_states
    return states


def _held(number: int, layer: Any, begun: Any) -> list[ProbedState]:
    """Returns the states of a layer. `begun` is the same layer of another cache, after only one token."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return []
    return [
        ProbedState(
            number, kind, state, tuple(tensor.shape[1:]), tensor.dtype, _start(states_of(begun, kind)[state], kind)
        )
        for kind in KINDS
        for state, tensor in states_of(layer, kind).items()
        if tensor is not None
    ]


def _start(behind_one: Tensor | None, kind: str) -> float:
    """Returns the start value of a state. In a window after one token, all elements but the last still have it."""
    if kind != "conv" or behind_one is None or behind_one.shape[-1] < 2:
        return 0
    first = behind_one.flatten()[0]
    return first.item() if torch.all(behind_one[..., :-1] == first) else 0


def _attended(number: int, layer: Any) -> Attended | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.dim() != 4:
        return None
    window = int(layer.sliding_window) if getattr(layer, "is_sliding", False) else None
    index, positions = getattr(layer, "indexer_keys", None), getattr(layer, "indexer_position_ids", None)
    return Attended(
        number, (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), keys.dtype, window,
        None if index is None else (index.shape[2], index.dtype), 0 if positions is None else positions.shape[0],
    )  # fmt: skip


def _takes_pads(model: Any, argument: str) -> bool:
    """Returns whether 4 tokens give the same states and logits with 4 pads before them as without pads."""
    parameters = inspect.signature(model.forward).parameters
    if "attention_mask" not in parameters:
        return False
    prompt, pads = sample(model).split(TOKENS, 1)
    given: dict[str, Any] = {"attention_mask": torch.arange(-TOKENS, TOKENS, device=model.device)[None].ge(0).long()}
    if "position_ids" in parameters:
        given["position_ids"] = torch.arange(-TOKENS, TOKENS, device=model.device)[None].clamp(min=0)
    alone, behind = own_cache(model), own_cache(model)
    logits = read(model, argument, alone, prompt).logits
    padded = read(model, argument, behind, torch.cat([pads, prompt], 1), **given).logits
    return _near(padded[:, TOKENS:], logits) and all(
        _near(state, expected)
        for one, other in zip(behind.layers, alone.layers, strict=True)
        if isinstance(one, LinearAttentionCacheLayerMixin)
        for kind in KINDS
        for state, expected in zip(states_of(one, kind).values(), states_of(other, kind).values(), strict=True)
        if state is not None and expected is not None
    )


def _near(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether two tensors differ only as much as sums in another order differ. False with NaN."""
    if not expected.is_floating_point():  # a window of tokens
        return torch.equal(actual, expected)
    eps = torch.finfo(expected.dtype).eps
    return bool((actual - expected).abs().max() <= max(NEAR, ROUNDED * eps) * expected.abs().max())


@torch.no_grad()
def felt(model: Any, argument: str, tokens: int, kind: str, part: Any = ...) -> bool:
    """Returns whether NaN in the states of a model's own cache changes any bit of its next logits.

    Args:
        model: the model, in evaluation mode.
        argument: name of the argument of the model's forward that takes a cache.
        tokens: number of tokens of the forward that reads these states, at most 4.
        kind: kind of the states that get NaN. If there are none, the result is False.
        part: index of the part of each state that gets NaN.

    Syncs: yes.
    """
    ids, outputs = sample(model), list[Tensor]()
    for spoiled in (True, False):
        cache = own_cache(model)
        read(model, argument, cache, ids[:, :TOKENS])
        layers = [one for one in cache.layers if isinstance(one, LinearAttentionCacheLayerMixin)]
        if not (states := [state for one in layers for state in states_of(one, kind).values() if state is not None]):
            return False
        for state in states if spoiled else ():
            state[part].fill_(nan)  # nan, because a finite number could vanish in a state that decays fast
        outputs.append(read(model, argument, cache, ids[:, TOKENS : TOKENS + tokens], TOKENS)[0])
    return not torch.equal(*outputs)

"""Finds which layers of a configuration hold state, and which attend, from any list of layers that it may have.

Layers count from 0, as in the model. Knows no dimension of a state.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from memstate.checks import is_whole
from memstate.errors import InvalidArgument
from memstate.state.presets.fields import Fields

Layers = tuple[int, ...]

# Tokens of a window -> kind of the layers that pool such windows, for checkpoints that list only these numbers.
COMPRESSED: Final = {4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
# Kinds of layers that hold state; checkpoints written before transformers 5.0 say "mamba".
STATE_LAYERS: Final = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba", *COMPRESSED.values())
ATTENTION_LAYERS: Final = (  # kinds of layers that have KV; "attention" before transformers 5.0
    "full_attention", "sliding_attention", "indexed_attention", "attention", "hybrid", "hybrid_sliding",
)  # fmt: skip
PURE: Final = ("mamba2", "mamba", "falcon_mamba", "rwkv7", "mamba3")  # model types in which no layer attends
BESIDE: Final = ("falcon_h1", "zaya", "inkling_text", "inkling2_text")  # every layer attends and has state
EVERY_LAYER: Final = ("zamba", "zamba2", *BESIDE, *PURE)  # every layer has state


def kinds(fields: Fields, name: str) -> tuple[str, ...]:
    """Returns a field that lists the kind of each layer. Raises: InvalidArgument."""
    listed = fields.get(name)
    if not isinstance(listed, list | tuple) or not all(isinstance(kind, str) for kind in listed):
        raise fields.refused(name, expected="a list with the kind of each layer")
    return tuple(listed)


def _of_kinds(fields: Fields, name: str) -> Layers:
    return tuple(layer for layer, kind in enumerate(kinds(fields, name)) if kind in STATE_LAYERS)


def _of_pattern(fields: Fields, name: str, letter: str = "M") -> Layers:
    pattern = fields.get(name)
    if not isinstance(pattern, str):
        raise fields.refused(name, expected="a text with a letter for each layer")
    return tuple(layer for layer, kind in enumerate(pattern) if kind == letter)


def _of_kimi(fields: Fields, name: str) -> Layers:
    """Returns the layers of a list that counts from 1; without `num_hidden_layers`, its largest layer is the last."""
    total, attention = fields.get("num_hidden_layers"), "linear_attn_config.full_attn_layers"
    known = range(1, 1 + (2**31 if total is None else fields.number("num_hidden_layers")))
    state = fields.numbers(name, known)
    both = set(state) & set(fields.numbers(attention, known)) if fields.get(attention) is not None else set()
    if both:
        raise fields.refused(name, attention, expected=f"layers {sorted(both)} in one of the two only")
    return tuple(sorted(layer - 1 for layer in state))


def _all_but(fields: Fields, name: str) -> Layers:
    total = fields.number("num_hidden_layers")
    try:
        return _besides(total, fields.numbers(name, range(total)))
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}, because num_hidden_layers = {total}") from error


def _besides(total: int, others: Collection[int]) -> Layers:
    return tuple(layer for layer in range(total) if layer not in others)


def _all_but_every(fields: Fields, name: str) -> Layers:
    every, total = fields.number(name), fields.number("num_hidden_layers")
    return _besides(total, range(every - 1, total, every))


def _all_but_periodic(fields: Fields, name: str) -> Layers:
    period, offset = fields.number(name), fields.number("attn_layer_offset", least=0)
    if offset >= period:
        raise fields.refused("attn_layer_offset", name, expected="the first below the second")
    total = fields.number("num_hidden_layers")
    return _besides(total, range(offset, total, period))


def compressors(fields: Fields) -> dict[int, tuple[str, int]]:
    """Returns (kind, tokens of a window) by layer, for the layers that pool windows. Raises: InvalidArgument."""
    if fields.get("layer_types") is not None:
        named = [(kind, f"compress_rates.{kind}") for kind in kinds(fields, "layer_types")]
        return {
            layer: (kind, fields.number(rate))
            for layer, (kind, rate) in enumerate(named)
            if kind in COMPRESSED.values()
        }
    rates, total = fields.get("compress_ratios"), fields.number("num_hidden_layers")
    known = isinstance(rates, list | tuple) and all(is_whole(rate) and rate in (0, *COMPRESSED) for rate in rates)
    if not known or len(rates) < total:
        raise fields.refused("compress_ratios", expected=f"0, 4 or 128 for each of {total} layers")
    # Entries beyond `total` belong to layers that guess tokens, which the class leaves out.
    return {layer: (COMPRESSED[rate], int(rate)) for layer, rate in enumerate(rates[:total]) if rate}


# Field -> function that reads it. The first of these fields that a configuration has decides, because the classes of
# transformers compute the later fields from it, or drop them.
READINGS: Final[Mapping[str, Callable[[Fields, str], Layers]]] = {
    "layer_types": _of_kinds,
    "layers_block_type": _of_kinds,
    "hybrid_override_pattern": _of_pattern,
    "linear_attn_config.kda_layers": _of_kimi,
    "compress_ratios": lambda fields, _: tuple(compressors(fields)),
    "full_attn_idxs": _all_but,
    "attn_layer_indices": _all_but,
    "full_attention_interval": _all_but_every,
    "layer_group_size": _all_but_every,
    "attn_layer_period": _all_but_periodic,
}
ONE_EACH: Final = ("layer_types", "layers_block_type", "hybrid_override_pattern")  # fields with one entry per layer


def state_layers(config: object) -> Layers:
    """Returns which layers of a configuration hold state, from any list of layers that it may have.

    Args:
        config: a configuration object of transformers, a config.json as a dict, or the path of a config.json.

    Returns:
        The numbers of these layers in the model, from 0.

    Raises:
        InvalidArgument: the configuration has no such list, or the list contradicts num_hidden_layers.
    """
    fields = Fields.of(config)
    kind, total = fields.get("model_type"), fields.get("num_hidden_layers")
    for name in ONE_EACH:
        entries = fields.get(name)
        listed = total is not None and isinstance(entries, list | tuple | str)
        if listed and len(entries) != fields.number("num_hidden_layers"):
            raise fields.refused("num_hidden_layers", expected=f"the {len(entries)} that {name} has entries for")
    if kind in EVERY_LAYER:
        return tuple(range(fields.number("num_hidden_layers")))
    for name, read in READINGS.items():
        if fields.get(name) is not None:
            return read(fields, name)
    if kind == "bamba" and fields.has("attn_layer_indices"):  # the field is null: no layer attends
        return tuple(range(fields.number("num_hidden_layers")))
    raise InvalidArgument(f"{kind} without {', '.join(READINGS)}, one of them: which of its layers hold state?")


def require_layers(fields: Fields, layers: range | None) -> None:
    """Refuses layers that a model does not have. Raises: InvalidArgument."""
    if layers is None:
        return
    each = next((entries for name in ONE_EACH if (entries := fields.get(name)) is not None), None)
    total = len(each) if isinstance(each, list | tuple | str) else fields.number("num_hidden_layers")
    if not isinstance(layers, range) or not layers or not {layers[0], layers[-1]} <= set(range(total)):
        few = total // 2
        why = f"expected a range of the {total} layers of the model, such as range({few}), or --layers 0:{few}"
        raise InvalidArgument(f"layers={layers!r}: {why}")


def attention_layers(fields: Fields) -> Layers:
    """Returns which layers attend to KV: those whose kind attends or, without kinds, all layers without state.

    Args:
        fields: fields of a configuration that `state_layers` can read.

    Raises:
        InvalidArgument: as in `state_layers`.
    """
    kind, state = fields.get("model_type"), state_layers(fields.config)
    if kind in PURE:
        return ()
    if kind in BESIDE:
        return state
    for name in ("layer_types", "layers_block_type"):
        if fields.get(name) is not None:
            return tuple(layer for layer, each in enumerate(kinds(fields, name)) if each in ATTENTION_LAYERS)
    if fields.get("hybrid_override_pattern") is not None:
        return _of_pattern(fields, "hybrid_override_pattern", "*")
    if kind in EVERY_LAYER:
        raise fields.refused("layers_block_type", expected="a list that says which of the layers also attend")
    return _besides(fields.number("num_hidden_layers"), state)


def sliding(fields: Fields, layer: int) -> bool:
    """Returns whether a layer of `SLIDING_HEADS` models attends only to a window. Raises: InvalidArgument."""
    if fields.get("layer_types") is not None:
        return kinds(fields, "layer_types")[layer] == "hybrid_sliding"
    return layer in fields.numbers("local_layer_ids", range(fields.number("num_hidden_layers")))

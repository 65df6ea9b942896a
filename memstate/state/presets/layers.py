"""Which layers of a configuration hold state, and which attend, from whichever list of layers it has.

Knows no dimension of a state.
"""

from collections.abc import Callable, Mapping
from typing import Final

from memstate.errors import InvalidArgument
from memstate.state.presets.fields import Fields

# Kinds of layers that hold state; checkpoints written before transformers 5.0 say "mamba".
STATE_LAYERS: Final = ("linear_attention", "conv", "hybrid", "mamba")
ATTENTION_LAYERS: Final = ("full_attention", "sliding_attention", "attention", "hybrid")  # kinds that have KV
PURE: Final = ("mamba2", "mamba", "falcon_mamba")  # no layer attends
EVERY_LAYER: Final = ("falcon_h1", "zamba2", *PURE)  # every layer has a state


def _of_kinds(name: str) -> Callable[[Fields], int]:
    def count(fields: Fields) -> int:
        kinds = fields.get(name)
        if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
            raise fields.refused(name, expected="a list with the kind of each layer")
        return sum(kind in STATE_LAYERS for kind in kinds)

    return count


def _of_pattern(fields: Fields) -> int:
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise fields.refused("hybrid_override_pattern", expected="a text with a letter for each layer")
    return pattern.count("M")


def _of_kimi(fields: Fields) -> int:
    """Layers are counted from 1; without a number of layers the largest of them counts as the last."""
    total = fields.get("num_hidden_layers")
    known = range(1, 1 + (2**31 if total is None else fields.number("num_hidden_layers")))
    state = fields.numbers("linear_attn_config.kda_layers", known)
    if fields.get("linear_attn_config.full_attn_layers") is not None:
        both = set(state) & set(fields.numbers("linear_attn_config.full_attn_layers", known))
        if both:
            paths = ("linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers")
            raise fields.refused(*paths, expected=f"layers {sorted(both)} in one of the two only")
    return len(state)


def _all_but(name: str) -> Callable[[Fields], int]:
    def count(fields: Fields) -> int:
        total = fields.number("num_hidden_layers")
        try:
            return total - len(fields.numbers(name, range(total)))
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}, because num_hidden_layers = {total}") from error

    return count


def _all_but_every(fields: Fields) -> int:
    total = fields.number("num_hidden_layers")
    return total - total // fields.number("full_attention_interval")


def _all_but_periodic(fields: Fields) -> int:
    period, offset = fields.number("attn_layer_period"), fields.number("attn_layer_offset", least=0)
    if offset >= period:
        raise fields.refused("attn_layer_offset", "attn_layer_period", expected="the first below the second")
    return sum(layer % period != offset for layer in range(fields.number("num_hidden_layers")))


# The first that a configuration has decides, as in the classes, which derive the later ones from it or drop them.
READINGS: Final[Mapping[str, Callable[[Fields], int]]] = {
    "layer_types": _of_kinds("layer_types"),
    "layers_block_type": _of_kinds("layers_block_type"),
    "hybrid_override_pattern": _of_pattern,
    "linear_attn_config.kda_layers": _of_kimi,
    "full_attn_idxs": _all_but("full_attn_idxs"),
    "attn_layer_indices": _all_but("attn_layer_indices"),
    "full_attention_interval": _all_but_every,
    "attn_layer_period": _all_but_periodic,
}
ONE_EACH: Final = ("layer_types", "layers_block_type", "hybrid_override_pattern")  # an entry for every layer


def state_layers(config: object) -> int:
    """How many layers of a configuration hold state, from whichever list of layers it has.

    Args:
        config: a configuration object of transformers, a config.json as a dict, or its path.

    Raises:
        InvalidArgument: it has no such list, or the list and num_hidden_layers contradict each other.
    """
    fields = Fields.of(config)
    kind, total = fields.get("model_type"), fields.get("num_hidden_layers")
    for name in ONE_EACH:
        entries = fields.get(name)
        listed = total is not None and isinstance(entries, list | tuple | str)
        if listed and len(entries) != fields.number("num_hidden_layers"):
            raise fields.refused("num_hidden_layers", expected=f"the {len(entries)} that {name} has entries for")
    if kind in EVERY_LAYER:
        return fields.number("num_hidden_layers")
    for name, read in READINGS.items():
        if fields.get(name) is not None:
            return read(fields)
    if kind == "bamba" and fields.has("attn_layer_indices"):  # written as null: no attention
        return fields.number("num_hidden_layers")
    raise InvalidArgument(f"{kind} without {', '.join(READINGS)}, one of them: which of its layers hold state?")


def attention_layers(fields: Fields) -> int:
    """How many layers of a configuration attend to KV: those of the kinds that do, or else all that hold no state.

    Args:
        fields: of a configuration that `state_layers` can count.

    Raises:
        InvalidArgument: as `state_layers`.
    """
    kind, state = fields.get("model_type"), state_layers(fields.config)
    if kind in PURE:
        return 0
    if kind == "falcon_h1":  # attention beside the state, in every layer
        return state
    for name in ("layer_types", "layers_block_type"):
        if fields.get(name) is not None:
            return sum(each in ATTENTION_LAYERS for each in fields.get(name))
    if (pattern := fields.get("hybrid_override_pattern")) is not None:
        return int(pattern.count("*"))
    return fields.number("num_hidden_layers") - state

"""Finds what each layer of a configuration does, from any list of layers that it may have.

Layers count from 0, as in the model. Knows no rule, and no dimension of a state.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final, Literal

from memstate.checks import is_whole
from memstate.errors import InvalidArgument
from memstate.state.presets.fields import Fields

MOST: Final = 2**16  # layers of a model, and runs of a layer, at most: a wrong number must not take all memory
STATE, ATTENDS, BOTH, NEITHER = "holds state", "attends", "holds state and attends", "neither"
Roles = tuple[str, ...]  # the role of each layer, one of the four above
# What a rule knows of the layers of its models. "listed": only a list says it. "pure": without a list, all hold state.
# "every": all hold state, and a list says which also attend. "beside": all hold state and attend.
Placement = Literal["listed", "pure", "every", "beside"]

# Tokens of a window -> kind of the layers that pool such windows, for checkpoints that list only these numbers.
COMPRESSED: Final = {4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
# Kind of a layer, or its letter in a pattern -> role. Checkpoints written before transformers 5.0 say "mamba" and
# "attention". A kind that is missing here may hold a state of another rule, so it is refused.
KINDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("linear_attention", "conv", "mamba", "M", *COMPRESSED.values()), STATE),
    **dict.fromkeys(("jet", "recurrent", "lightning", "lightning_attn", "lightning-attn"), STATE),
    **dict.fromkeys(("full_attention", "sliding_attention", "indexed_attention", "chunked_attention"), ATTENDS),
    **dict.fromkeys(("attention", "*", "attn", "swa", "minicpm4", "minicpm", "standard"), ATTENDS),
    **dict.fromkeys(("hybrid", "hybrid_sliding"), BOTH),
    **dict.fromkeys(("moe", "mlp", "E", "-"), NEITHER),
}
ONE_EACH: Final = ("layer_types", "layers_block_type", "hybrid_override_pattern", "block_configs", "attn_type_list")
CYCLED: Final = ("mixer_types", "block_types")  # lists that models repeat until each layer has an entry


def kinds(fields: Fields, name: str) -> tuple[str, ...]:
    """Returns a field that lists the kind of each layer. Raises: InvalidArgument."""
    listed = fields.get(name)
    if isinstance(listed, list | tuple):  # of texts, or of dicts with the fields of a layer
        listed = [kind.get("block_type") if isinstance(kind, Mapping) else kind for kind in listed]
    elif not isinstance(listed, str) or name != "hybrid_override_pattern":
        listed = [None]
    if not all(isinstance(kind, str) for kind in listed):
        text = "a text with a letter for each layer" if "pattern" in name else "a list with the kind of each layer"
        raise fields.refused(name, expected=text)
    if name in CYCLED and listed:
        listed = [listed[layer % len(listed)] for layer in range(fields.number("num_hidden_layers"))]
    return tuple(listed)


def _of_kinds(fields: Fields, name: str) -> Roles:
    named = kinds(fields, name)
    unknown = sorted(set(named) - KINDS.keys())
    if unknown:
        but = f"not {', '.join(unknown)}: for others, build a StateLayout"
        raise fields.refused(name, expected=f"kinds of layers that memstate knows, {but}")
    if fields.get("loop_config") is not None and fields.get("loop_num_passes") is None:
        raise fields.refused("loop_config", expected="loop_num_passes and loop_layer_index_start and _end instead")
    if fields.get("loop_num_passes") is not None:  # some layers run several times, each time with a state of its own
        start, end = fields.number("loop_layer_index_start"), fields.number("loop_layer_index_end")
        if not start < end <= len(named):
            raise fields.refused(
                "loop_layer_index_start", "loop_layer_index_end", expected=f"some of {len(named)} layers"
            )
        named += named[start:end] * (fields.number("loop_num_passes") - 1)
    return tuple(KINDS[kind] for kind in named)


def _of_numbers(fields: Fields, name: str, state: int) -> Roles:
    """Reads a list that has a 0 or 1 for each layer; `state` stands for a layer with state."""
    total, listed = fields.number("num_hidden_layers"), fields.get(name)
    if not isinstance(listed, list | tuple) or len(listed) != total or not all(each in (0, 1) for each in listed):
        raise fields.refused(name, expected=f"a 0 or 1 for each of {total} layers")
    return tuple(STATE if each == state else ATTENDS for each in listed)


def _of_kimi(fields: Fields, name: str) -> Roles:
    """Reads a list that counts from 1; without `num_hidden_layers`, its largest layer is the last."""
    total, attention = fields.get("num_hidden_layers"), "linear_attn_config.full_attn_layers"
    known = range(1, 1 + (MOST if total is None else fields.number("num_hidden_layers")))
    state = fields.numbers(name, known)
    both = set(state) & set(fields.numbers(attention, known)) if fields.get(attention) is not None else set()
    if both:
        raise fields.refused(name, attention, expected=f"layers {sorted(both)} in one of the two only")
    last = max(state, default=0) if total is None else fields.number("num_hidden_layers")
    return tuple(STATE if layer in state else ATTENDS for layer in range(1, 1 + last))


def _all_but(fields: Fields, name: str) -> Roles:
    total = fields.number("num_hidden_layers")
    try:
        return _besides(total, fields.numbers(name, range(total)))
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}, because num_hidden_layers = {total}") from error


def _besides(total: int, attention: Collection[int]) -> Roles:
    return tuple(ATTENDS if layer in attention else STATE for layer in range(total))


def attending(fields: Fields) -> dict[int, Fields]:
    """Returns layer -> the fields of its attention, from the field `attn` of flash-linear-attention.

    Raises:
        InvalidArgument: the field is no dict with `layers`, nor a list of such dicts.
    """
    given = fields.get("attn")
    specs = [Fields(spec) for spec in given] if isinstance(given, list | tuple) else [Fields(given)]
    known = range(fields.number("num_hidden_layers"))
    return {layer: spec for spec in specs for layer in spec.numbers("layers", known)}


def _all_but_every(fields: Fields, name: str) -> Roles:
    if isinstance(fields.get(name), list | tuple):
        return _of_numbers(fields, name, state=1)
    every, total = fields.number(name), fields.number("num_hidden_layers")
    return _besides(total, range(every - 1, total, every))


def _all_but_periodic(fields: Fields, name: str) -> Roles:
    period, offset = fields.number(name), fields.number("attn_layer_offset", least=0)
    if offset >= period:
        raise fields.refused("attn_layer_offset", name, expected="the first below the second")
    total = fields.number("num_hidden_layers")
    return _besides(total, range(offset, total, period))


def _all_but_middle(fields: Fields, name: str) -> Roles:
    """Reads PLaMo 2: in each run of `mamba_step` layers the middle one attends; of a shorter model, the last one."""
    step, total = fields.number(name), fields.number("num_hidden_layers")
    return _besides(total, [total - 1] if total <= step // 2 else range(step // 2, total, step))


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


def _of_windows(fields: Fields, _: str) -> Roles:
    return tuple(
        STATE if layer in compressors(fields) else ATTENDS for layer in range(fields.number("num_hidden_layers"))
    )


# Field -> function that reads it. The first of these fields that a configuration has decides, because the classes of
# transformers compute the later fields from it, or drop them.
READINGS: Final[Mapping[str, Callable[[Fields, str], Roles]]] = {
    "layer_types": _of_kinds,
    "layers_block_type": _of_kinds,
    "hybrid_override_pattern": _of_kinds,
    "block_configs": _of_kinds,
    "mixer_types": _of_kinds,
    "block_types": _of_kinds,
    "attn_type_list": lambda fields, name: _of_numbers(fields, name, state=0),
    "linear_attn_config.kda_layers": _of_kimi,
    "compress_ratios": _of_windows,
    "full_attn_idxs": _all_but,
    "attn_layer_indices": _all_but,
    "full_attention_layers": _all_but,
    "attn": lambda fields, _: _besides(fields.number("num_hidden_layers"), attending(fields)),
    "full_attention_interval": _all_but_every,
    "layer_group_size": _all_but_every,
    "attn_layer_period": _all_but_periodic,
    "mamba_step": _all_but_middle,
}


def with_roles(of: Roles, *wanted: str) -> tuple[int, ...]:
    """Returns the layers that have one of these roles."""
    return tuple(layer for layer, role in enumerate(of) if role in wanted)


def roles(fields: Fields, placement: Placement = "listed") -> Roles:
    """Returns the role of each layer of a configuration.

    Args:
        fields: the fields of the configuration.
        placement: what the rule of the model knows.

    Raises:
        InvalidArgument: the configuration has no such list, or the list contradicts num_hidden_layers.
    """
    for name in ("num_hidden_layers", "loop_num_passes"):
        if fields.get(name) is not None and fields.number(name) > MOST:
            raise fields.refused(name, expected=f"at most {MOST}")
    says = next((name for name in READINGS if fields.get(name) is not None), None)
    entries = fields.get(says) if says in ONE_EACH and fields.get("num_hidden_layers") is not None else None
    if isinstance(entries, list | tuple | str) and len(entries) != fields.number("num_hidden_layers"):
        raise fields.refused("num_hidden_layers", expected=f"the {len(entries)} that {says} has entries for")
    if placement in ("every", "beside") and says not in ONE_EACH:
        return (STATE if placement == "every" else BOTH,) * fields.number("num_hidden_layers")
    if says is not None:
        read = READINGS[says](fields, says)
        return (BOTH,) * len(read) if placement == "beside" else read
    if placement == "pure" or fields.has("attn_layer_indices"):  # the field of bamba is null if no layer attends
        return (STATE,) * fields.number("num_hidden_layers")
    kind = fields.get("model_type")
    why = "which of its layers hold state? If all do, say so with ms.presets.register(placement=)"
    raise InvalidArgument(f"{kind} without {', '.join(READINGS)}, one of them: {why}")

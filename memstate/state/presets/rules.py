"""Says by which rule a configuration computes its states: the rule whose fields it has, whatever its model type.

A model type has an entry of its own only if its fields do not tell its rule from another one.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple, get_args

from memstate.checks import items
from memstate.errors import InvalidArgument
from memstate.logs import event, logger
from memstate.state.layout import Plane
from memstate.state.presets import fla, readers
from memstate.state.presets.families import LayerState
from memstate.state.presets.fields import Fields
from memstate.state.presets.layers import ATTENDS, BOTH, ONE_EACH, STATE, Placement, Roles, roles, with_roles
from memstate.state.presets.readers import Reader

LOG: Final = logger("presets")


class Rule(NamedTuple):
    """A rule by which layers compute their states.

    Attributes:
        name: name of the rule.
        reader: reads the state of a layer: (fields, number of the layer, names of fields ..) -> `LayerState`.
        names: names of the fields, in the order of the reader. A configuration has the rule if it has all of them, but
            it may lack those with "?", and must lack those with "!". The reader does not get those with "!" and "+".
        placement: which layers hold state.
    """

    name: str
    reader: Reader
    names: str = ""
    placement: Placement = "listed"

    def read(self, fields: Fields, layer: int) -> LayerState:
        """Returns the state of a layer. Raises: InvalidArgument."""
        return self.reader(fields, layer, *(name.rstrip("?") for name in self.names.split() if name[0] not in "!+"))

    def lacks(self, fields: Fields) -> list[str]:
        """Returns the names of the fields that a configuration lacks for this rule."""
        return [name.lstrip("+") for name in self.needs() if fields.get(name.lstrip("+")) is None]

    def needs(self) -> list[str]:
        """Returns the names of the fields that a configuration must have for this rule."""
        return [name for name in self.names.split() if name[0] != "!" and name[-1] != "?"]

    def fits(self, fields: Fields) -> bool:
        """Returns whether a configuration has the fields of this rule."""
        others = (name[1:] for name in self.names.split() if name[0] == "!")
        return not self.lacks(fields) and all(fields.get(name) is None for name in others)


def _under(field: str, *names: str) -> str:
    return " ".join(field + name for name in names)


GATED_DELTA: Final = _under(
    "linear_", "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
)
MAMBA2: Final = (
    "mamba_n_heads mamba_d_head? mamba_n_groups mamba_d_state mamba_d_conv mamba_d_ssm? mamba_expand? hidden_size?"
)
HEADS: Final = "num_attention_heads? head_dim?"
KIMI: Final = "Kimi's delta rule"
LIGHTNING: Final = "lightning attention"
RULES: Final = (
    Rule("gated delta rule", readers.gated_delta, GATED_DELTA),
    Rule("gated delta rule of dynamic convolutions", readers.jet,
         _under("efficient_attention_config.jet.", "num_heads", "head_dim", "expand_v", "conv_size")),
    Rule(KIMI, readers.kimi, "linear_num_heads linear_head_dim linear_conv_kernel_dim"),
    Rule(KIMI, readers.kimi,
         _under("linear_attn_config.", "num_heads", "head_dim", "short_conv_kernel_size") + " !linear_num_heads"),
    Rule(KIMI, readers.kimi, f"{HEADS} short_conv_kernel_size !linear_num_heads"),
    Rule(LIGHTNING, readers.lightning, f"{HEADS} +layer_group_size !short_conv_kernel_size !linear_num_heads"),
    Rule(LIGHTNING, readers.lightning, f"{HEADS} +layernorm_linear_attention_alpha"),
    Rule(LIGHTNING, readers.lightning, "lightning_nkv lightning_head_dim lightning_nh?"),
    Rule("Mamba-2", readers.mamba2, MAMBA2),
    Rule("Mamba-2", readers.mamba2, "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel"),
    Rule("Mamba-2", readers.mamba2, "n_mamba_heads mamba_headdim? mamba_ngroups mamba_d_state mamba_d_conv "
         "mamba_expand? hidden_size?", "every"),
    Rule("Mamba-2", readers.mamba2, "num_heads head_dim? n_groups state_size conv_kernel expand? hidden_size?", "pure"),
    Rule("Mamba", readers.mamba, "state_size conv_kernel intermediate_size? expand? hidden_size? !n_groups", "pure"),
    Rule("Mamba", readers.mamba, "mamba_d_state mamba_d_conv mamba_expand hidden_size? "
         "!mamba_n_heads !n_mamba_heads !mamba_num_heads"),
    Rule("Mamba with heads", readers.mamba_heads,
         "n_mamba_heads mamba_d_state mamba_d_conv mamba_expand hidden_size? !mamba_ngroups", "every"),
    Rule("Mamba with heads", readers.mamba_heads,
         "mamba_num_heads mamba_d_state mamba_d_conv hidden_size_per_head"),
    Rule("Mamba-3", readers.mamba3, "expand? hidden_size? head_dim? state_size rope_fraction", "pure"),
    Rule("short convolution", readers.short_conv, "hidden_size? conv_L_cache"),
    Rule("short convolutions", readers.short_convs, "sconv_kernel_size +swa_num_key_value_heads", "beside"),
    Rule("short convolutions", readers.short_convs,
         "conv_kernel_size +swa_num_key_value_heads !sconv_kernel_size", "beside"),
    Rule("convolved attention", readers.convolved_attention, "cca_time0 cca_time1", "beside"),
    Rule("gated linear recurrence", readers.rg_lru, "lru_width conv1d_width num_attention_heads?"),
    Rule("matrix memory", readers.mlstm, "num_heads? hidden_size? qk_dim_factor v_dim_factor", "pure"),
    Rule("RWKV-4", readers.rwkv4, "hidden_size? attention_hidden_size +rescale_every", "pure"),
)  # fmt: skip
LINEAR: Final = "linear attention"
# Model types whose fields do not tell the rule. `register` adds to them.
OF_TYPE: Final[dict[str, Rule]] = {
    "alice_ai": Rule(KIMI, partial(readers.gated_delta, by_key=True), GATED_DELTA),
    "minimax": Rule(LIGHTNING, readers.lightning, HEADS),
    "falcon_h1": Rule("Mamba-2", readers.mamba2, MAMBA2, "beside"),
    "deepseek_v4": Rule("pooled windows", readers.compressed, "head_dim index_head_dim"),
    "rwkv7": Rule("RWKV-7", readers.rwkv7, "hidden_size head_dim", "pure"),
    "rwkv6": Rule("RWKV-6", fla.rwkv6, "", "pure"),
    "delta_net": Rule("delta rule", fla.delta, "", "pure"),
    "gated_deltanet": Rule("gated delta rule", fla.delta, "", "pure"),
    "kda": Rule(KIMI, partial(fla.delta, by_key=True), "", "pure"),
    "comba": Rule("Comba", fla.corrected, "", "pure"),
    "gated_deltaproduct": Rule("gated delta product", fla.product, "", "pure"),
    "precond_gated_deltanet": Rule("conditioned delta rule", fla.conditioned, "", "pure"),
    "precond_kda": Rule("conditioned delta rule", partial(fla.conditioned, by_key=True), "", "pure"),
    "mesa_net": Rule("MesaNet", fla.mesa, "", "pure"),
    "gla": Rule(LINEAR, fla.attention, "", "pure"),
    "retnet": Rule(LINEAR, partial(fla.attention, short=False), "", "pure"),
    "linear_attn": Rule(LINEAR, partial(fla.attention, short=False), "", "pure"),
    "gsa": Rule("slot attention", fla.slots, "", "pure"),
    "abc": Rule("slot attention", fla.slots, "", "pure"),
    "raven": Rule("slot attention", partial(fla.slots, short=False), "", "pure"),
    "hgrn": Rule("HGRN", fla.hgrn, "", "pure"),
    "hgrn2": Rule(LINEAR, fla.expanded, "", "pure"),
    "lightnet": Rule("LightNet", partial(fla.expanded, normed=True), "", "pure"),
    "rodimus": Rule("Rodimus", fla.rodimus, "", "beside"),
}
REFUSED: Final = {
    "log_linear_mamba2": "a state of log-linear attention grows with the text, and a slot has one size",
    "mom": "each token changes only some of its memories, and its windows are of those tokens",
    "path_attn": "each token changes all cached keys, so a prefix has no state of its own",
}


def register(
    model_type: str, reader: Callable[[Fields, int], Iterable[Plane]], *, placement: Placement = "listed"
) -> None:
    """Makes `from_config` read the configurations of a model type with a function of yours.

    Args:
        model_type: the field `model_type` of the configurations. A type that is known is read with yours from now on.
        reader: function (fields, number of a layer with state) -> planes of this layer. `fields.number("name")` is a
            field that must be a number, `fields.get("name")` any field.
        placement: which layers hold state. "listed": those that a list of the configuration names. "pure": without a
            list, all. "every": all, and a list says which also attend. "beside": all, and all attend.

    Raises:
        InvalidArgument: the type is not a text, the reader cannot be called, or there is no such placement. From
            `from_config`: the reader returned something else than planes; what it raises itself comes unchanged.

    Example:
        >>> import torch
        >>> import memstate as ms
        >>> def mine(fields, layer):
        ...     return [ms.Plane("ssm", (fields.number("heads"), 64, 64), torch.float32)]
        >>> ms.presets.register("mine", mine, placement="pure")
        >>> ms.presets.from_config({"model_type": "mine", "heads": 4, "num_hidden_layers": 2})
        StateLayout(ssm x 2 layers, layer_major, 128.00 KiB per slot with 0 B padding)

    Syncs: no.
    """
    if not isinstance(model_type, str) or not model_type or not callable(reader):
        raise InvalidArgument(f"register({model_type!r}, {reader!r}): expected the name of a model type and a function")
    if placement not in get_args(Placement):
        raise InvalidArgument(f"placement {placement!r}: expected {' or '.join(get_args(Placement))}")
    what = f"planes that the reader of {model_type!r} returned:"
    OF_TYPE[model_type] = Rule(model_type, lambda *given: LayerState(items(what, reader(*given), Plane)), "", placement)


def found(fields: Fields) -> Rule | None:
    """Returns the rule of a configuration, None if memstate knows none. Raises: InvalidArgument for several."""
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in OF_TYPE:
        return OF_TYPE[kind]
    fitting = [rule for rule in RULES if rule.fits(fields)]
    if len(fitting) > 1:
        shown = " and ".join(f"{rule.name} ({', '.join(rule.needs())})" for rule in fitting)
        raise InvalidArgument(f"model_type {kind!r}: it has the fields of {shown}, and one rule is expected")
    return fitting[0] if fitting else None


def rule_of(fields: Fields) -> Rule:
    """Returns the rule of a configuration, and logs which fields say it.

    Raises:
        InvalidArgument: memstate knows no rule of these fields, several, or no fixed size of a state.
    """
    kind = fields.get("model_type")
    if isinstance(kind, str) and kind in REFUSED and kind not in OF_TYPE:
        raise InvalidArgument(f"model_type {kind!r}: {REFUSED[kind]}")
    rule = found(fields)
    if rule is None:
        near = [(len(rule.needs()) - len(rule.lacks(fields)), rule) for rule in RULES]
        has, nearest = max(near, key=lambda each: each[0])
        lacking = (
            f"for {nearest.name} it lacks {', '.join(nearest.lacks(fields))}" if has > 1 else "it has no known rule"
        )
        raise InvalidArgument(
            f"model_type {kind!r}: {lacking}. A model that only attends holds no state. For another model, use "
            "ms.presets.register, memstate.integrations.transformers.layout, or a StateLayout of your own"
        )
    event(LOG, logging.INFO, "rule", model_type=str(kind), rule=rule.name, fields=rule.names or "model_type")
    return rule


def placed(fields: Fields, rule: Rule | None) -> Roles:
    """Returns the role of each layer. Raises: InvalidArgument."""
    return roles(fields, rule.placement if rule else "listed")


def state_layers(config: object) -> tuple[int, ...]:
    """Returns which layers of a configuration hold state, from any list of layers that it may have.

    Args:
        config: the configuration, as in `from_config`.

    Returns:
        The numbers of these layers in the model, from 0. A layer that runs several times counts as often.

    Raises:
        InvalidArgument: the configuration has no such list, or the list contradicts num_hidden_layers.
    """
    *_, fields = Fields.of(config).levels()
    return with_roles(placed(fields, found(fields)), STATE, BOTH)


def attention_layers(fields: Fields) -> tuple[int, ...]:
    """Returns which layers attend to KV: those whose kind attends or, without kinds, all layers without state.

    Args:
        fields: fields of a configuration that `state_layers` can read.

    Raises:
        InvalidArgument: as in `state_layers`.
    """
    rule = found(fields)
    if rule and rule.placement == "every" and not any(fields.get(name) is not None for name in ONE_EACH):
        raise fields.refused("layers_block_type", expected="a list that says which of the layers also attend")
    return with_roles(placed(fields, rule), ATTENDS, BOTH)

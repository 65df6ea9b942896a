"""Plans memory: how many requests, cached states and KV pages fit, and what their snapshots cost. Allocates nothing."""

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Final, Never

import torch

from memstate.checks import is_count, require_switch, shown, whole
from memstate.engine.figures import Capacity
from memstate.engine.planner import Planner
from memstate.engine.settings import Forward, validate_tail
from memstate.errors import InvalidArgument
from memstate.prefix import Match
from memstate.prefix.placement import Ends, Placement
from memstate.requests.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
from memstate.sizes import byte_count, token_count
from memstate.state.layout import NEVER, Plane, StateLayout
from memstate.state.presets import kv_from_config, named
from memstate.state.presets.fields import require_dtype

MOST_TOKENS = 1e12  # tokens per second, of all requests together
STRATEGIES: Final[Mapping[str, type[Tracking]]] = {
    "none": NoTracking, "ping-pong": PingPong, "lazy": LazyPingPong, "redirect": Redirect,
}  # fmt: skip


def capacity(
    model: object,
    memory: int | str,
    *,
    context: int | str,
    concurrency: int | None = None,
    ranks: int = 1,
    every: int = 256,
    page_size: int = 64,
    ssm_dtype: torch.dtype | None = None,
    conv_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype = torch.bfloat16,
    kv_bytes_per_token: int | None = None,
    overlap: bool = True,
    in_place: bool = False,
    prefills: int = 1,
    placement: Placement | None = None,
    tokens_per_second: float = 1000.0,
    host_memory: int | str | None = None,
    speculate: int = 0,
    layers: range | None = None,
    **others: Never,
) -> Capacity:
    """Plans the memory of a deployment: requests, cached states, KV pages and host memory, to the byte.

    The call allocates nothing, and needs no device. It counts the bytes that a `StateManager` with a prefix cache
    allocates when it is built with `Split.settings()`: arenas with the null slot, registers, bitmap, page table, step
    records and upload buffer, and the staging buffers of tiers. KV is counted with the null page.

    Args:
        model: a preset such as "qwen3_next", the path of a config.json, a configuration object or dict, or the
            `StateLayout` of the whole model.
        memory: bytes of one rank for states, KV and memstate's tables, without those of weights and activations. A
            number, or a text such as "80GiB".
        context: tokens of a request, prompt and answer. A number, or a text such as "32k".
        concurrency: requests that run at a time. None: as many as fit, so that nothing is left for the cache.
        ranks: tensor-parallel ranks.
        every: tokens between two snapshots of decode, a multiple of `page_size`.
        page_size: tokens of a KV page.
        ssm_dtype: dtype of ssm planes; None: as in `presets.from_config`.
        conv_dtype: dtype of convolution windows; None: as in `presets.from_config`.
        kv_dtype: dtype of keys and values.
        kv_bytes_per_token: bytes of KV for one token on one rank. Default: computed from the configuration, and 0 for a
            `StateLayout`. With 0 the memory holds no KV.
        overlap: whether the next step can be planned before the previous step is settled.
        in_place: whether the kernels of the forward update one slot, so that memstate copies snapshots.
        prefills: number of prompts that are read at a time. The balanced split has slots for the states at their marks,
            beside whole conversations. No request needs these slots: without them, a prompt keeps fewer states.
        placement: the rule that chooses the lengths at which prompts keep states. Default: `Ends()`.
        tokens_per_second: decode tokens of all requests together, to compute how many bytes snapshots write.
        host_memory: bytes of host memory for a tier. None: no tier.
        speculate: tokens of a step with drafts, `Forward(tail=)`; 0: no drafts. With drafts, every request has a tail,
            and KV pages for the tokens of one more step, or of two more with overlap. A `StateLayout` must have its
            rings already.
        layers: layers of the model, from 0, that the memory is for, such as `range(12)` for the first pipeline stage.
            None: all layers.
        **others: not allowed. The error for an option of the command names the argument to use.

    Returns:
        The plan. `Capacity.best` is the recommended split, `Capacity.recommendation` says why.

    Raises:
        InvalidArgument: a value has no meaning, or the configuration cannot be read.
        ConfigurationError: the memory is too small for one request, or for `concurrency` of them; `every` does not fit
            the page size; host memory is too small for one state; or the states or `in_place` allow no tails.

    Example:
        >>> import memstate as ms
        >>> plan = ms.capacity("qwen3_next", "40GiB", context="32k", concurrency=16)
        >>> {one.strategy: one.max_requests for one in plan.residency}
        {'none': 48, 'ping-pong': 41, 'lazy': 44, 'redirect': 48}
        >>> plan.best.slots, plan.best.pages, plan.best.nbytes <= 40 * 2**30
        (120, 21361, True)

    Syncs: no.
    """
    if others:
        raise InvalidArgument(
            f"capacity has no argument {', '.join(others)}; --tp, --dtype and --kv-bytes of the command are ranks=, "
            "ssm_dtype= and kv_bytes_per_token="
        )
    tail = Forward(in_place=in_place, tail=speculate).tail
    name, layout, page = _model(
        model, ranks, page_size, ssm_dtype, conv_dtype, kv_dtype, kv_bytes_per_token, tail, layers
    )
    if layout.grid >= NEVER:
        never = [plane for plane in layout.planes if plane.grid is None]
        why = "the state is whole at no length, so there is no snapshot to plan for"
        raise InvalidArgument(f"{never or layout}: {why}")
    require_switch("overlap", overlap)
    require_switch("in_place", in_place)
    if tail:
        validate_tail(layout, tail)
    tokens, page_size = token_count("context", context), int(page_size)
    placement = Ends() if placement is None else placement
    if not isinstance(placement, Placement):
        raise InvalidArgument(f"placement={placement!r}: expected a Placement, such as Ends()")
    number = isinstance(tokens_per_second, int | float) and not isinstance(tokens_per_second, bool)
    if not number or not 0 < tokens_per_second <= MOST_TOKENS:
        raise InvalidArgument(
            f"tokens_per_second={shown(tokens_per_second)}: expected a number above 0, up to {MOST_TOKENS:.0e}"
        )
    if not is_count(prefills):
        raise InvalidArgument(f"prefills={prefills!r}: expected a whole number of prompts")
    per_row = -(-(tokens + tail * (1 + overlap)) // page_size) if page else 0
    if per_row == 1:
        raise InvalidArgument(
            f"context={tokens} in pages of {page_size} tokens: no request of one page can start from a cached state, "
            "so there is no prefix cache to plan for; give a smaller page_size"
        )
    marks = placement.marks(Match(tokens=tokens, length=0, kv_length=0, evicted_length=0), lcm(page_size, layout.grid))
    planner = Planner(
        layout=layout, kv=page, page_size=page_size, per_row=per_row, overlap=overlap, in_place=in_place,
        memory=byte_count("memory", memory), placement=placement,
        marks=sum(0 < at <= tokens for at in marks), prefills=int(prefills),
        host=0 if host_memory is None else byte_count("host_memory", host_memory), tokens=tokens, tail=tail,
    )  # fmt: skip
    needs = [planner.residency(strategy, kind(every), tokens_per_second) for strategy, kind in STRATEGIES.items()]
    snapshotting = [one for one in needs if one.tracking.lanes(overlap)]
    lean = max(snapshotting, key=lambda one: (one.max_requests, -one.snapshot_bytes_per_second))
    running = lean.max_requests if concurrency is None else whole("concurrency", concurrency)
    planner.require(lean.tracking, running, lean.max_requests)
    return Capacity(
        model=name, layout=layout, kv=page, memory=planner.memory, context=tokens, concurrency=running,
        ranks=int(ranks), every=every, tokens_per_second=tokens_per_second, marks=planner.marks,
        residency=tuple(replace(one, split=planner.balanced(one.tracking, running)) for one in needs),
        splits=planner.splits(lean.tracking, running), speculation=planner.speculation(lean.tracking),
        layers=layers,
    )  # fmt: skip


def _model(
    model: object, ranks: int, page_size: int, ssm: torch.dtype | None, conv: torch.dtype | None, kv: torch.dtype,
    kv_bytes_per_token: int | None, tail: int, layers: range | None,
) -> tuple[str, StateLayout, StateLayout | None]:  # fmt: skip
    """Returns the name of a model, the layout of its state, and the layout of a KV page, both on one rank."""
    page_size = whole("page_size", page_size)
    require_dtype(f"kv_dtype={kv!r}", kv)
    if kv_bytes_per_token is not None and not is_count(kv_bytes_per_token):
        raise InvalidArgument(f"kv_bytes_per_token={kv_bytes_per_token!r}: expected a whole number of bytes, or None")
    page = None
    if kv_bytes_per_token:
        page = StateLayout((Plane("kv", (page_size * kv_bytes_per_token,), torch.uint8),), layers=1)
    if isinstance(model, StateLayout) and layers is not None:
        raise InvalidArgument(f"layers={layers!r} of a StateLayout: expected the layout of these layers alone")
    name, config, layout = named(model, ranks=ranks, ssm_dtype=ssm, conv_dtype=conv, tail=tail, layers=layers)
    if kv_bytes_per_token is None and not isinstance(model, StateLayout):
        page = kv_from_config(config, page_size=page_size, dtype=kv, ranks=ranks, layers=layers)
    return name, layout, page

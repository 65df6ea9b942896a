"""Plans memory: how many requests, cached states and KV pages fit, and what their snapshots cost. Allocates nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import lcm
from os import PathLike
from os.path import exists
from textwrap import fill
from typing import Any, Final, Never

import torch

from memstate.checks import is_count, require_switch, shown, whole
from memstate.engine.planner import Planner, Residency, Speculation, Split
from memstate.engine.settings import Forward, validate_tail
from memstate.errors import InvalidArgument
from memstate.prefix import Match
from memstate.prefix.placement import Ends, Placement
from memstate.requests.tracking import LazyPingPong, NoTracking, PingPong, Redirect, Tracking
from memstate.sheet import MEMORY_KINDS, Sheet, Shown, bar, of_bytes, section, sheet
from memstate.sizes import byte_count, format_bytes, token_count
from memstate.state.layout import NEVER, Plane, StateLayout
from memstate.state.presets import CHECKPOINTS, from_config, kv_from_config
from memstate.tiers.sizing import tier_bytes

SETTINGS: Final = ("model", "memory", "context", "concurrency", "ranks", "every", "tokens_per_second")
WIDTH: Final = 80  # characters of a line of text
MOST_TOKENS = 1e12  # a second, of all requests
STRATEGIES: Final[Mapping[str, type[Tracking]]] = {
    "none": NoTracking, "ping-pong": PingPong, "lazy": LazyPingPong, "redirect": Redirect,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Capacity(Shown):
    """What `capacity` found. `print` shows it as text, a notebook as a table.

    Attributes:
        model: name of the model.
        layout: layout of a state on one rank.
        kv: layout of a KV page on one rank, as if a page were a slot. None: the memory holds no KV.
        memory: bytes of one rank for states, KV and memstate's tables.
        context: tokens of a request.
        concurrency: requests that the splits let run at a time.
        ranks: tensor-parallel ranks.
        every: tokens between two snapshots of decode.
        tokens_per_second: decode tokens of all requests together, for `snapshot_bytes_per_second`.
        marks: states that a prompt of `context` tokens keeps where there is room.
        residency: each strategy.
        splits: ways to divide the memory, under the strategy that is recommended.
        speculation: what steps with drafts cost; None without `speculate`.
        layers: of the model that are planned; None: all.
    """

    model: str
    layout: StateLayout
    kv: StateLayout | None
    memory: int
    context: int
    concurrency: int
    ranks: int
    every: int
    tokens_per_second: float
    marks: int
    residency: tuple[Residency, ...]
    splits: tuple[Split, ...]
    speculation: Speculation | None = None
    layers: range | None = None

    def of(self, strategy: str) -> Split | None:
        """Returns the balanced split under a strategy; None if `concurrency` requests do not fit under it.

        Args:
            strategy: "none", "ping-pong", "lazy" or "redirect".

        Raises:
            InvalidArgument: there is no such strategy.
        """
        found = {one.strategy: one.split for one in self.residency}
        if strategy not in found:
            raise InvalidArgument(f"strategy {strategy!r}: expected {', '.join(found)}")
        return found[strategy]

    def with_hit_rates(self, rates: Sequence[float]) -> "Capacity":
        """Returns the same plan with the hit rates that a trace gives its splits; the best of them is recommended.

        `memstate capacity --trace` replays a trace for this.

        Args:
            rates: a hit rate for each of `splits`.

        Raises:
            InvalidArgument: there are not as many.
        """
        if len(rates) != len(self.splits):
            raise InvalidArgument(f"{len(rates)} hit rates for {len(self.splits)} splits: expected one for each")
        pairs = zip(self.splits, rates, strict=True)
        return replace(self, splits=tuple(replace(split, hit_rate=rate) for split, rate in pairs))

    @property
    def best(self) -> Split:
        """The split that is recommended: the one of the highest hit rate, without a trace the balanced one."""
        return max(self.splits, key=lambda split: (split.hit_rate or 0.0, split.balanced))

    @property
    def recommendation(self) -> str:
        """The strategy and the split to use, with the numbers that speak for them."""
        best, strategy = self.best, type(self.best.tracking).__name__
        other = {one.strategy: one.max_requests for one in self.residency}
        fits = ", ".join(f"{count:,} under {name}" for name, count in other.items())
        pages = f" and {best.pages:,} KV pages of {best.page_size} tokens" if best.pages else ""
        lines = [
            f"{strategy}(every={self.every}) with {best.slots:,} slots{pages}.",
            f"Requests of {self.context:,} tokens that fit: {fits}.",
            f"At a concurrency of {self.concurrency:,} the cache keeps {best.cached_states:,} states"
            + (f" and {best.cached_pages:,} pages." if best.pages else "."),
        ]
        if best.pages:
            states, kv = (
                sum(part.nbytes for part in best.parts if part.name == name) for name in ("planes", "KV pages")
            )
            lines.append(f"The border: {format_bytes(states)} for states, {format_bytes(kv)} for KV.")
        each = max(1, self.marks)
        talks = min(best.cached_states // each, best.cached_pages // max(1, best.per_row))
        rates = [split.hit_rate for split in self.splits if split.hit_rate is not None]
        if rates:
            lines.append(
                f"A replay of the trace with this split has a block hit rate of {max(rates):.3f}; the splits have "
                f"{min(rates):.3f} to {max(rates):.3f}."
            )
        elif not best.cached_states or (best.pages and not talks):
            lines.append("No room is left for whole cached conversations: lower the concurrency, or add host memory.")
        elif best.pages:
            lines.append(
                f"These are {talks} conversations with {each} states each: a state without its KV "
                "is of no use, nor is KV without a state. A trace shows what your prompts share."
            )
        return " ".join(lines)

    @property
    def host_records(self) -> tuple[int, int]:
        """Bytes of a state and of a KV page in host memory, headers included; 0 for a page without KV."""
        found = tier_bytes(self.layout, self.kv, host_slots=0, host_pages=0, staging=0)
        return found.state_record, found.page_record

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON objects."""
        best = self.best
        by = {one.strategy: one for one in self.residency}
        return {
            **{name: getattr(self, name) for name in SETTINGS},
            "layers": None if self.layers is None else list(self.layers),
            "page_size": best.page_size,
            "marks_per_prompt": self.marks,
            "bytes_per_slot": self.layout.bytes_per_slot,
            "bytes_per_page": self.kv.bytes_per_slot if self.kv else 0,
            "host_bytes_per_state": self.host_records[0],
            "host_bytes_per_page": self.host_records[1],
            "slots": best.slots,
            "pages": best.pages,
            "arena_bytes": sum(self.layout.arena_bytes(best.slots)),
            "device_bytes": best.nbytes,
            "slots_per_request_by_strategy": {name: one.slots_per_request for name, one in by.items()},
            "max_requests_by_strategy": {name: one.max_requests for name, one in by.items()},
            "cached_states_by_strategy": {name: one.split and one.split.cached_states for name, one in by.items()},
            "cached_pages_by_strategy": {name: one.split and one.split.cached_pages for name, one in by.items()},
            "snapshot_bytes_per_second_by_strategy": {name: one.snapshot_bytes_per_second for name, one in by.items()},
            "splits": [_split_json(split) for split in self.splits],
            "best": _split_json(best),
            "host": asdict(best.host) if best.host else None,
            "speculation": asdict(self.speculation) if self.speculation else None,
            "recommendation": self.recommendation,
        }  # fmt: skip

    def tables(self) -> list[tuple[str, Sequence[str], list[list[str]]]]:
        """Returns a title, heads and rows of each table: strategies, splits, and the parts of the best split."""
        strategies = []
        for one in self.residency:
            slots = _span(one.slots_per_request, one.most_slots_per_request)
            cached = (f"{one.split.cached_states:,}", f"{one.split.cached_pages:,}") if one.split else ("-", "-")
            snapshots = f"{format_bytes(round(one.snapshot_bytes_per_second))}/s"
            strategies.append([one.strategy, f"{one.max_requests:,}", slots, *cached, snapshots])
        splits = [
            [
                ("> " if split is self.best else "") + ("balanced" if split.balanced else str(at)),
                f"{split.slots:,}", f"{split.pages:,}", f"{split.cached_states:,}", f"{split.cached_pages:,}",
                format_bytes(split.nbytes), "-" if split.hit_rate is None else f"{split.hit_rate:.3f}",
            ]
            for at, split in enumerate(self.splits, 1)
        ]  # fmt: skip
        parts = [[part.name, f"{part.nbytes:,}", format_bytes(part.nbytes)] for part in self.best.parts if part.nbytes]
        total = [["together", f"{self.best.nbytes:,}", format_bytes(self.best.nbytes)]]
        rate = f"{self.tokens_per_second:,.10g}"
        heads = "max requests", "slots each", "cached states", "cached pages", "snapshots"
        return [
            (
                f"strategies, at a concurrency of {self.concurrency:,} and {rate} tokens a second",
                ("strategy", *heads),
                strategies,
            ),
            ("splits", ("split", "slots", "pages", "cached states", "cached pages", "bytes", "hit rate"), splits),
            ("the recommended split", ("part", "bytes", ""), parts + total),
        ]

    def __repr__(self) -> str:
        return f"Capacity({self.model}, {format_bytes(self.memory)}, {self.context} tokens: {self.best})"

    def __str__(self) -> str:
        slot = f"{format_bytes(self.layout.bytes_per_slot)} a slot"
        page = f", {format_bytes(self.kv.bytes_per_slot)} a KV page" if self.kv else ", no KV"
        ranks = f" on one of {self.ranks} ranks" if self.ranks > 1 else ""
        layers = f", {len(self.layers)} layers from {self.layers[0]}" if self.layers else ""
        text = [f"{self.model}{layers}{ranks}, {format_bytes(self.memory)}: {slot}{page}"]
        for title, heads, rows in self.tables():
            text += ["", title, *_aligned([list(heads), *rows])]
        state, page_record = map(format_bytes, self.host_records)
        if host := self.best.host:
            fits = f"{host.states:,} states, {host.pages:,} KV pages, {format_bytes(host.nbytes)}; "
        else:
            fits = "no tier; "
        each = f"{state} a state" + (f", {page_record} a KV page" if self.kv else "")
        text += ["", fill(f"host memory: {fits}{each}", WIDTH)]
        text += ["", fill(str(self.speculation), WIDTH)] if self.speculation else []
        return "\n".join([*text, "", fill(self.recommendation, WIDTH)])

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        sizes = Counter[str]()
        for part in self.best.parts:
            sizes[next((kind for kind in MEMORY_KINDS if part.name.startswith(kind)), "tables")] += part.nbytes
        parts = [of_bytes(kind, nbytes, kind) for kind, nbytes in sizes.items()]
        sections = [section(title, heads, rows) for title, heads, rows in self.tables()]
        title = f"the recommended split, {format_bytes(self.best.nbytes)}"
        return sheet(str(self).partition("\n")[0], [bar(title, parts)], sections, notes=[self.recommendation])


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

    It allocates nothing, and needs no device. The bytes are those that a `StateManager` with a prefix cache allocates
    when it is built with `Split.settings()`: arenas with the null slot, registers, bitmap, page table, step records and
    upload buffer, and the staging buffers of tiers. KV is counted with the null page.

    Args:
        model: a preset such as "qwen3_next", the path of a config.json, a configuration object or dict, or the
            `StateLayout` of the whole model.
        memory: bytes of one rank for states, KV and memstate's tables: what weights and activations leave. A number, or
            a text such as "80GiB".
        context: tokens of a request, prompt and answer. A number, or a text such as "32k".
        concurrency: requests that run at a time. None: as many as fit, so that nothing is left for the cache.
        ranks: tensor-parallel ranks.
        every: tokens between two snapshots of decode, a multiple of `page_size`.
        page_size: tokens of a KV page.
        ssm_dtype: of ssm planes; None: as `presets.from_config`.
        conv_dtype: of convolution windows; None: as `presets.from_config`.
        kv_dtype: of keys and values.
        kv_bytes_per_token: bytes of KV for one token on one rank. Default: what the configuration gives, and 0 for a
            `StateLayout`. With 0 this memory holds no KV.
        overlap: whether the next step is planned before the last one is settled.
        in_place: whether the kernels of the forward update one slot, so that memstate copies snapshots.
        prefills: prompts that are read at a time. The balanced split keeps the states at their marks beside whole
            conversations. No request needs them: without room, a prompt keeps fewer.
        placement: at which lengths prompts keep states. Default: `Ends()`.
        tokens_per_second: decode tokens of all requests together, for what snapshots cost.
        host_memory: bytes of host memory for a tier below. None: no tier.
        speculate: tokens of a step with drafts, `Forward(tail=)`. Every request then has a tail, and pages for the
            tokens of a step more, with overlap of two. A `StateLayout` brings its rings.
        layers: of the model, from 0, that this memory is for, such as `range(12)` of a first pipeline stage. None: all.
        **others: none. The command's names are refused, with those that are meant.

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
    found = [planner.residency(strategy, kind(every), tokens_per_second) for strategy, kind in STRATEGIES.items()]
    snapshotting = [one for one in found if one.tracking.lanes(overlap)]
    lean = max(snapshotting, key=lambda one: (one.max_requests, -one.snapshot_bytes_per_second))
    running = lean.max_requests if concurrency is None else whole("concurrency", concurrency)
    planner.require(lean.tracking, running, lean.max_requests)
    return Capacity(
        model=name, layout=layout, kv=page, memory=planner.memory, context=tokens, concurrency=running,
        ranks=int(ranks), every=every, tokens_per_second=tokens_per_second, marks=planner.marks,
        residency=tuple(replace(one, split=planner.balanced(one.tracking, running)) for one in found),
        splits=planner.splits(lean.tracking, running), speculation=planner.speculation(lean.tracking),
        layers=layers,
    )  # fmt: skip


def _model(
    model: object, ranks: int, page_size: int, ssm: torch.dtype | None, conv: torch.dtype | None, kv: torch.dtype,
    kv_bytes_per_token: int | None, tail: int, layers: range | None,
) -> tuple[str, StateLayout, StateLayout | None]:  # fmt: skip
    """Returns the name of a model, and on one rank the layouts of its state and of a KV page."""
    page_size = whole("page_size", page_size)
    for what, dtype in (("ssm_dtype", ssm), ("conv_dtype", conv), ("kv_dtype", kv)):
        if (dtype is not None or what == "kv_dtype") and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point
        ):
            raise InvalidArgument(f"{what}={dtype!r}: expected a floating-point torch.dtype")
    if kv_bytes_per_token is not None and not is_count(kv_bytes_per_token):
        raise InvalidArgument(f"kv_bytes_per_token={kv_bytes_per_token!r}: expected a whole number of bytes, or None")
    page = None
    if kv_bytes_per_token:
        page = StateLayout((Plane("kv", (page_size * kv_bytes_per_token,), torch.uint8),), layers=1)
    if isinstance(model, StateLayout):
        if layers is not None:
            raise InvalidArgument(f"layers={layers!r} of a StateLayout: expected the layout of these layers alone")
        return "layout", model.shard(ranks), page
    name = model if isinstance(model, str) else type(model).__name__
    if isinstance(model, str) and model.replace("-", "_") in CHECKPOINTS:
        model = CHECKPOINTS[model.replace("-", "_")]
    elif isinstance(model, PathLike):
        name = str(model)
    elif isinstance(model, Mapping):
        name = str(model.get("model_type"))
    try:
        layout = from_config(model, ssm_dtype=ssm, conv_dtype=conv, ranks=ranks, tail=tail, layers=layers)
    except InvalidArgument as error:
        if isinstance(model, str) and not exists(model):
            raise InvalidArgument(f"{error}, or one of the presets {', '.join(CHECKPOINTS)}") from error
        raise
    if kv_bytes_per_token is None:
        page = kv_from_config(model, page_size=page_size, dtype=kv, ranks=ranks, layers=layers)
    return name, layout, page


def _split_json(split: Split) -> dict[str, Any]:
    return {
        "strategy": next(name for name, kind in STRATEGIES.items() if type(split.tracking) is kind),
        **{name: getattr(split, name) for name in ("slots", "pages", "cached_states", "cached_pages", "balanced")},
        "device_bytes": split.nbytes,
        "bytes_by_part": {part.name: part.nbytes for part in split.parts},
        "host": asdict(split.host) if split.host else None,
        "hit_rate": split.hit_rate,
    }


def _span(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines, the first column to the left and the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    places = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    return ["  ".join(map(lambda place, cell, width: place(cell, width), places, row, widths)).rstrip() for row in rows]

"""Holds the result of `capacity`: figures, the recommended split, and their display as text, table or JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import fill
from typing import Any, Final

from memstate.engine.planner import Residency, SpeculationCost, Split
from memstate.errors import InvalidArgument
from memstate.sheet import MEMORY_KINDS, Sheet, Shown, bar, of_bytes, section, sheet
from memstate.sizes import format_bytes
from memstate.state.layout import StateLayout
from memstate.tiers.sizing import tier_bytes

SETTINGS: Final = ("model", "memory", "context", "concurrency", "ranks", "every", "tokens_per_second")
WIDTH: Final = 80  # characters in a line of text


@dataclass(frozen=True, kw_only=True, repr=False)
class Capacity(Shown):
    """The result of `capacity`. `print` shows it as text, a notebook as a table.

    Attributes:
        model: name of the model.
        layout: layout of a state on one rank.
        kv: layout of a KV page on one rank, as if a page were a slot. None: the memory holds no KV.
        memory: bytes of one rank for states, KV and memstate's tables.
        context: tokens of a request.
        concurrency: number of requests that can run at a time in each split.
        ranks: tensor-parallel ranks.
        every: tokens between two snapshots of decode.
        tokens_per_second: decode tokens of all requests together, for `snapshot_bytes_per_second`.
        marks: number of states that a prompt of `context` tokens keeps if there is room.
        residency: the needs of each strategy.
        splits: ways to divide the memory, under the recommended strategy.
        speculation: the cost of steps with drafts; None without `speculate`.
        layers: the layers of the model that are planned; None: all layers.
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
    speculation: SpeculationCost | None = None
    layers: range | None = None

    def of(self, strategy: str) -> Split | None:
        """Returns the balanced split under a strategy; None if `concurrency` requests do not fit under it.

        Args:
            strategy: "none", "ping-pong", "lazy" or "redirect".

        Raises:
            InvalidArgument: there is no such strategy.
        """
        splits = {one.strategy: one.split for one in self.residency}
        if strategy not in splits:
            raise InvalidArgument(f"strategy {strategy!r}: expected {', '.join(splits)}")
        return splits[strategy]

    def with_hit_rates(self, rates: Sequence[float]) -> "Capacity":
        """Returns the same plan, with a hit rate for each split. The split of the highest hit rate is recommended.

        `memstate capacity --trace` replays a trace to get these hit rates.

        Args:
            rates: a hit rate for each of `splits`.

        Raises:
            InvalidArgument: there are fewer or more rates than splits.
        """
        if len(rates) != len(self.splits):
            raise InvalidArgument(f"{len(rates)} hit rates for {len(self.splits)} splits: expected one for each")
        pairs = zip(self.splits, rates, strict=True)
        return replace(self, splits=tuple(replace(split, hit_rate=rate) for split, rate in pairs))

    @property
    def best(self) -> Split:
        """The recommended split: the split of the highest hit rate, or without a trace the balanced split."""
        return max(self.splits, key=lambda split: (split.hit_rate or 0.0, split.balanced))

    @property
    def recommendation(self) -> str:
        """Sentences that recommend a strategy and a split, with their numbers."""
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
        if rates := [split.hit_rate for split in self.splits if split.hit_rate is not None]:
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
        """Bytes of a state and of a KV page in host memory, with their headers; 0 for the page if there is no KV."""
        tier = tier_bytes(self.layout, self.kv, host_slots=0, host_pages=0, staging=0)
        return tier.state_record, tier.page_record

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
            "splits": [self._split(split) for split in self.splits],
            "best": self._split(best),
            "host": asdict(best.host) if best.host else None,
            "speculation": asdict(self.speculation) if self.speculation else None,
            "recommendation": self.recommendation,
        }  # fmt: skip

    def _split(self, split: Split) -> dict[str, Any]:
        names = "slots", "pages", "cached_states", "cached_pages", "balanced"
        return {
            "strategy": next(one.strategy for one in self.residency if one.tracking == split.tracking),
            **{name: getattr(split, name) for name in names},
            "device_bytes": split.nbytes,
            "bytes_by_part": {part.name: part.nbytes for part in split.parts},
            "host": asdict(split.host) if split.host else None,
            "hit_rate": split.hit_rate,
        }

    def tables(self) -> list[tuple[str, Sequence[str], list[list[str]]]]:
        """Returns (title, heads, rows) of each table: the strategies, the splits, and the parts of the best split."""
        strategies = []
        for one in self.residency:
            least, most = one.slots_per_request, one.most_slots_per_request
            slots = str(least) if least == most else f"{least} to {most}"
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


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines of text: the first column aligned to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    places = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    return ["  ".join(map(lambda place, cell, width: place(cell, width), places, row, widths)).rstrip() for row in rows]

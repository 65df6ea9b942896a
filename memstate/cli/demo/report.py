"""What a demo run found: for people, for scripts, and whether it is as it must be."""

from dataclasses import asdict, dataclass, field
from typing import Any

from memstate.cli.demo.compare import Comparison
from memstate.cli.demo.config import DemoConfig
from memstate.cli.demo.meter import Meter
from memstate.state.layout import format_bytes
from memstate.stats import PrefixStats, TierStats


@dataclass(frozen=True)
class DemoReport:
    """Figures of a run.

    backend: as used. answers: tokens generated, by conversation and turn. leaked, double_owned: slots, by the audit
    at the end; with a planted leak, `planted` is the slot that must be named. leak_named: owners who should hold a slot
    and do not; astray: registers that hold one and should not. leaked_pages, leaked_rows: taken once nobody is left.
    snapshots_taken: at boundaries; snapshots_unseen: published and gone before they could be compared. prefix: the
    cache's own figures, without its clearing at the end. strikes_at_sessions: those of all that hit a state of a
    session. Bytes are those of slots with their padding, as memstate moves them. foreign_bytes: of the engine's memory,
    those that are neither state nor page; foreign_changed: offsets of those that somebody wrote to. tiers: figures of
    host memory and storage, where there are any.
    """

    config: DemoConfig
    backend: str
    requests: int
    conversations: int
    meter: Meter
    comparison: Comparison
    answers: list[list[int]]
    distinct_tokens: int
    snapshots_taken: int
    snapshots_degraded: int
    snapshots_published: int
    snapshots_dropped: int
    snapshots_unseen: int
    prefix: PrefixStats
    copied_bytes: int
    snapshot_bytes_copied: int
    leaked: list[int]
    double_owned: list[int]
    audits_running_clean: bool
    audit_text: str
    leaked_pages: int = 0
    leaked_rows: int = 0
    leak_named: list[str] = field(default_factory=list)
    astray: list[str] = field(default_factory=list)
    foreign_bytes: int = 0
    foreign_changed: list[int] = field(default_factory=list)
    strikes: int = 0
    strikes_at_sessions: int = 0
    planted: int | None = None
    tiers: TierStats | None = None
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Tokens, logits and states all agree with the uncached run."""
        return self.comparison.identical

    @property
    def expectation_met(self) -> bool:
        """Whether the run came out as it must: a sabotaged one differs, a planted leak is the one that is named."""
        compared = not self.identical and self.strikes > 0 if self.config.sabotage else self.identical
        expected = [] if self.planted is None else [self.planted]
        owned = self.leaked == expected and not self.double_owned and self.audits_running_clean
        taken = self._leaked_records or self.leaked_pages or self.leaked_rows or self.astray or self.foreign_changed
        return compared and owned and self._named and not taken

    @property
    def _leaked_records(self) -> int:
        return self.tiers.leaked_records if self.tiers else 0

    @property
    def _named(self) -> bool:
        """Whether the audit names the owner of a planted leak, and nobody else."""
        owners = [name for name in self.leak_named if "row " in name and "planted leak" in name and "live" in name]
        return owners == self.leak_named and len(owners) == (self.planted is not None)

    @property
    def sessions(self) -> int:
        """Conversations that ran as streaming sessions."""
        return min(self.config.sessions, self.conversations)

    @property
    def ok(self) -> bool:
        """Whether the command succeeds."""
        return self.expectation_met

    def failure(self) -> str:
        """One line that says what is wrong; empty where nothing is."""
        c, parts = self.comparison, []
        if self.config.sabotage and not self.strikes:
            parts.append(f"sabotage {self.config.sabotage}: no snapshot was resumed from, there was none to exchange")
        elif self.config.sabotage and self.identical:
            parts.append(f"sabotage {self.config.sabotage} went unnoticed: the comparison is blind")
        elif not self.config.sabotage and not self.identical:
            wrong = f"{c.wrong_tokens} tokens, {c.wrong_logits} logits, {c.wrong_states} states"
            parts.append(f"not identical to the uncached run ({wrong}): {'; '.join(c.differences[:3])}")
        if self.planted is not None and self.leaked != [self.planted]:
            parts.append(f"planted a leak of slot {self.planted}, the audit names {self.leaked}")
        elif self.planted is None and self.leaked:
            parts.append(f"leaked slots {self.leaked}")
        if not self._named:
            expected = "one live register of the planted request" if self.planted is not None else "nobody"
            parts.append(f"owners who should hold a slot and do not: {self.leak_named}, expected {expected}")
        if self.astray:
            parts.append(f"registers hold slots they should not: {self.astray}")
        if self.leaked_pages or self.leaked_rows:
            parts.append(f"{self.leaked_pages} KV pages and {self.leaked_rows} rows are taken and nobody is left")
        if self._leaked_records:
            parts.append(f"{self._leaked_records} records of host memory are taken and nobody has them")
        if self.double_owned:
            parts.append(f"slots with two owners: {self.double_owned}")
        if not self.audits_running_clean:
            parts.append(f"an audit of the running loop found: {' '.join(self.audit_text.split())}")
        if self.foreign_changed:
            changed = f"{len(self.foreign_changed)} of {self.foreign_bytes} bytes between states and pages changed"
            parts.append(f"{changed}, the first at offset {self.foreign_changed[0]} of the engine's memory")
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The keys of the command's contract and more."""
        m, c = self.meter, self.comparison
        return {
            "strategy": self.config.strategy,
            "backend": self.backend,
            "model": self.config.model,
            "layout": self.config.layout,
            "engine": self.config.engine,
            "overlap": int(self.config.overlap),
            "seed": self.config.seed,
            "requests": self.requests,
            "conversations": self.conversations,
            "generated_tokens": m.generated_tokens,
            "distinct_tokens": self.distinct_tokens,
            "prompt_tokens": m.prompt_tokens,
            "prefix_hit_tokens": m.prefix_hit_tokens,
            "session_hit_tokens": m.session_hit_tokens,
            "host_hit_tokens": self.tiers.host_hit_tokens if self.tiers else 0,
            "storage_hit_tokens": self.tiers.storage_hit_tokens if self.tiers else 0,
            "tiers": asdict(self.tiers) if self.tiers else None,
            "hit_tokens_lost_by_reason": self._lost,
            "sessions": self.sessions,
            "cached_states_evicted": self.prefix.evicted_states,
            "cached_pages_evicted": self.prefix.evicted_pages,
            "identical_to_uncached": self.identical,
            "tokens_identical": not c.wrong_tokens,
            "logits_identical": not c.wrong_logits,
            "states_identical": not c.wrong_states,
            "compared": {"tokens": c.tokens, "logits": c.logits, "states": c.states},
            "differences": c.differences,
            "leaked_slots": len(self.leaked),
            "double_owned_slots": len(self.double_owned),
            "leaked_pages": self.leaked_pages,
            "leaked_rows": self.leaked_rows,
            "leak_named": self.leak_named,
            "audit": self.audit_text,
            "foreign_bytes": self.foreign_bytes,
            "foreign_bytes_changed": len(self.foreign_changed),
            "slots_held_mean": m.slots_held_mean,
            "slots_held_peak": m.slots_held_peak,
            "slots_held_by_kind": m.slots_held_by_kind,
            "snapshots_taken": self.snapshots_taken,
            "snapshots_degraded": self.snapshots_degraded,
            "snapshots_published": self.snapshots_published,
            "snapshots_dropped": self.snapshots_dropped,
            "snapshots_unseen": self.snapshots_unseen,
            "snapshot_bytes_copied": self.snapshot_bytes_copied,
            "copied_bytes": self.copied_bytes,
            "device_launches_per_decode_step": m.per_decode_step("launches"),
            "ownership_launches_per_decode_step": m.per_decode_step("ownership"),
            "host_syncs_per_decode_step": m.per_decode_step("syncs"),
            "steps": m.steps,
            "mixed_steps": m.mixed_steps,
            "decode_steps": len(m.decode),
            "dead_entries": m.dead_entries,
            "admissions": m.admissions,
            "resumed": m.resumed,
            "ended": dict(m.ended),
            "between_plan_and_forward": dict(m.between),
            "session_turns": dict(m.session_turns),
            "refused": dict(m.refused),
            "gave_way": dict(m.gave_way),
            "sabotage": self.config.sabotage,
            "strikes": self.strikes,
            "strikes_at_sessions": self.strikes_at_sessions,
            "planted_leak": self.planted,
            "expectation_met": self.expectation_met,
            "seconds": self.timings,
        }

    @property
    def _lost(self) -> dict[str, int]:
        """Prompt tokens that were computed again or for the first time, by reason."""
        found = self.prefix
        return {
            "no_sharing": found.lost_no_sharing,
            "evicted": found.lost_evicted,
            "no_snapshot": found.lost_no_snapshot,
        }

    @property
    def _tier_rows(self) -> list[tuple[str, str]]:
        if self.tiers is None:
            return []
        t = self.tiers
        hits = f"{t.host_hit_tokens} tokens from host memory, {t.storage_hit_tokens} from storage"
        moved = f"{t.states_out} states and {t.pages_out} pages out, {t.states_in} and {t.pages_in} in"
        rows = [("of the hits", hits), ("to and from host memory", moved)]
        if t.prefetch is not None:
            rows.append(("storage", f"{t.written} records written, {t.prefetch.states + t.prefetch.pages} fetched"))
        return rows

    def table(self) -> list[tuple[str, str]]:
        """Rows of figure and value for people."""
        m, c = self.meter, self.comparison
        launches, ownership = m.per_decode_step("launches"), m.per_decode_step("ownership")
        kinds = ", ".join(f"{kind} {value:.1f}" for kind, value in m.slots_held_by_kind.items())
        retracted = sum(count for how, count in m.ended.items() if how.startswith("retracted"))
        pressure = m.refused + m.gave_way
        refused = ", ".join(f"{what} {count}" for what, count in sorted(pressure.items())) or "none"
        share = 100 * m.prefix_hit_tokens / max(1, m.prompt_tokens)
        lost = ", ".join(f"{reason.replace('_', ' ')} {tokens}" for reason, tokens in self._lost.items())
        turns = ", ".join(f"{how} {count}" for how, count in sorted(m.session_turns.items()))
        leak = f", slot {self.planted} was planted: {self.leak_named}" if self.planted is not None else ""
        overlap = "with" if self.config.overlap else "without"
        wrong = f"NO: {c.wrong_tokens} tokens, {c.wrong_logits} logits, {c.wrong_states} states differ"
        return [
            ("strategy, backend", f"{self.config.strategy}, {self.backend}, {overlap} overlap"),
            ("model, layout, engine", f"{self.config.model}, {self.config.layout}, {self.config.engine}"),
            ("conversations, requests", f"{self.conversations}, {self.requests}"),
            ("generated", f"{m.generated_tokens} tokens, {self.distinct_tokens} distinct"),
            ("claimed", f"{m.admissions} admissions of {self.requests} requests, {m.resumed} from a snapshot"),
            ("prefix hits", f"{m.prefix_hit_tokens} of {m.prompt_tokens} prompt tokens ({share:.0f} %)"),
            ("prompt tokens computed", lost),
            *self._tier_rows,
            ("sessions", f"{self.sessions}, {m.session_hit_tokens} of the hits; turns: {turns}" if turns else "0"),
            ("held", f"{m.slots_held_mean:.2f} slots per request, at most {m.slots_held_peak}; mean: {kinds}"),
            ("snapshotted", f"{self.snapshots_taken} at boundaries, {self.snapshots_degraded} boundaries without"),
            ("published, dropped", f"{self.snapshots_published}, {self.snapshots_dropped}"),
            ("evicted from the cache", f"{self.prefix.evicted_states} states, {self.prefix.evicted_pages} pages"),
            ("copied for snapshots", format_bytes(self.snapshot_bytes_copied)),
            ("copied in all", format_bytes(self.copied_bytes)),
            ("launched per decode step", f"{launches['mean']:.2f}, at most {launches['max']:.0f}"),
            ("and to change owners", f"{ownership['mean']:.2f}, at most {ownership['max']:.0f}"),
            ("synced per decode step", f"{m.per_decode_step('syncs')['mean']:.2f}"),
            ("steps", f"{m.steps}, {len(m.decode)} of them decode only; {m.dead_entries} dead rows"),
            ("aborted, retracted, cancelled", f"{m.ended['aborted']}, {retracted}, {m.ended['cancelled']}"),
            ("back-pressure", refused),
            ("compared", f"{c.tokens} tokens, {c.logits} logits, {c.states} states"),
            ("identical to uncached", "yes" if self.identical else wrong),
            ("leaked, owned twice", f"{len(self.leaked)}, {len(self.double_owned)}{leak}"),
            *(
                [("foreign bytes, changed", f"{self.foreign_bytes}, {len(self.foreign_changed)}")]
                if self.foreign_bytes
                else []
            ),
            *(
                [
                    (
                        "sabotage",
                        f"{self.config.sabotage}, {self.strikes} strikes, {self.strikes_at_sessions} at sessions",
                    )
                ]
                if self.config.sabotage
                else []
            ),
            ("as it must be", "yes" if self.expectation_met else "NO"),
            ("seconds", ", ".join(f"{what} {value:.1f}" for what, value in self.timings.items())),
        ]

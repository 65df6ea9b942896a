"""What a demo run found: as a table, as JSON, and whether it passed."""

from dataclasses import asdict, dataclass, field
from typing import Any

from memstate.cli.demo.compare import Comparison
from memstate.cli.demo.config import DemoConfig
from memstate.cli.demo.meter import Meter
from memstate.sizes import format_bytes
from memstate.stats import Stats, TierStats

CONFIG_KEYS = ("strategy", "chunk", "placement", "model", "layout", "state_order", "engine", "seed", "sabotage")
REPORT_KEYS = (
    "backend", "requests", "conversations", "distinct_tokens", "sessions", "differences", "leaked_pages", "leaked_rows",
    "leak_named", "foreign_bytes", "snapshots_unseen", "snapshot_bytes_copied", "strikes", "strikes_at_sessions",
    "expectation_met",
    "forwards_per_prompt", "states_filed_per_request",
)  # fmt: skip
METER_KEYS = (
    "generated_tokens", "prompt_tokens", "prefix_hit_tokens", "session_hit_tokens", "slots_held_mean",
    "slots_held_peak", "slots_held_by_kind", "steps", "mixed_steps", "dead_entries", "admissions", "resumed",
)  # fmt: skip
COUNTER_KEYS = ("ended", "session_turns", "refused", "gave_way")


@dataclass(frozen=True)
class DemoReport:
    """Figures of a run.

    Attributes:
        config: The settings.
        backend: The backend as used.
        requests: Turns of all conversations.
        conversations: Number of conversations.
        meter: Figures sampled while the loop ran.
        comparison: What was compared with the uncached run.
        answers: Generated tokens, by conversation and turn.
        distinct_tokens: Different tokens among them.
        stats: The manager's figures after the last request. Bytes include the padding of slots.
        snapshots_unseen: Snapshots that were published and gone before they could be compared.
        snapshot_bytes_copied: Bytes copied to take snapshots.
        leaked: Slots without an owner, by the last audit.
        double_owned: Slots with two owners, or owned and free, by the last audit.
        audits_running_clean: Whether the audits of the running loop found nothing.
        audit_text: The first audit that found something, or the last one.
        leaked_pages: KV pages that are taken when no request is left.
        leaked_rows: Rows that are taken when no request is left.
        leak_named: Owners who should hold a slot and do not.
        astray: Registers that hold a slot and should not.
        foreign_bytes: Bytes of the engine's memory that are neither state nor page.
        foreign_changed: Offsets of foreign bytes that changed.
        strikes: States that sabotage replaced.
        strikes_at_sessions: Those of them that a session kept.
        planted: The slot that was leaked on purpose.
        timings: Seconds of the cached and of the uncached run.
    """

    config: DemoConfig
    backend: str
    requests: int
    conversations: int
    meter: Meter
    comparison: Comparison
    answers: list[list[int]]
    distinct_tokens: int
    stats: Stats
    snapshots_unseen: int
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
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether tokens, logits and states all agree with the uncached run."""
        return self.comparison.identical

    @property
    def differences(self) -> list[str]:
        """The first differences, in words."""
        return self.comparison.differences

    @property
    def tiers(self) -> TierStats | None:
        """Figures of host memory and storage."""
        return self.stats.tiers

    @property
    def sessions(self) -> int:
        """Conversations that ran as streaming sessions."""
        return min(self.config.sessions, self.conversations)

    @property
    def forwards_per_prompt(self) -> float:
        """Forwards that read a part of an admitted prompt, on average; prompts that none has read do not count."""
        return self.meter.prompt_chunks / max(1, self.meter.prompts_read)

    @property
    def states_filed_per_request(self) -> float:
        """States that the prefix cache took in for a request, on average."""
        return self.stats.prefix.inserted / self.requests if self.stats.prefix else 0.0

    @property
    def expectation_met(self) -> bool:
        """Whether the run passed: a sabotaged run must differ, and a planted leak must be the only one named."""
        return not self.failure()

    ok = expectation_met

    @property
    def _named(self) -> bool:
        """Whether the audit names the owner of a planted leak, and no other."""
        owners = [name for name in self.leak_named if "row " in name and "planted leak" in name and "live" in name]
        return owners == self.leak_named and len(owners) == (self.planted is not None)

    def failure(self) -> str:
        """Returns one line that says what is wrong; empty where the run passed."""
        c, kind = self.comparison, self.config.sabotage
        wrong = f"{c.wrong_tokens} tokens, {c.wrong_logits} logits, {c.wrong_states} states"
        leaked_records = self.tiers.leaked_records if self.tiers else 0
        expected = "one live register of the planted request" if self.planted is not None else "none"
        foreign = f"{len(self.foreign_changed)} of {self.foreign_bytes} bytes between states and pages changed"
        faults = {
            f"sabotage {kind}: no snapshot was resumed from, so none was replaced": kind and not self.strikes,
            f"sabotage {kind} went unnoticed: the comparison is blind": kind and self.strikes and self.identical,
            f"not identical to the uncached run ({wrong}): {'; '.join(c.differences[:3])}": not kind
            and not self.identical,
            f"planted a leak of slot {self.planted}, the audit names {self.leaked}": self.planted is not None
            and self.leaked != [self.planted],
            f"leaked slots {self.leaked}": self.planted is None and self.leaked,
            f"owners who should hold a slot and do not: {self.leak_named}, expected {expected}": not self._named,
            f"registers hold slots they should not: {self.astray}": self.astray,
            f"{self.leaked_pages} KV pages and {self.leaked_rows} rows are still taken after the last request": (
                self.leaked_pages or self.leaked_rows
            ),
            f"{leaked_records} records of host memory have no owner": leaked_records,
            f"slots with two owners: {self.double_owned}": self.double_owned,
            f"an audit of the running loop found: {' '.join(self.audit_text.split())}": not self.audits_running_clean,
            f"{foreign}, the first at offset {min(self.foreign_changed, default=0)} of the engine's memory": (
                self.foreign_changed
            ),
        }
        return "; ".join(text for text, found in faults.items() if found)

    def to_json(self) -> dict[str, Any]:
        """Returns the keys of the command's contract and more."""
        m, c, stats, tiers = self.meter, self.comparison, self.stats, self.tiers
        assert stats.prefix is not None
        return {
            **{key: getattr(self.config, key) for key in CONFIG_KEYS},
            **{key: getattr(self, key) for key in REPORT_KEYS},
            **{key: getattr(m, key) for key in METER_KEYS},
            **{key: dict(getattr(m, key)) for key in COUNTER_KEYS},
            "overlap": int(self.config.overlap),
            "host_hit_tokens": tiers.host_hit_tokens if tiers else 0,
            "storage_hit_tokens": tiers.storage_hit_tokens if tiers else 0,
            "tiers": asdict(tiers) if tiers else None,
            "hit_tokens_lost_by_reason": self._lost,
            "cached_states_evicted": stats.prefix.evicted_states,
            "cached_pages_evicted": stats.prefix.evicted_pages,
            "identical_to_uncached": self.identical,
            "tokens_identical": not c.wrong_tokens,
            "logits_identical": not c.wrong_logits,
            "states_identical": not c.wrong_states,
            "compared": {"tokens": c.tokens, "logits": c.logits, "states": c.states},
            "leaked_slots": len(self.leaked),
            "double_owned_slots": len(self.double_owned),
            "audit": self.audit_text,
            "foreign_bytes_changed": len(self.foreign_changed),
            "snapshots_taken": stats.snapshots,
            "snapshots_degraded": stats.degraded,
            "snapshots_published": stats.published,
            "snapshots_dropped": stats.dropped,
            "copied_bytes": stats.copied_bytes,
            "device_launches_per_decode_step": m.per_decode_step("launches"),
            "ownership_launches_per_decode_step": m.per_decode_step("ownership"),
            "host_syncs_per_decode_step": m.per_decode_step("syncs"),
            "decode_steps": len(m.decode),
            "between_plan_and_forward": dict(m.between),
            "planted_leak": self.planted,
            "seconds": self.timings,
        }

    @property
    def _lost(self) -> dict[str, int]:
        """Prompt tokens that had to be computed, by reason."""
        found = self.stats.prefix
        assert found is not None
        return {reason: getattr(found, f"lost_{reason}") for reason in ("no_sharing", "evicted", "no_snapshot")}

    def table(self) -> list[tuple[str, str]]:
        """Returns rows of figure and value."""
        m, c, stats, config = self.meter, self.comparison, self.stats, self.config
        assert stats.prefix is not None
        launches, ownership = m.per_decode_step("launches"), m.per_decode_step("ownership")
        kinds = ", ".join(f"{kind} {value:.1f}" for kind, value in m.slots_held_by_kind.items())
        retracted = sum(count for how, count in m.ended.items() if how.startswith("retracted"))
        share = 100 * m.prefix_hit_tokens / max(1, m.prompt_tokens)
        lost = ", ".join(f"{reason.replace('_', ' ')} {tokens}" for reason, tokens in self._lost.items())
        turns = _listed(m.session_turns)
        leak = f", slot {self.planted} was planted: {self.leak_named}" if self.planted is not None else ""
        wrong = f"NO: {c.wrong_tokens} tokens, {c.wrong_logits} logits, {c.wrong_states} states differ"
        rows = [
            (
                "strategy, backend",
                f"{config.strategy}, {self.backend}, {'with' if config.overlap else 'without'} overlap",
            ),
            ("model, layout, engine", f"{config.model}, {config.layout}, {config.engine}"),
            ("conversations, requests", f"{self.conversations}, {self.requests}"),
            ("generated", f"{m.generated_tokens} tokens, {self.distinct_tokens} distinct"),
            ("admitted", f"{m.admissions} admissions of {self.requests} requests, {m.resumed} from a snapshot"),
            ("prefix hits", f"{m.prefix_hit_tokens} of {m.prompt_tokens} prompt tokens ({share:.0f} %)"),
            ("prompt tokens computed", lost),
            *self._tier_rows,
            ("sessions", f"{self.sessions}, {m.session_hit_tokens} of the hits; turns: {turns}" if turns else "0"),
            ("slots held", f"{m.slots_held_mean:.2f} per request, at most {m.slots_held_peak}; mean by owner: {kinds}"),
            ("snapshots", f"{stats.snapshots} at boundaries, {stats.degraded} boundaries without"),
            (
                "prompts",
                f"{self.forwards_per_prompt:.2f} forwards each, chunks of {config.chunk} tokens; "
                f"{self.states_filed_per_request:.2f} states filed per request, placement {config.placement}",
            ),
            ("published, dropped", f"{stats.published}, {stats.dropped}"),
            ("evicted from the cache", f"{stats.prefix.evicted_states} states, {stats.prefix.evicted_pages} pages"),
            ("copied for snapshots", format_bytes(self.snapshot_bytes_copied)),
            ("copied in all", format_bytes(stats.copied_bytes)),
            ("launches per decode step", f"{launches['mean']:.2f}, at most {launches['max']:.0f}"),
            ("and to change owners", f"{ownership['mean']:.2f}, at most {ownership['max']:.0f}"),
            ("syncs per decode step", f"{m.per_decode_step('syncs')['mean']:.2f}"),
            ("steps", f"{m.steps}, {len(m.decode)} of them decode only; {m.dead_entries} dead rows"),
            ("aborted, retracted, cancelled", f"{m.ended['aborted']}, {retracted}, {m.ended['cancelled']}"),
            ("back-pressure", _listed(m.refused + m.gave_way) or "none"),
            ("compared", f"{c.tokens} tokens, {c.logits} logits, {c.states} states"),
            ("identical to uncached", "yes" if self.identical else wrong),
            ("leaked, owned twice", f"{len(self.leaked)}, {len(self.double_owned)}{leak}"),
        ]
        if self.foreign_bytes:
            rows.append(("foreign bytes, changed", f"{self.foreign_bytes}, {len(self.foreign_changed)}"))
        if config.sabotage:
            strikes = f"{self.strikes} strikes, {self.strikes_at_sessions} at sessions"
            rows.append(("sabotage", f"{config.sabotage}, {strikes}"))
        seconds = ", ".join(f"{what} {value:.1f}" for what, value in self.timings.items())
        return [*rows, ("result", "pass" if self.ok else "FAIL"), ("seconds", seconds)]

    @property
    def _tier_rows(self) -> list[tuple[str, str]]:
        if self.tiers is None:
            return []
        t = self.tiers
        hits = f"{t.host_hit_tokens} tokens from host memory, {t.storage_hit_tokens} from storage"
        moved = f"{t.states_out} states and {t.pages_out} pages out, {t.states_in} and {t.pages_in} in"
        rows = [("hits from tiers", hits), ("to and from host memory", moved)]
        if t.prefetch is not None:
            rows.append(("storage", f"{t.written} records written, {t.prefetch.states + t.prefetch.pages} fetched"))
        return rows


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in sorted(counts.items()))

"""The results of a demo run: as a table, as JSON, and whether it passed."""

from dataclasses import asdict, dataclass
from typing import Any

from memstate.cli.units import duration, measured
from memstate.stats import Stats, TierStats
from memstate.tables import number
from memstate_tools.demo.compare import Compared
from memstate_tools.demo.config import DemoConfig
from memstate_tools.demo.meter import Meter

CONFIG_KEYS = (
    "strategy",
    "chunk",
    "placement",
    "model",
    "layout",
    "state_order",
    "engine",
    "speculate",
    "tail",
    "storage",
    "seed",
    "sabotage",
)
REPORT_KEYS = (
    "backend", "requests", "conversations", "distinct_tokens", "sessions", "differences", "leaked_pages", "leaked_rows",
    "leak_named", "foreign_bytes", "snapshots_unseen", "snapshot_bytes_copied", "strikes", "strikes_at_sessions",
    "forwards_per_prompt", "states_filed_per_request",
)  # fmt: skip
METER_KEYS = (
    "generated_tokens", "prompt_tokens", "prefix_hit_tokens", "session_hit_tokens", "slots_held_mean",
    "slots_held_peak", "slots_held_by_kind", "steps", "mixed_steps", "dead_entries", "admissions", "resumed",
    "ended", "session_turns", "refused", "gave_way", "guessed", "right", "parked", "parked_inside_a_page",
    "parked_behind_the_fence",
)  # fmt: skip
LOST = ("no_sharing", "evicted", "no_snapshot")
HIDDEN = ("tiers", "audit")  # keys that the table leaves out, because they have many lines


@dataclass(frozen=True)
class DemoReport:
    """The results of a run.

    Attributes:
        config: The settings of the run.
        backend: The backend in use.
        requests: Number of turns of all conversations.
        conversations: Number of conversations.
        meter: Counts of the running loop.
        comparison: Counts of the comparison with the uncached run.
        answers: Generated tokens, by conversation and turn.
        stats: The manager's figures after the last request. Bytes include the padding of slots.
        snapshots_unseen: Published snapshots that were gone before they could be compared.
        snapshot_bytes_copied: Bytes copied to take snapshots.
        leaked: Slots without an owner, by the last audit.
        double_owned: Slots with two owners, or owned and free, by the last audit.
        audits_running_clean: Whether no audit of the running loop found a fault.
        audit_text: The first audit with a fault, or the last one.
        leaked_pages: KV pages in use after the last request.
        leaked_rows: Rows in use after the last request.
        leak_named: Owners that should hold a slot and do not.
        astray: Registers that hold a slot and should not.
        foreign_bytes: Bytes of the engine's memory outside of states and pages.
        foreign_changed: Offsets of foreign bytes that changed.
        strikes: Number of states that sabotage replaced.
        strikes_at_sessions: Number of replaced states that a session kept.
        planted: The slot that was leaked on purpose.
        timings: Seconds of the cached and of the uncached run.
    """

    config: DemoConfig
    backend: str
    requests: int
    conversations: int
    meter: Meter
    comparison: Compared
    answers: list[list[int]]
    stats: Stats
    snapshots_unseen: int
    snapshot_bytes_copied: int
    leaked: list[int]
    double_owned: list[int]
    audits_running_clean: bool
    audit_text: str
    leaked_pages: int
    leaked_rows: int
    leak_named: list[str]
    astray: list[str]
    foreign_bytes: int
    foreign_changed: list[int]
    strikes: int
    strikes_at_sessions: int
    planted: int | None
    timings: dict[str, float]

    @property
    def identical(self) -> bool:
        """Whether tokens, logits and states all equal those of the uncached run."""
        return self.comparison.identical

    @property
    def differences(self) -> list[str]:
        """The first differences, in words."""
        return self.comparison.differences

    @property
    def tiers(self) -> TierStats:
        """Figures of host memory and storage."""
        return self.stats.tiers

    @property
    def sessions(self) -> int:
        """Number of conversations that ran as streaming sessions."""
        return min(self.config.sessions, self.conversations)

    @property
    def distinct_tokens(self) -> int:
        """Number of different tokens among the generated ones."""
        return len({token for answer in self.answers for token in answer})

    @property
    def forwards_per_prompt(self) -> float:
        """Mean number of forwards that read a part of an admitted prompt. Prompts that no forward read do not count."""
        return self.meter.prompt_chunks / max(1, self.meter.prompts_read)

    @property
    def states_filed_per_request(self) -> float:
        """Mean number of states that the prefix cache took for a request."""
        return self.stats.prefix.inserted / self.requests

    @property
    def ok(self) -> bool:
        """Whether the run passed. A sabotaged run must differ, and the audit must name a planted leak and no other."""
        return not self.failure()

    @property
    def _named(self) -> bool:
        """Whether the audit names the owner of a planted leak, and no other."""
        owners = [name for name in self.leak_named if "row " in name and "planted leak" in name and "live" in name]
        return owners == self.leak_named and len(owners) == (self.planted is not None)

    def failure(self) -> str:
        """Returns one line that says what is wrong; empty if the run passed."""
        c, kind = self.comparison, self.config.sabotage
        wrong = f"{c.wrong_tokens} tokens, {c.wrong_logits} logits, {c.wrong_states} states"
        faults = {
            f"sabotage {kind}: no snapshot was resumed from, so none was replaced": kind and not self.strikes,
            f"sabotage {kind} went unnoticed: the comparison is blind": kind and self.strikes and self.identical,
            f"not identical to the uncached run ({wrong}): {'; '.join(c.differences[:3])}": (
                not kind and not self.identical
            ),
            self.left(): self.left(),
        }
        return "; ".join(text for text, is_so in faults.items() if is_so)

    def left(self) -> str:
        """Returns one line that says what leaked, has two owners or is damaged; empty if only the planted leak is left.

        A planted leak that the audit does not name counts as wrong.
        """
        planted = self.planted is not None
        leaked_records = self.tiers.leaked_records if self.tiers else 0
        expected = "one live register of the planted request" if planted else "none"
        left = f"{self.leaked_pages} KV pages and {self.leaked_rows} rows"
        foreign = f"{len(self.foreign_changed)} of {self.foreign_bytes} bytes between states and pages changed"
        faults = {
            f"planted a leak of slot {self.planted}, the audit names {self.leaked}": planted
            and self.leaked != [self.planted],
            f"leaked slots {self.leaked}": not planted and self.leaked,
            f"owners who should hold a slot and do not: {self.leak_named}, expected {expected}": not self._named,
            f"registers hold slots they should not: {self.astray}": self.astray,
            f"{left} are still taken after the last request": self.leaked_pages or self.leaked_rows,
            f"{leaked_records} records of host memory have no owner": leaked_records,
            f"slots with two owners: {self.double_owned}": self.double_owned,
            f"an audit of the running loop found: {' '.join(self.audit_text.split())}": not self.audits_running_clean,
            f"{foreign}, the first at offset {min(self.foreign_changed, default=0)} of the engine's memory": (
                self.foreign_changed
            ),
        }
        return "; ".join(text for text, is_so in faults.items() if is_so)

    def to_json(self) -> dict[str, Any]:
        """Returns all figures of the run, with the keys that scripts rely on."""
        m, c, stats, tiers, prefix = self.meter, self.comparison, self.stats, self.tiers, self.stats.prefix
        return {
            **{key: getattr(self.config, key) for key in CONFIG_KEYS},
            **{key: getattr(self, key) for key in REPORT_KEYS},
            **{key: getattr(m, key) for key in METER_KEYS},
            "overlap": int(self.config.overlap),
            "host_hit_tokens": tiers.host_hit_tokens if tiers else 0,
            "storage_hit_tokens": tiers.storage_hit_tokens if tiers else 0,
            "tiers": asdict(tiers) if tiers else None,
            "hit_tokens_lost_by_reason": {reason: getattr(prefix, f"lost_{reason}") for reason in LOST},
            "cached_states_evicted": prefix.evicted_states,
            "cached_pages_evicted": prefix.evicted_pages,
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
            "between_plan_and_forward": m.between,
            "planted_leak": self.planted,
            "seconds": self.timings,
            "expectation_met": self.ok,
        }

    def table(self) -> dict[str, str]:
        """Returns the figures of the JSON as text: heading -> text."""
        return {key.replace("_", " "): _text(value, key) for key, value in self.to_json().items() if key not in HIDDEN}


def _text(value: object, key: str) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_text(one, key)}" for name, one in value.items()) or "none"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if not isinstance(value, int | float) or key == "seed":
        return "none" if value in (None, []) else str(value)
    return duration(value) if key == "seconds" else measured(value, "bytes") if "bytes" in key else number(value)

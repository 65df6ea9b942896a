"""Says what in the figures of a manager deserves a look, and what to do. docs/metrics.md has the same in full."""

from collections.abc import Iterator, Mapping
from typing import Any

MUCH = 0.2  # of prompt tokens, of prefetches
MOST = 0.5  # of the slots in use


def advice(of: Mapping[str, Any]) -> list[str]:
    """Returns what to look at first, in plain sentences.

    Args:
        of: one manager of a summary.
    """
    return [*_faults(of), *_room(of), *_storage(of), *_prompts(of), *_tenants(of)]


def _faults(of: Mapping[str, Any]) -> Iterator[str]:
    if of["interrupted"]:
        yield "A call was interrupted, and every call raises Broken: recover() or reset(). These figures are older."
    elif of["age_seconds"] > 1:
        yield f"The figures are {of['age_seconds']:.0f} s old: the loop has been inside of one call since then."
    if of["tiers"] and of["tiers"]["leaked_records"]:
        yield f"{of['tiers']['leaked_records']} host records have leaked: a defect of memstate."


def _room(of: Mapping[str, Any]) -> Iterator[str]:
    refused = {reason: n for reason, n in of["refusals"].items() if n}
    for reason, count in refused.items():
        if reason in ("slots", "rows", "pages"):  # a later version may have more
            free = of[reason].get("free", 0)
            yield f"{count} calls were refused for lack of {reason} ({free} free now): requests wait."
    slots = of["slots"]
    used = sum(slots.values()) - slots.get("free", 0)
    for owner, what in (
        ("snapshot", "are held by published handles: a leak of the engine if nobody resumes from them; drop()"),
        ("by_id", "are claimed by id (pool.claim): nobody but their claimer can free them; pool.release()"),
    ):
        if slots.get(owner, 0) > MUCH * used:
            yield f"{slots[owner]} of the {used} slots in use {what}."
    for reason, what in (
        ("no_slot", "no slot was free at their boundary: more slots, or reserve="),
        ("no_register", "no register was free: raise snapshots="),
        ("no_chunk", "no chunk ended near their length: cut prompts with chunk()"),
    ):
        if count := of["degradations"].get(reason, 0):
            yield f"{count} snapshots were not kept: {what}."


def _prompts(of: Mapping[str, Any]) -> Iterator[str]:
    prompts = of["prompts"]
    if not prompts or not prompts["tokens"]:
        return
    lost = {reason: n / prompts["tokens"] for reason, n in prompts["lost"].items()}
    if (share := lost.get("evicted", 0)) > MUCH:
        reasons = {why: n for why, n in of["evictions"].items() if n and why not in ("superseded", "taken")}
        why = max(reasons, key=lambda each: reasons[each], default="")
        cure = {
            "room": "slots are short: more slots, host memory (Tiers), or fewer requests at a time",
            "pages": "KV pages are short: more pages",
            "limit": "Prefix(most_states=) is too low",
            "cleared": "somebody clears the cache, or recovered it",
        }.get(why, "more slots, or host memory")
        yield f"{share:.0%} of prompt tokens were lost because their state had been evicted; {cure}."
    if (share := lost.get("no_snapshot", 0)) > MUCH:
        yield f"{share:.0%} of prompt tokens have KV but never had a state: a finer placement, or a smaller every=."
    if (share := lost.get("no_sharing", 0)) > 1 - MUCH:
        yield f"{share:.0%} of prompt tokens were new, or their KV had gone: look at salts, templates and evictions."


def _storage(of: Mapping[str, Any]) -> Iterator[str]:
    tiers = of["tiers"]
    if not tiers:
        return
    writes = tiers["writes"]
    if missed := writes.get("missed", 0):
        yield (
            f"Storage does not keep up: {missed} records were evicted before their write, {tiers['writes_pending']} "
            f"wait, {writes.get('written', 0)} were written; more threads=, a faster store, more host memory."
        )
    elif tiers["writes_pending"] > max(100, writes.get("written", 0)):
        yield f"{tiers['writes_pending']} records wait for storage: it does not keep up if the number grows."
    if failed := writes.get("failed", 0) + tiers["failures"]:
        yield f"Storage failed {failed} times: see the log (memstate.tiers), and store.faults."
    ended = {end: n for end, n in tiers["prefetches"].items() if end != "short"}
    slow = ended.get("stopped", 0) + ended.get("partial", 0)
    if tiers["late"] or (slow and slow > MUCH * sum(ended.values())):
        yield (
            f"Prefetches come too late: {slow} of {sum(ended.values())} were stopped early, and {tiers['late']} "
            "requests did not wait; start them earlier, or Prefetch(stop='timeout')."
        )
    for reason, cure in (("no_staging", "raise Tiers(staging=)"), ("no_room", "host memory is pinned: more records")):
        if count := tiers["lost_saves"].get(reason, 0):
            yield f"{count} evicted states did not reach host memory: {cure}."


def _tenants(of: Mapping[str, Any]) -> Iterator[str]:
    held = {tenant: each["slots"] for tenant, each in of["tenants"].items()}
    if len(held) > 1 and (used := sum(held.values())):
        largest = max(held, key=lambda tenant: held[tenant])
        if held[largest] > MOST * used:
            yield f"Tenant {largest!r} holds {held[largest]} of the {used} slots in use."

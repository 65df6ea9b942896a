"""Says which figures of a manager need attention, and what to do. docs/metrics.md explains them in full."""

from collections.abc import Iterator, Mapping
from typing import Any

MUCH = 0.2  # share of prompt tokens, of requests, of prefetches or of slots that is worth advice
MOST = 0.5  # share of the slots or KV pages in use that one owner may hold
UNKNOWN = "unknown"  # owner of states and pages without a tenant

WENT = {
    "room": "slots are short: more slots, host memory (Tiers), or fewer requests at a time",
    "pages": "KV pages are short: more pages",
    "limit": "Prefix(most_states=) is too low",
    "cleared": "a call of `clear` or `recover` emptied the cache",
}
# reasons for which a state loses its KV too, so its prompt counts as new; with an engine's own KV, every reason does
WITH_KV = ("pages", "cleared")


def advice(of: Mapping[str, Any]) -> list[str]:
    """Returns advice in plain sentences, the most important first.

    Args:
        of: one manager of a summary.
    """
    return [*_faults(of), *_room(of), *_storage(of), *_prompts(of), *_tenants(of)]


def _faults(of: Mapping[str, Any]) -> Iterator[str]:
    if of["interrupted"]:
        yield "A call was interrupted, and every call raises Broken: recover(). These figures are older."
    elif of["age_seconds"] > 1:
        yield f"The figures are {of['age_seconds']:.0f} s old: the loop has been inside of one call since then."
    if of["tiers"] and of["tiers"]["leaked_records"]:
        yield f"{of['tiers']['leaked_records']} host records have leaked: a defect of memstate."


def _room(of: Mapping[str, Any]) -> Iterator[str]:
    refused = {reason: n for reason, n in of["refusals"].items() if n}
    for reason, count in refused.items():
        if reason not in ("slots", "rows", "pages"):  # a later version may have more reasons
            continue
        leak = "; if your engine runs fewer requests than that, some were never released" if reason == "rows" else ""
        free = of[reason].get("free", 0)
        yield f"{count} calls were refused for lack of {reason} ({free} free now): requests wait{leak}."
    slots = of["slots"]
    used = sum(slots.values()) - slots.get("free", 0)
    for owner, what in (
        ("snapshot", "are held by published handles: a leak of the engine if nobody resumes from them; drop()"),
        ("by_id", "are claimed by id (pool.claim): nobody but their claimer can free them; pool.release()"),
    ):
        if slots.get(owner, 0) > MUCH * used:
            yield f"{slots[owner]} of the {used} slots in use {what}."
    sessions = of["sessions"]
    if slots.get("session", 0) > MOST * used and (sessions["emptied"] or refused):
        yield (
            f"{slots['session']} of the {used} slots in use are held by idle sessions, {sessions['open']} are open and "
            f"{sessions['emptied']} made way: sessions.close(), ttl=, SessionLimits(most_states=), or more slots."
        )
    for reason, what in (
        ("no_slot", "no slot was free at their boundary: more slots, or reserve="),
        ("no_register", "no register was free, or no slot inside of a prompt: more slots, or raise snapshots="),
        ("no_chunk", "no chunk ended near their length: cut prompts with chunk()"),
    ):
        if count := of["degradations"].get(reason, 0):
            yield f"{count} snapshots were not kept: {what}."


def _prompts(of: Mapping[str, Any]) -> Iterator[str]:
    prompts = of["prompts"]
    if not prompts or not prompts["tokens"]:
        return
    lost = {reason: n / prompts["tokens"] for reason, n in prompts["lost"].items()}
    went = {why: n for why, n in of["evictions"].items() if n and why in WENT}
    if (share := lost.get("evicted", 0)) > MUCH:
        cure = WENT.get(_most(went), "more slots, or host memory")
        yield f"{share:.0%} of prompt tokens were lost because their state had been evicted; {cure}."
    if (share := lost.get("no_snapshot", 0)) > MUCH:
        yield f"{share:.0%} of prompt tokens have KV but never had a state: a finer placement, or a smaller every=."
    share = lost.get("no_sharing", 0)
    with_kv = {why: n for why, n in went.items() if why in WITH_KV or not any(of["pages"].values())}
    if share > MUCH and (count := sum(with_kv.values())) > MUCH * prompts["requests"]:
        cure = WENT[why := _most(with_kv)]
        if why != "cleared":
            cure = f'if the log has them with "uses" above 0, {cure}; otherwise look at salts and templates'
        yield (
            f"{share:.0%} of prompt tokens were new, or their KV had gone: {count} cached states went with their KV; "
            f"{cure}."
        )
    elif share > 1 - MUCH:
        yield f"{share:.0%} of prompt tokens were new: look at salts and templates."


def _most(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda each: counts[each], default="")


def _storage(of: Mapping[str, Any]) -> Iterator[str]:
    if not (tiers := of["tiers"]):
        return
    writes = tiers["writes"]
    if missed := writes.get("missed", 0):
        yield (
            f"Storage does not keep up: {missed} records were evicted before their write, {tiers['writes_pending']} "
            f"wait, {writes.get('written', 0)} were written; more threads=, a faster store, more host memory."
        )
    elif tiers["writes_pending"] > max(100, writes.get("written", 0)):
        yield f"{tiers['writes_pending']} records wait for storage: it does not keep up if the number grows."
    if failed := sum(tiers["failures"].values()) or writes.get("failed", 0):
        reasons = f" ({', '.join(tiers['failures'])})" if tiers["failures"] else ""
        yield f"Storage failed {failed} times{reasons}: see the log (memstate.tiers)."
    elif unwritten := tiers["unwritten"]:
        yield f"Storage failed {unwritten} writes since the start, none just now: flush() and close() try them again."
    if tiers["truncated"]:
        yield f"{tiers['truncated']} prefetches were cut to the host memory there: host_slots=, host_pages=."
    ended = {end: n for end, n in tiers["prefetches"].items() if end != "short"}
    slow = ended.get("stopped", 0) + ended.get("partial", 0)
    if tiers["late"] or (slow and slow > MUCH * sum(ended.values())):
        yield (
            f"Prefetches come too late: {slow} of {sum(ended.values())} were stopped early, and {tiers['late']} "
            "requests did not wait; start them earlier, or Prefetch(timeout=) longer, and not stop='best_effort'."
        )
    for reason, cure in (
        ("no_staging", "raise Tiers(staging=)"),
        ("no_room", "host memory is too small or pinned: host_slots=, host_pages="),
    ):
        if count := tiers["lost_saves"].get(reason, 0):
            yield f"{count} evicted states did not reach host memory: {cure}."


def _tenants(of: Mapping[str, Any]) -> Iterator[str]:
    named = of["tenants"].keys() - {UNKNOWN}
    if len(named) < 2:
        return
    for what, name in ("slots", "slots"), ("pages", "KV pages"):
        held = {tenant: each[what] for tenant, each in of["tenants"].items()}
        largest = max(sorted(named), key=lambda tenant: held[tenant])
        if held[largest] > MOST * sum(held.values()):
            yield f"Tenant {largest!r} holds {held[largest]} of the {sum(held.values())} {name} in use."

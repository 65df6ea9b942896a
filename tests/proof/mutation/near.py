"""Which tests are near a file of the library: those that the long run tries against its mutants."""

from functools import cache
from pathlib import Path

from tests.proof.mutation.mutant import Mutant

ROOT = Path(__file__).parents[3]

PROGRAMS = "stateful.py::test_random_programs_follow_the_rules"
OWNERS = [
    "allocator", "groups", "shared_pool", "ownership", "commands", "counts", "audit", PROGRAMS, "tracking",
    "tracking_ends", "redirect", "lazy", "fork", "arrivals", "in_place", "speculation", "accepted", "requests/pages",
    "requests", "shortfall", "mutant_gaps", "prefix_gaps", "gap",
]  # fmt: skip
CACHED = [
    "prefix_tree", "prefix_ranking", "prefix_cache", "prefix_room", "prefix_wants", "prefix_cow", "prefix_refusals",
    "prefix_arrivals", "prefix_identical", "sessions", "session_aborts", "session_pages", "session_walks",
    "session_refusals", "audit_owners", "tokens", "salts",
]  # fmt: skip
PREFIX = [PROGRAMS, "prefix_gaps", *CACHED]
DEVICE = ["ownership", "plan_kernel", "accept", "lazy", "redirect", "shared_pool", "warps", "mutant_gaps"]
MARKED = ["requests/marks", "placement", "prefill", "prefix_wants", "policies"]
PREFETCH = ["prefetch", "prefetch_stops", "prefetch_ranks", "prefetch_random"]
HOST = [
    f"tiers_{name}"
    for name in (
        "bytes", "counts", "dense", "errors", "faults", "gaps", "hits", "late", "life", "ranks", "refusals", "sessions",
        "storage", "streams", "writes",
    )
] + ["salts_below", "gap"]  # fmt: skip
FILES = ["file_store", "file_faults", "file_room", "file_foreign", "file_cleaning"]
STREAMS = ["streams"]
BYTES = ["copy", "storage", "given_memory", "sleep", "layout"]

NEAR = {
    "kernels/bitmap.py": [*DEVICE, "bitmap", "levels", "loops", "allocator"],
    "kernels/registers.py": [*DEVICE, "commands"],
    "kernels/tracking.py": DEVICE,
    "kernels/rules.py": [*OWNERS, "exhaustive"],
    "kernels/speculation.py": ["accept", "accepted", "mutant_gaps"],
    "kernels/warps.py": ["warps"],
    "kernels/copy.py": ["copy", "storage", "given_memory"],
    "kernels/slots.py": ["conv", "gated_delta", "selective", "decode_steps", "decode_marks", "checks"],
    "kernels/marks.py": ["kernels/marks", "scatter_states"],
    "kernels/gather.py": ["gather", "storage"],
    "kernels/scatter.py": ["scatter", "gather", "storage"],
    "kernels/pack.py": ["pack", "packing"],
    "kernels/pack_int8.py": ["pack_int8", "packing_int8"],
    "kernels/conv.py": ["conv", "decode_steps", "decode_marks", "decode_windows"],
    "kernels/gates.py": ["delta_gates", "selective"],
    "kernels/gated_delta.py": ["gated_delta", "delta_gates", "decode_steps", "decode_marks", "decode_windows"],
    "kernels/pieces.py": ["selective", "decode_steps", "decode_marks", "decode_windows"],
    "kernels/selective.py": ["selective", "decode_steps", "decode_marks", "decode_windows"],
    "memstate/slots/commands.py": [*OWNERS, "step_marks", "tiers_writes"],
    "memstate/slots/upload.py": ["upload", "counts", "commands"],
    "memstate/state/sharding.py": ["split", "layout", "presets"],
    "memstate/state/windows.py": ["speculation", "given_memory"],
    "memstate/state/presets/families.py": ["presets"],
    "memstate/engine/manager.py": [*OWNERS, "engine_memory", "sleep", "tiers_life", "tiers_late", *CACHED],
    **{f"memstate/engine/{name}.py": [*OWNERS, *CACHED, *MARKED] for name in ("admission", "ending", "stepping")},
    "memstate/engine/forking.py": [*OWNERS, "reorder", *CACHED, *MARKED],
    "memstate/engine/chaos.py": ["chaos"],
    "memstate/engine/warmup.py": ["warmup"],
    "memstate/tokens.py": PREFIX,
    "memstate/requests/marks.py": [PROGRAMS, *MARKED],
    "memstate/prefix/placement.py": MARKED,
    **{f"memstate/prefix/{name}.py": PREFIX for name in ("tree", "cache", "ranking", "sessions")},
    **{f"memstate/prefix/policies/{name}.py": PREFIX for name in ("lru", "greedy_dual")},
    **{f"memstate/prefix/policies/{name}.py": [*PREFIX, "policies"] for name in ("return_rate", "learning")},
    **{
        f"memstate/tiers/prefetch/{name}.py": PREFETCH
        for name in ("prefetcher", "fetch", "candidates", "reservation", "votes", "reading", "background")
    },
    **{
        f"memstate/tiers/{name}.py": HOST
        for name in ("host/tier", "manager", "writeback", "host/transfers", "digests", "load", "prefetch/agreed")
    },
    **dict.fromkeys(("kernels/dispatch.py", "memstate/streams.py", "memstate/slots/readback.py"), STREAMS),
    **dict.fromkeys(("memstate/engine/parts.py", "memstate/engine/pool.py"), OWNERS + STREAMS),
    "memstate/slots/inspect.py": ["audit", "audit_owners", "gap"],
    "memstate/checks.py": ["salt_values", "refusals", "misuse", "prefix_refusals", "tiers_gaps"],
    "memstate/salts.py": ["tier_keys", "salt_values", "salts_below"],
    "memstate/tiers/keys.py": ["tier_keys", "salt_values", "salts_below", "tiers_gaps"],
    "memstate/integrations/handover/handover.py": ["resplit", "handover", "salts_below"],
    **{f"memstate/tiers/host/{name}.py": PREFETCH for name in ("cache", "pool")},
    **{f"memstate/tiers/stores/{name}.py": FILES for name in ("base", "file", "folder", "opening")},
    **dict.fromkeys((f"memstate/state/{name}.py" for name in ("layout", "memory", "regions", "planes")), BYTES),
}

# What takes long: pools beyond 1024 slots, and what is compiled, which is for those mutants alone that need it.
LONG = (
    "B11", "65535", "65536", "32767", "69960", "1000000", "1023", "1025", "2049", "1500", "narrow_words",
    "one_order",
)  # fmt: skip


@cache
def _file(name: str, test: str = "") -> str:
    """Where in the tree of tests a file is: its name is there once, or once in the folder before it."""
    folder, slash, name = name.rpartition("/")
    (path,) = ROOT.glob(f"tests/**/{folder}{slash}test_{name.removesuffix('.py')}.py")
    return "::".join(filter(None, (str(path.relative_to(ROOT)), test)))


def near(mutant: Mutant) -> list[str]:
    """Arguments for pytest: the files, and which of their tests.

    What runs the same code on every backend is tried on the reference alone, and a kernel on the interpreter alone.
    """
    names = NEAR.get(mutant.file, OWNERS)
    files = [_file(*name.split("::")) for name in names]
    device = mutant.file.startswith("kernels/") or mutant.file == "memstate/state/memory.py"
    without = ["[reference" if device else "[interpreter", *(LONG if device else ())]
    without += [] if mutant.category == "missing barrier" else ["test_barriers"]
    return [*files, "-m", "not slow", "-k", " and ".join(f"not {word}" for word in without)]

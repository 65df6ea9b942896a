"""Proves that SGLang's scheduler decides and computes the same over memstate's pools as over its own.

    python -m tests.proof.engines.sglang.run [--only WORD] [--json PATH]

Both runs of a pair get the same requests. Tokens, logits, hits, batches and free slots of every step must be equal, bit
for bit, and SGLang's own checks must find no leak. Two more runs must give the same tokens: one without a cache, one
with memstate's tree, which may evict other states. `--only` chooses the pairs and faults with this word in their name.
"""

import argparse
import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.proof.engines.sglang import cpu

cpu.prepare()  # must run before anything imports SGLang

from tests.proof.engines.sglang import hicache  # noqa: E402
from tests.proof.engines.sglang.engine import RunFailed, child  # noqa: E402
from tests.proof.engines.sglang.faults import FAULTS  # noqa: E402
from tests.proof.engines.sglang.scenarios import UNCACHED, Pair, pairs  # noqa: E402


def compare(pair: Pair) -> dict[str, Any]:
    """Runs a pair, then the same requests without a cache, then with memstate's tree. Returns figures and faults."""
    try:
        theirs, ours, tree = child(pair, ours=False), child(pair, ours=True), child(pair, ours=True, tree=True)
        alone = replace(pair, settings=pair.settings | UNCACHED, refuse=0)
        # An abort comes after a number of steps. By then, a run without a cache has generated other tokens.
        plain = None if pair.aborts else child(alone, ours=False)
    except RunFailed as error:
        return {"name": pair.name, "requests": 0, "hits": 0, "wrong": [str(error)]}
    hits = sum(ours.hits.values())
    wrong = ours.differences(theirs) + [f"no {name}" for name in pair.must if not vars(theirs)[name]]
    if plain and plain.tokens != ours.tokens:
        wrong.append("tokens without a cache")
    if not pair.aborts and tree.tokens != ours.tokens:
        wrong.append("tokens with memstate's tree")
    if not any(tree.hits.values()):
        wrong.append("no hits with memstate's tree")
    return {
        "name": pair.name, "requests": len(ours.tokens), "steps": len(ours.batches),
        "tokens": sum(map(len, ours.tokens.values())), "hits": hits,
        "hits with memstate's tree": sum(tree.hits.values()), "chunks": ours.chunks, "aborts": ours.aborts,
        "retracted": ours.retracted, "refused": ours.refused, "wrong": wrong if hits else [*wrong, "no hits"],
    }  # fmt: skip


def restarted() -> dict[str, Any]:
    """Runs requests twice over one store. In the second run, even the first request of a conversation must hit.

    Returns figures and faults.
    """
    hicache.prepare()
    with TemporaryDirectory() as folder:
        pair = hicache.over_store(Path(folder))
        try:
            before, after = child(pair, ours=True), child(pair, ours=True)
        except RunFailed as error:
            return {"name": pair.name, "requests": 0, "hits": 0, "wrong": [str(error)]}
    first_hits = sum(after.hits[name] for name in after.hits if name.endswith(".0"))
    wrong = ["tokens"] * (before.tokens != after.tokens) + ["nothing found"] * (not first_hits)
    hits = sum((*before.hits.values(), *after.hits.values()))
    return {
        "name": pair.name, "requests": 2 * len(after.tokens), "hits": hits, "hits of first requests": first_hits,
        "wrong": wrong,
    }  # fmt: skip


def planted(name: str) -> tuple[bool, str]:
    """Runs a pair with a fault in memstate's pools. Returns whether it was noticed as expected, and what was seen."""
    pair = next(pair for pair in pairs() if pair.name == "extra_buffer")
    plant, sign = FAULTS[name]
    try:
        seen = "; ".join(child(pair, ours=True, plant=plant).differences(child(pair, ours=True)))
    except RunFailed as error:
        seen = str(error).strip().splitlines()[0]
    return sign in seen, seen or "nothing"


def line(result: dict[str, Any]) -> str:
    """Returns a line with the figures of a pair."""
    counts = ", ".join(f"{value} {name}" for name, value in result.items() if value and name not in ("name", "wrong"))
    return f"{result['name']}: {counts}: {'; '.join(result['wrong']) or 'the same'}"


def main() -> int:
    """Runs the program. Returns 0 if the runs of each pair agree and each fault is noticed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="", metavar="WORD")
    options.add_argument("--json", type=Path, metavar="PATH")
    given = options.parse_args()
    results, seen = [], {}
    for pair in pairs():
        if given.only in pair.name:
            results.append(compare(pair))
            print(line(results[-1]), flush=True)
    if given.only in "HiCache over a store":
        results.append(restarted())
        print(line(results[-1]), flush=True)
    for name in FAULTS:
        if given.only in name:
            seen[name] = planted(name)
            print(f"planted, {name}: {seen[name][1]}: {'seen' if seen[name][0] else 'NOT SEEN'}", flush=True)
    if not results and not seen:
        print(f"--only {given.only}: there is no such pair or fault", file=sys.stderr)
        return 2
    different, missed = sum(bool(result["wrong"]) for result in results), sum(not was for was, _ in seen.values())
    if given.json:
        given.json.write_text(json.dumps({"sglang": version("sglang"), "pairs": results, "planted": seen}, indent=1))
    requests, hits = (sum(result[key] for result in results) for key in ("requests", "hits"))
    print(
        f"sglang {version('sglang')}: {len(results)} pairs with {requests} requests, {hits} tokens from the cache, "
        f"{different} different, {len(seen) - missed} of {len(seen)} planted faults seen: "
        f"{'ok' if not different and not missed else 'FAILED'}"
    )
    return int(bool(different or missed))


if __name__ == "__main__":
    sys.exit(main())

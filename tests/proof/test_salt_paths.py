"""Every path that carries a salt, read from the library's source, has a directed test and a mutant that it kills."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.proof.mutation.catalogue import MUTANTS

ROOT = Path(__file__).parents[2]
RULE = "memstate.checks"  # what a salt is: carries none anywhere
DEVICE, BELOW, VALUES = (
    f"tests/{name}.py::test_" for name in ("engine/test_salts", "tiers/test_salts_below", "engine/test_salt_values")
)

ADMITTED = DEVICE + "admission_finds_what_its_own_salt_has"
MATCHED = DEVICE + "match_finds_what_its_own_salt_has"
LEFT = DEVICE + "what_a_row_leaves_goes_under_its_salt"
WITHOUT = DEVICE + "a_row_without_tokens_leaves_what_it_has_under_its_salt"
FORKED = DEVICE + "forks_leave_what_they_have_under_the_salt_of_their_row"
TURNS = DEVICE + "a_later_turn_of_a_session_goes_on_under_its_own_salt"
LEFT_BY_TURNS = DEVICE + "what_a_later_turn_leaves_goes_under_its_salt"
ROOTS = DEVICE + "the_tree_has_a_root_for_each_salt"
HOST = BELOW + "host_memory_gives_what_its_own_salt_has"
STORED = BELOW + "storage_gives_what_its_own_salt_has"
AGREED = BELOW + "what_ranks_have_agreed_on_is_for_its_own_salt"
HANDED = BELOW + "a_hand_over_brings_what_its_own_salt_has"
NAMED = BELOW + "nodes_and_prompts_have_the_digests_of_their_salt"
DIGESTS = BELOW + "digests_are_of_one_salt"
REFUSED = VALUES + "what_is_no_salt_is_refused"

# What has a salt (a function with such a parameter, a class with such a field) or hands one on (function -> what it
# calls), and the test that is for it.
PATHS = {
    "memstate.requests.handles.Request.salt": ADMITTED,
    # admission
    "memstate.engine.admission.Admission._start_of -> require_salt": REFUSED,
    "memstate.engine.admission.Admission._look -> _cache.match": ADMITTED,
    "memstate.engine.admission.Admission._look -> _sessions.find": TURNS,
    "memstate.engine.admission.Admission._look -> _loader.find": HOST,
    "memstate.engine.admission.Admission._load_hits -> _cache.match": HOST,
    "memstate.engine.admission.Admission._hold -> _cache.hold": LEFT,
    "memstate.engine.admission.Admission._hold -> _cache.suspend": LEFT_BY_TURNS,
    "memstate.engine.admission.Admission._carry_out -> _cache.on_miss": WITHOUT,
    "memstate.engine.admission.Admission._move -> _sessions.begin": TURNS,
    # what callers ask without a request
    "memstate.engine.manager.StateManager.match": MATCHED,
    "memstate.engine.manager.StateManager.match -> require_salt": REFUSED,
    "memstate.engine.manager.StateManager.match -> _match": MATCHED,
    "memstate.engine.manager.StateManager._match": MATCHED,
    "memstate.engine.manager.StateManager._match -> prefix.match": MATCHED,
    "memstate.engine.manager.StateManager._match -> _sessions.find": DEVICE
    + "match_finds_what_a_session_keeps_under_its_salt",
    "memstate.engine.manager.StateManager._match -> tiers.find": BELOW
    + "match_finds_what_host_memory_has_under_its_salt",
    "memstate.engine.manager.StateManager.prefetch": STORED,
    "memstate.engine.manager.StateManager.prefetch -> require_salt": REFUSED,
    "memstate.engine.manager.StateManager.prefetch -> _match": BELOW + "a_prefetch_counts_on_what_its_own_salt_has",
    "memstate.engine.manager.StateManager.prefetch -> tiers.prefetch": STORED,
    # the prefix cache
    "memstate.prefix.cache.Lease.salt": LEFT,
    "memstate.prefix.cache.PrefixCache.match": ADMITTED,
    "memstate.prefix.cache.PrefixCache.match -> tree.find": ADMITTED,
    "memstate.prefix.cache.PrefixCache.hold": LEFT,
    "memstate.prefix.cache.PrefixCache.hold -> Lease": DEVICE
    + "a_row_that_goes_on_from_a_hit_leaves_more_under_its_salt",
    "memstate.prefix.cache.PrefixCache.suspend": LEFT_BY_TURNS,
    "memstate.prefix.cache.PrefixCache.suspend -> Lease": LEFT_BY_TURNS,
    "memstate.prefix.cache.PrefixCache.on_miss": WITHOUT,
    "memstate.prefix.cache.PrefixCache.on_miss -> Lease": DEVICE
    + "a_row_that_resumes_a_handle_leaves_what_it_has_under_its_salt",
    "memstate.prefix.cache.PrefixCache.fork -> Lease": FORKED,
    "memstate.prefix.cache.PrefixCache._insert -> tree.find": DEVICE + "a_state_that_another_salt_has_is_no_second_one",
    "memstate.prefix.cache.PrefixCache._grow -> tree.insert": LEFT,
    "memstate.prefix.cache.PrefixCache.insert_loaded": HOST,
    "memstate.prefix.cache.PrefixCache.insert_loaded -> tree.find": BELOW
    + "a_state_that_comes_up_shares_no_page_with_another_salt",
    "memstate.prefix.cache.PrefixCache.insert_loaded -> tree.insert": HOST,
    "memstate.prefix.none.NoCache.on_miss": TURNS,
    "memstate.prefix.tree.Tree.root": ROOTS,
    "memstate.prefix.tree.Tree.find": ROOTS,
    "memstate.prefix.tree.Tree.find -> roots.get": DEVICE
    + "what_is_remembered_of_a_prompt_is_remembered_under_its_salt",
    "memstate.prefix.tree.Tree.insert": ROOTS,
    "memstate.prefix.tree.Tree.insert -> root": ROOTS,
    # sessions
    "memstate.prefix.sessions.Conversation.salt": TURNS,
    "memstate.prefix.sessions.Sessions.find": TURNS,
    "memstate.prefix.sessions.Sessions.begin": TURNS,
    # hits from below
    "memstate.tiers.load.LowerHit.salt": HOST,
    "memstate.tiers.load.NoLoader.find": HOST,
    "memstate.tiers.load.Loader.find": HOST,
    "memstate.tiers.load.Loader.find -> _tiers.find": HOST,
    "memstate.tiers.load.Loader.find -> _tiers.agreed.get": AGREED,
    "memstate.tiers.load.Loader.find -> LowerHit": HOST,
    "memstate.tiers.load.Loader.bring -> _cache.insert_loaded": HOST,
    "memstate.tiers.manager.TierManager.find": HOST,
    "memstate.tiers.manager.TierManager.find -> host.find": HOST,
    "memstate.tiers.manager.TierManager.prefetch": STORED,
    "memstate.tiers.manager.TierManager.prefetch -> host.digests": STORED,
    "memstate.tiers.host.tier.HostTier.find": HOST,
    "memstate.tiers.host.tier.HostTier.find -> digests": BELOW + "dense_records_give_what_their_own_salt_has",
    "memstate.tiers.host.tier.HostTier.digests": NAMED,
    "memstate.tiers.host.tier.HostTier.digests -> _digests.of_prompt": NAMED,
    "memstate.tiers.prefetch.agreed.AgreedHits.get": AGREED,
    "memstate.tiers.prefetch.agreed.AgreedHits.get -> _host.digests": AGREED,
    "memstate.tiers.handover.handover.HandOver.run": HANDED,
    "memstate.tiers.handover.handover.HandOver.run -> _own.of": HANDED,
    "memstate.tiers.handover.handover.HandOver.run -> keys.of": HANDED,
    # digests
    "memstate.tiers.digests.Digests.of_node -> _keys.of": NAMED,
    "memstate.tiers.digests.Digests.of_prompt": NAMED,
    "memstate.tiers.digests.Digests.of_prompt -> _keys.of": NAMED,
    "memstate.tiers.keys.Keys.of": DIGESTS,
    "memstate.tiers.keys.Keys.of -> encode": DIGESTS,
    "memstate.tiers.keys.encode": VALUES + "salts_that_look_alike_have_other_digests",
    "memstate.tiers.keys.encode -> _encode": VALUES + "what_is_no_salt_has_no_digest",
    "memstate.tiers.keys.encode -> require_salt": VALUES + "what_is_no_salt_has_no_digest",
}


class Carrier(NamedTuple):
    """Where a salt is: a name of `PATHS`, the file, and the lines."""

    name: str
    file: str
    first: int
    last: int


def is_salt(value: ast.expr) -> bool:
    """A name or a field called so, what a method called so returns, or one that has just been looked at."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in ("salt", "require_salt")
    return (isinstance(value, ast.Name) and value.id == "salt") or (
        isinstance(value, ast.Attribute) and value.attr == "salt"
    )


def carriers(body: list[ast.stmt], inside: str, file: str) -> Iterator[Carrier]:
    """Functions and fields of a module that have a salt, and the calls that hand one on."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            name = f"{inside}.{node.name}"
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == "salt":
                    yield Carrier(f"{name}.salt", file, field.lineno, field.end_lineno or field.lineno)
            yield from carriers(node.body, name, file)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, given = f"{inside}.{node.name}", node.args
            if any(each.arg == "salt" for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)):
                yield Carrier(name, file, node.lineno, node.end_lineno or node.lineno)
            for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
                if any(map(is_salt, [*call.args, *(keyword.value for keyword in call.keywords)])):
                    callee = ast.unparse(call.func).removeprefix("self.")
                    if callee != "shown":  # to people
                        yield Carrier(f"{name} -> {callee}", file, call.lineno, call.end_lineno or call.lineno)


def library() -> dict[str, Carrier]:
    found: list[Carrier] = []
    for path in sorted((ROOT / "memstate").rglob("*.py")):
        file = path.relative_to(ROOT)
        module = ".".join(file.with_suffix("").parts)
        if module != RULE and "kernels" not in file.parts:
            found += carriers(ast.parse(path.read_text()).body, module, str(file))
    return {each.name: each for each in found}


FOUND = library()


def test_every_path_of_a_salt_has_a_directed_test() -> None:
    new, gone = FOUND.keys() - PATHS.keys(), PATHS.keys() - FOUND.keys()
    assert not new, (
        f"{sorted(new)}: add each to PATHS, with a test of two tenants: one finds its own, and the other nothing"
    )
    assert not gone, f"{sorted(gone)}: no such path carries a salt any more; take it out of PATHS, or name it anew"


def test_directed_tests_exist() -> None:
    tests = {
        f"{file}::{node.name}"
        for file in {test.partition("::")[0] for test in PATHS.values()}
        for node in ast.parse((ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert set(PATHS.values()) - tests == set()


@pytest.mark.parametrize("name", [name for name in PATHS if " -> " in name])
def test_every_hand_on_of_a_salt_has_a_mutant(name: str) -> None:
    """One that changes the call, and whose killer is the test that the path names."""
    carrier, near = FOUND[name], []
    text = (ROOT / carrier.file).read_text()
    for mutant in MUTANTS:
        if mutant.file == carrier.file and mutant.killer.partition("[")[0] == PATHS[name]:
            first = text[: text.index(mutant.old)].count("\n") + 1 if mutant.old in text else 0
            near += [mutant.name] * (first <= carrier.last and carrier.first <= first + mutant.old.count("\n"))
    assert near, f"{name}: give a mutant of {carrier.file}:{carrier.first} that {PATHS[name]} kills"


def test_what_carries_a_salt_is_found() -> None:
    source = """
class Thing:
    salt: str
    def plain(self, x): return self.root(x)
    def at(self, key, *, salt=None):
        self.tree.find(key, salt)
        use(salt=require_salt(salt))
        return self.tree.put(key, self.tree.salt(key)), other.salt, say(shown(salt))
    def on(self, lease):
        def inner(): return Lease(lease.salt)
        return inner
def free(salt): return 1
"""
    expected = [
        "m.Thing.salt", "m.Thing.at", "m.Thing.at -> require_salt", "m.Thing.at -> tree.find", "m.Thing.at -> tree.put",
        "m.Thing.at -> use", "m.Thing.on -> Lease", "m.free",
    ]  # fmt: skip
    assert sorted(each.name for each in carriers(ast.parse(source).body, "m", "m.py")) == sorted(expected)

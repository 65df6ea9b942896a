"""Every path that carries a salt, read from the library's source, has a mutant that a test of salts kills."""

import ast
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.proof.mutation.catalogue import MUTANTS
from tests.support.sources import ROOT, sources

RULE = "memstate.checks"  # what a salt is: carries none anywhere
FILES = (
    "engine/test_salts", "tiers/test_salts_below", "engine/test_salt_values", "integrations/test_transformers_serve",
    "events/test_feed", "prefix/test_part", "metrics/test_tenants", "metrics/test_prometheus",
)  # fmt: skip
TESTS = tuple(f"tests/{name}.py" for name in FILES)
PICTURES = "memstate.viz."  # show a salt to people, and keep nothing
KEEP_NOTHING = {"memstate.prefix.none.NoCache.on_miss", "memstate.tiers.load.NoLoader.find"}  # nothing to mix up


class Carrier(NamedTuple):
    """Where a salt is: a function that takes one, or `function -> what it calls with it`; the file, and the lines."""

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
    """Functions of a module that are given a salt, and the calls that hand one on."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from carriers(node.body, f"{inside}.{node.name}", file)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name, given = f"{inside}.{node.name}", node.args
            if any(each.arg == "salt" for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)):
                yield Carrier(name, file, node.lineno, node.end_lineno or node.lineno)
            for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
                if any(map(is_salt, [*call.args, *(keyword.value for keyword in call.keywords)])):
                    callee = ast.unparse(call.func).removeprefix("self.")
                    if callee != "shown":  # to people
                        yield Carrier(f"{name} -> {callee}", file, call.lineno, call.end_lineno or call.lineno)


FOUND = {
    each.name: each
    for path, tree in sources("memstate").items()
    if (module := ".".join(path.with_suffix("").parts)) != RULE and not module.startswith(PICTURES)
    for each in carriers(tree.body, module, str(path))
}


@pytest.mark.parametrize("name", sorted(FOUND.keys() - KEEP_NOTHING))
def test_every_path_of_a_salt_has_a_mutant(name: str) -> None:
    """One that changes the function or the call, and that a test of two tenants kills: one finds its own alone."""
    carrier, near = FOUND[name], []
    text = (ROOT / carrier.file).read_text()
    for mutant in MUTANTS:
        if mutant.file == carrier.file and mutant.killer.startswith(TESTS) and mutant.old in text:
            first = text[: text.index(mutant.old)].count("\n") + 1
            near += [mutant.name] * (first <= carrier.last and carrier.first <= first + mutant.old.count("\n"))
    assert near, f"{name}: give a mutant of {carrier.file}:{carrier.first} that one of {', '.join(TESTS)} kills"


def test_paths_that_keep_nothing_are_there() -> None:
    assert len(FOUND) > 60 and FOUND.keys() >= KEEP_NOTHING


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
        "m.Thing.at", "m.Thing.at -> require_salt", "m.Thing.at -> tree.find", "m.Thing.at -> tree.put",
        "m.Thing.at -> use", "m.Thing.on -> Lease", "m.free",
    ]  # fmt: skip
    assert sorted(each.name for each in carriers(ast.parse(source).body, "m", "m.py")) == sorted(expected)

"""The rules of examples/many_machines/owner.py hold in every order of messages, losses and deaths; each is needed."""

import pytest

from tests.proof.custody import SOURCE, Found, check
from tests.proof.mutation.catalogue import MUTANTS, Mutant
from tests.support.sampling import PROOF
from tests.support.sources import ROOT

RULES = [mutant for mutant in MUTANTS if ROOT / mutant.file == SOURCE]
ADOPT = ("tokens[: len(self.tokens)] == self.tokens", "len(tokens) >= len(self.tokens)")
CHECKPOINT = ("self.runs, self.parked = False, (tokens, state)", "self.parked = (tokens, state)")


def found(old: str, new: str, tokens: int = 2, epochs: int = 3) -> Found:
    """Tries the rules with a change."""
    source = SOURCE.read_text()
    assert source.count(old) == 1
    return check(source.replace(old, new), tokens, epochs)


@pytest.mark.parametrize(
    ("tokens", "epochs", "worlds"),
    [
        (2, 3, 19_288),
        pytest.param(3, 3, 50_766, marks=pytest.mark.proof),
        pytest.param(2, 4, 129_514, marks=pytest.mark.proof),
    ],
)
def test_H1_H2_no_order_of_messages_is_wrong(tokens: int, epochs: int, worlds: int) -> None:
    assert check(tokens=tokens, epochs=epochs) == Found(worlds, set())


@pytest.mark.parametrize("mutant", [pytest.param(mutant, id=mutant.name) for mutant in RULES])
def test_each_rule_is_needed(mutant: Mutant) -> None:
    assert found(mutant.old, mutant.new).wrong - {"too many"}


def test_all_rules_have_their_mutants() -> None:
    assert len(RULES) == 8


@pytest.mark.parametrize("change", [ADOPT, CHECKPOINT])
def test_two_changes_are_no_faults(change: tuple[str, str]) -> None:
    """Tokens of the newest epoch always begin with those that count. A state that is parked while its request goes on
    is a checkpoint, as all tokens come along.
    """
    assert found(*change, 2, 3 if PROOF else 2).wrong == set()

"""Tests that states in fewer bits drift as little as docs/fewer_bits.md says, on the inputs of `tests.proof.drift`."""

import pytest

from tests.proof.drift import Error, drift
from tests.support.sources import ROOT

RULES = {"delta": "gated delta rule", "mamba2": "Mamba-2"}


def published(rule: str) -> dict[str, dict[int, Error]]:
    """Returns the table of the page: for each format the errors after so many tokens."""
    lines = [line.strip("| ").split(" | ") for line in (ROOT / "docs/fewer_bits.md").read_text().splitlines()]
    (head,) = [line for line in lines if line[0] == "state"]
    columns = {
        at: int(name.rpartition(", ")[2].replace(" ", "")) for at, name in enumerate(head) if RULES[rule] in name
    }
    rows = lines[lines.index(head) + 2 :][:5]
    return {
        row[0]: {tokens: Error(*map(float, row[at].split(" / "))) for at, tokens in columns.items()} for row in rows
    }


@pytest.mark.parametrize("tokens", [1000, pytest.param(10_000, marks=pytest.mark.proof)])
@pytest.mark.parametrize("rule", RULES)
def test_drift_is_what_the_page_says(rule: str, tokens: int) -> None:
    """Another torch may draw other random numbers or round otherwise, so twice and half of a figure pass."""
    said = {name: by_length[tokens] for name, by_length in published(rule).items()}
    found = drift(rule, tokens, list(said))
    for name, error in found.items():
        assert all(wanted / 2 < got < 2 * wanted for got, wanted in zip(error, said[name], strict=True)), (name, error)
    assert found["int16"].worst < found["bf16"].worst / 50

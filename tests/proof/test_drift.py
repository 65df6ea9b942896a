"""Tests that states in fewer bits drift as little as docs/fewer_bits.md says, on the inputs of `tests.proof.drift`."""

import pytest

from tests.proof.drift import drift
from tests.support.sources import ROOT

RULES = {"delta": "delta rule", "mamba2": "Mamba-2"}


def published(rule: str, tokens: int) -> dict[str, float]:
    """Returns the errors of the worst head after so many tokens, as the table of the page has them."""
    lines = [line.strip("| ").split(" | ") for line in (ROOT / "docs/fewer_bits.md").read_text().splitlines()]
    (at,) = (number for number, line in enumerate(lines) if line[0] == "kept as")
    column = lines[at].index(f"{RULES[rule]}, {tokens:,}".replace(",000", " 000"))
    return {line[0]: float(line[column].partition(" / ")[0]) for line in lines[at + 2 : at + 7]}


@pytest.mark.parametrize("tokens", [1000, pytest.param(10_000, marks=pytest.mark.proof)])
@pytest.mark.parametrize("rule", RULES)
def test_D33_drift_is_what_the_page_says(rule: str, tokens: int) -> None:
    """The table has the median of five texts, so one text may have twice or half of it."""
    said = published(rule, tokens)
    found = {name: error.worst for name, error in drift(rule, tokens, [*said]).items()}
    assert [name for name, wanted in said.items() if not wanted / 2 < found[name] < 2 * wanted] == [], found
    assert found["int16"] < found["bf16"] / 50

"""`bench drift`: every format beside the others, and what is said where an operation is wrong."""

import pytest

from memstate.cli.bench import drift, run
from memstate.kernels.dispatch import Backend


def test_more_bits_drift_less() -> None:
    outcome = run(("drift",), "reference", toy=True)
    assert not outcome.unmeasured
    found = {(each.op, each.unit, each.case): each.value for each in outcome.entries}
    assert len(found) == len(outcome.entries) == 2 * 2 * len(drift.TOY_TOKENS) * (len(drift.FORMATS) + 2)
    for rule in ("gated delta", "mamba2"):
        for unit in ("relative error, state", "relative error, output"):
            for chance in ("", ", by chance"):
                names = ["fp32", *(f"{bits}{chance}" for bits in ("int16", "int8+residual", "int8"))]
                errors = [found[rule, unit, f"toy {name}, {drift.TOY_TOKENS[-1]} tokens"] for name in names]
                assert errors == sorted(errors) and errors[0] > 0


def test_an_operation_that_differs_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "load_bits", lambda self, out, **_: out.uniform_())
    outcome = run(("drift",), "reference", toy=True)
    assert not outcome.entries and len(outcome.wrong) == 2
    assert all("int16 differs from the reference" in line for line in outcome.wrong)

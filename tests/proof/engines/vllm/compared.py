"""Compares the results of the processes with a connector with those of the process without a cache."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.proof.engines.vllm.scenarios import Scenario

CLOSE: Final = 1e-5  # tolerated difference of logprobs in fp32
COST: Final = ("scheduler", "worker", "step")


@dataclass
class Outcome:
    """The outcome of a scenario.

    Attributes:
        counts: Requests, wrong answers, tokens of prompts and of hits, and counts of the connectors.
        apart: The largest difference between two logprobs of the same token.
        cost: CPU seconds in steps, and in the connectors of scheduler and worker.
        failures: A line for each fault.
    """

    counts: Counter[str] = field(default_factory=Counter)
    apart: float = 0.0
    cost: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @classmethod
    def sum(cls, outcomes: Iterable["Outcome"]) -> "Outcome":
        """Returns one outcome for several: sums of counts and seconds, all failures."""
        whole = cls()
        for each in outcomes:
            whole.counts += each.counts
            whole.cost += each.cost
            whole.apart = max(whole.apart, each.apart)
        return whole

    @property
    def text(self) -> str:
        """The figures, without the failures."""
        counts = self.counts
        share = [f"{self.cost[side] / self.cost['step']:.1%}" for side in COST[:2]] if self.cost["step"] else ["-"] * 2
        more = "".join(
            f", {counts[name]} {name}" for name in ("preempted", "aborted", "resets", "fetched") if counts[name]
        )
        return (
            f"{counts['requests']} requests, {counts['wrong']} with wrong tokens, logprobs within {self.apart:.1e}, "
            f"{counts['cached']} of {counts['prompts']} tokens not computed again, {counts['loaded']} blocks loaded"
            f"{more}, {share[0]} + {share[1]} of {1000 * self.cost['step'] / max(1, counts['steps']):.0f} ms a step"
        )

    def __str__(self) -> str:
        return self.text + (": ok" if not self.failures else "".join(f"\n    {each}" for each in self.failures))


def compared(scenario: Scenario, results: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Outcome:
    """Compares results, and returns the outcome.

    Args:
        scenario: The scenario.
        results: One pair for each process with a connector, in the order in which the processes started. A pair has
            the result of the process without a cache, then the result of the process with the connector.
    """
    outcome, exact = Outcome(), scenario.reference.serial
    counts = outcome.counts
    for right, result in results:
        for name, answer in result["answers"].items():
            expected, length = right["answers"][name], len(answer["tokens"])
            counts["requests"] += 1
            counts["aborted"] += answer["aborted"]
            counts["prompts"] += answer["prompt"]
            counts["cached"] += answer["cached"]
            counts["otherwise"] += exact and answer["cached"] != expected["cached"]
            if answer["tokens"] != expected["tokens"][: length if answer["aborted"] else None]:
                counts["wrong"] += 1
                continue
            pairs = zip(answer["logprobs"], expected["logprobs"], strict=False)
            outcome.apart = max([outcome.apart, *(abs(one - other) for one, other in pairs)])
        counts.update({name: value for name, value in result["counts"].items() if isinstance(value, int)})
        outcome.cost.update(result["cost"])
        outcome.failures += result["left"]
    if scenario.then:
        again = results[-1][1]["answers"].values()
        counts["reused"] = 100 * sum(each["cached"] for each in again) // sum(each["prompt"] for each in again)
    seen = counts["wrong"] or outcome.apart > (0 if exact else CLOSE)
    if seen and not scenario.wrong:
        outcome.failures.append("answers are not those of vLLM without a cache")
    if not seen and scenario.wrong:
        outcome.failures.append("records changed places, and no answer shows it")
    if counts["otherwise"]:
        outcome.failures.append(f"{counts['otherwise']} hits are not as long as vLLM's own")
    wants = dict(scenario.wants) | ({"cached": 1} if scenario.theirs else {"loaded": 1})
    outcome.failures += [f"{name}: {counts[name]}, expected {least} or more"
                         for name, least in wants.items() if counts[name] < least]  # fmt: skip
    outcome.failures += [f"{name}: {counts[name]}, expected 0" for name in scenario.never if counts[name]]
    return outcome

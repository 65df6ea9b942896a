"""Checks any pool of slots for the behaviours of docs/behaviours.md, and finds the shortest calls that break one."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from memstate.checks import is_count
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.testing.behaviours import BEHAVIOURS, Behaviour
from memstate.testing.pools import SlotPool
from memstate.testing.trial import Trial, Violation


@dataclass(frozen=True)
class Finding:
    """The result for one behaviour of a pool.

    Attributes:
        behaviour: number of the behaviour.
        title: what the pool should do.
        holds: whether the pool does it. None: the pool lacks the methods that the behaviour needs.
        sequence: the shortest calls that break it, as lines of Python; the last line says what is wrong.
        promised: True: every pool should have this behaviour. False: memstate has it, other pools need not.
    """

    behaviour: str
    title: str
    holds: bool | None
    sequence: list[str]
    promised: bool

    @property
    def broken(self) -> bool:
        """Whether the pool should have the behaviour and does not."""
        return self.promised and self.holds is False


def check(
    factory: Callable[[], SlotPool], only: Sequence[str] = (), *, examples: int = 100, seed: int = 0,
    report: Callable[[int, int], object] = lambda done, total: None,
) -> list[Finding]:  # fmt: skip
    """Checks a pool of slots.

    Args:
        factory: makes a new pool, with the same size each time. Each program of calls gets a new pool.
        only: numbers of behaviours; empty: all.
        examples: programs for each behaviour.
        seed: start of the random numbers.
        report: called with the number of behaviours checked so far, and the number of all.

    Returns:
        A finding for each behaviour, in the order of `BEHAVIOURS`.

    Raises:
        InvalidArgument: a number is not known, or the factory does not make a pool.
        ConfigurationError: hypothesis is not installed.
    """
    known = [each.number for each in BEHAVIOURS]
    if unknown := [number for number in only if number not in known]:
        raise InvalidArgument(f"behaviours {', '.join(unknown)}: expected some of {', '.join(known)}")
    try:
        pool = factory()
    except Exception as error:
        raise InvalidArgument(f"the factory of the pool raised {type(error).__name__}: {error}") from error
    if not isinstance(pool, SlotPool):
        raise InvalidArgument(f"{pool!r} is no pool: expected capacity, claim, release and free; see docs/check.md")
    if not is_count(pool.capacity) or not pool.capacity:
        raise InvalidArgument(f"capacity {pool.capacity!r}: expected a whole number of slots from 1 on")
    findings: list[Finding] = []
    wanted = [each for each in BEHAVIOURS if not only or each.number in only]
    for each in wanted:
        report(len(findings), len(wanted))
        offered = all(isinstance(pool, part) for part in each.needs)
        sequence = shortest(each, factory, examples, seed) if offered else []
        findings.append(Finding(each.number, each.title, not sequence if offered else None, sequence, each.promised))
    return findings


def shortest(behaviour: Behaviour, factory: Callable[[], SlotPool], examples: int, seed: int) -> list[str]:
    """Returns the shortest calls that break a behaviour; an empty list if no program broke it.

    Args:
        behaviour: the behaviour to check.
        factory: makes pools.
        examples: number of programs to try.
        seed: start of the random numbers.

    Raises:
        ConfigurationError: hypothesis is not installed.
    """
    try:
        import hypothesis
        from hypothesis import HealthCheck, Phase, strategies
    except ModuleNotFoundError as error:
        raise ConfigurationError("checking a pool needs hypothesis: pip install '.[check]' in a checkout") from error
    broken: list[list[str]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    @hypothesis.given(strategies.data())
    def program(data: strategies.DataObject) -> None:
        trial = Trial(factory())

        def draw(low: int, high: int) -> int:
            trial.need(low <= high, "the pool has less than it said")
            return data.draw(strategies.integers(low, high))

        try:
            behaviour.case(trial, draw)
        except hypothesis.errors.HypothesisException:
            raise
        except Exception as error:
            wrong = (
                error if isinstance(error, Violation) else Violation(trial.calls, f"then the check failed: {error!r}")
            )
            broken.append(wrong.sequence)
            raise wrong from error

    with suppress(Violation, hypothesis.errors.Flaky):  # Flaky: the pool itself is random
        program()
    return min(reversed(broken), key=len, default=[])

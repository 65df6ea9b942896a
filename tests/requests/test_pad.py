"""The number that stands for "no slot" in a step: other libraries' kernels skip negative slots."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.planes import LAYOUT, every_strategy
from tests.support.serving import TRACKING


@pytest.mark.parametrize("pad", [1, -2, True, 0.0, None, "0"])
def test_D30_pad_is_null_or_minus_one(pad: object) -> None:
    with pytest.raises(ms.ConfigurationError, match=r"pad=.*expected 0, the null slot, or -1"):
        ms.Forward(pad=pad)  # type: ignore[arg-type]


@pytest.mark.sample(interpreter=1)
@pytest.mark.parametrize("pad", [0, -1])
@every_strategy
def test_D30_pad_stands_where_there_is_no_slot(name: str, pad: int, backend: Backend) -> None:
    """`pad` stands in padding and for rows without a snapshot, takes no extra launch, and changes no slot."""
    mem = on(backend, LAYOUT, slots=12, max_requests=3, max_batch=4, tracking=TRACKING[name](2), pad=pad)
    a, b = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.submit()
    for tokens in (1, 1, 1):
        mem.backend.counts.reset()
        step = mem.plan([None, a, None, b], tokens)
        assert sum(mem.backend.counts.launches.values()) <= 2
        read, write, snapshot = (column.tolist() for column in (step.read, step.write, step.snapshot))
        assert (
            [read[at] for at in (0, 2)] == [write[at] for at in (0, 2)] == [snapshot[at] for at in (0, 2)] == [pad] * 2
        )
        assert all(slot > 0 for at in (1, 3) for slot in (read[at], write[at]))
        due = name in ("ping-pong", "lazy") and mem.info(a).length == 2
        assert [snapshot[at] > 0 for at in (1, 3)] == [due] * 2 and (due or snapshot == [pad] * 4)
        mem.submit(step)
        mem.settle(step)
    mem.end([a, b])
    mem.audit().raise_if_leaking()

"""Tests a convolution step and a gated delta step as one operation of two launches, which overlap on some devices.

Compiled kernels run the convolution only when a program of the other launch waits for it: see `Program.run`.
Run as a program, this file writes as JSON where the compiled kernels wait.
"""

import json
import re
import sys
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor

from memstate.kernels.decode_checks import DELTA_DEFAULTS
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import ConvTail
from tests.support import op_cases
from tests.support.decode_case import same_bits
from tests.support.kernel_runs import not_interpreted
from tests.support.op_case import Case
from tests.support.sampling import PROOF
from tests.support.watch import real_launches

OUT, RING, STATE = 9, 11, 5  # places of arguments of the two steps


class InTurn:
    """Makes two calls in place of one."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def conv_delta_step(self, conv: tuple[Any, ...], delta: tuple[Any, ...]) -> Tensor:
        self.backend.conv_step(*conv)
        return self.backend.gated_delta_step(*delta)


def test_D24_two_steps_that_overlap_have_the_bits_of_two_calls(backend: Backend) -> None:
    kinds = set()
    for seed in range(16):
        case = op_cases.made("conv_delta_step", seed)
        conv = case.arguments["conv"]
        kinds.add("tree" if conv[-1] is not None else "tail" if conv[RING] else "marks" if conv[10] else "plain")
        together, apart = case.run(backend), case.run(InTurn(backend))  # type: ignore[arg-type]
        assert all(map(same_bits, together, apart)), seed
    assert kinds == {"plain", "marks", "tail", "tree"}


def test_a_call_is_two_launches(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    case = op_cases.made("conv_delta_step", 0)
    with real_launches(monkeypatch) as seen:
        backend.conv_delta_step(**case.arguments)
    assert backend.counts.launches == {"conv_delta_step": 2} and backend.counts.total_launches == 2
    assert sorted(seen) == ([] if backend.name == "reference" else ["_conv_step", "_gated_delta_step"])


def test_what_a_call_leaves_out_is_what_the_steps_leave_out() -> None:
    for op, defaults in (("conv_step", (None,) * 4), ("gated_delta_step", DELTA_DEFAULTS)):
        given = [each.default for each in signature(getattr(Backend, op)).parameters.values()]
        assert tuple(given[-len(defaults) :]) == defaults


def replaced(arguments: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return *arguments[:place], value, *arguments[place + 1 :]


def refused(backend: Backend, case: Case, told: str, **changed: tuple[Any, ...]) -> None:
    before = [whole.clone() for whole in case.memory]
    with pytest.raises(ValueError, match=told):
        backend.conv_delta_step(**(case.arguments | changed))
    assert all(map(torch.equal, case.memory, before))


def with_all() -> Case:
    """Returns a launch with marks and a tail."""
    cases = (op_cases.made("conv_delta_step", seed) for seed in range(64))
    return next(case for case in cases if case.arguments["conv"][10] and case.arguments["conv"][RING])


def test_D24_what_one_step_would_refuse_is_refused_before_a_byte_moves(backend: Backend) -> None:
    case = with_all()
    conv, delta = case.arguments["conv"], case.arguments["delta"]
    refused(backend, case, "^x: ", conv=replaced(conv, 0, conv[0].double()))
    refused(backend, case, "^decay: ", delta=replaced(delta, 3, delta[3].double()))
    refused(backend, case, "^out: requires grad", delta=replaced(delta, 11, delta[11].clone().requires_grad_()))
    for wrong in (list(delta), delta[:9], (*delta, None), dict(enumerate(delta))):
        refused(backend, case, "^conv, delta: expected two tuples", delta=wrong)
    refused(backend, case, "^conv, delta: expected two tuples", conv=conv[:OUT])


def test_D24_q_k_and_v_are_what_the_first_step_computes(backend: Backend) -> None:
    case = with_all()
    conv, delta = case.arguments["conv"], case.arguments["delta"]
    for place in range(3):
        refused(backend, case, "^q, k, v: expected slices of `out`", delta=replaced(delta, place, delta[place].clone()))
    refused(backend, case, "^q, k, v: expected slices of `out`", conv=replaced(conv, OUT, None))


def test_D24_the_second_step_reads_early_only_what_the_first_does_not_write(backend: Backend) -> None:
    case = with_all()
    conv, delta = case.arguments["conv"], case.arguments["delta"]
    for place, value in ((6, delta[6].clone()), (12, delta[12]._replace(slot=delta[12].slot.clone()))):
        refused(backend, case, "^read, write, snapshot, tokens, marks: ", delta=replaced(delta, place, value))
    windows, state = conv[3], delta[STATE]
    bytes_of = torch.zeros(0, dtype=torch.uint8).set_(state.untyped_storage())
    room = bytes_of.view(windows.dtype)[: windows.numel()].view(windows.shape)
    refused(backend, case, "^state of conv_step: shares bytes with state", conv=replaced(conv, 3, room))
    for place, of, told in ((OUT, conv[OUT], "out"), (RING, conv[RING].x, "tail.x")):
        here = bytes_of.view(of.dtype)[: of.numel()].view(of.shape)
        value = ConvTail(here) if place == RING else here
        refused(backend, case, f"^{told}: bytes .* are shared with state", conv=replaced(conv, place, value))


def test_D24_the_first_step_does_not_write_scales(backend: Backend) -> None:
    made = (op_cases.made("conv_delta_step", seed) for seed in range(64))
    case = next(
        one for one in made if not one.arguments["conv"][RING] and one.arguments["delta"][STATE].shape[2] % 16 == 0
    )
    conv, delta = case.arguments["conv"], case.arguments["delta"]
    slots, heads, _, values = delta[STATE].shape
    state, nbytes = torch.zeros(delta[STATE].shape, dtype=torch.int8), 4 * slots * heads * values
    room = torch.zeros(conv[3].nbytes + nbytes, dtype=torch.uint8)
    scales = room[:nbytes].view(torch.float32).view(slots, heads, values)
    here = room[: conv[3].nbytes].view(conv[3].dtype).view(conv[3].shape)
    given = (*delta, *DELTA_DEFAULTS[len(delta) - 10 :])
    whole = replaced(replaced(given, STATE, state), 22, scales)
    refused(backend, case, "^state of conv_step: shares bytes with scales", conv=replaced(conv, 3, here), delta=whole)


def test_D24_windows_may_lie_between_states(backend: Backend) -> None:
    made = ((seed, op_cases.made("conv_delta_step", seed).arguments["delta"]) for seed in range(64))
    seed = next(seed for seed, delta in made if delta[STATE].dtype == torch.float32)
    case = op_cases.made("conv_delta_step", seed)
    outs = []
    for _ in range(2):
        conv, delta = case.arguments["conv"], case.arguments["delta"]
        outs.append(backend.conv_delta_step(conv, delta))
        windows, state = (held.contiguous().float() for held in (conv[3], delta[STATE]))
        ends = windows[0].numel(), windows[0].numel() + state[0].numel()
        both = torch.zeros(len(state), -(-ends[1] // 4) * 4)
        case = op_cases.made("conv_delta_step", seed)
        conv, delta = case.arguments["conv"], case.arguments["delta"]
        both[:, : ends[0]], both[:, ends[0] : ends[1]] = conv[3].flatten(1), delta[STATE].flatten(1)
        case.arguments["conv"] = replaced(conv, 3, both[:, : ends[0]].unflatten(1, windows.shape[1:]))
        case.arguments["delta"] = replaced(delta, STATE, both[:, ends[0] : ends[1]].unflatten(1, state.shape[1:]))
    assert outs[0].isfinite().all() and torch.equal(outs[0], outs[1])


def test_D24_compiled_kernels_wait_between_the_state_and_the_rest() -> None:
    """The convolution waits, then lets the next launch begin. The delta step loads the state past the first cache,
    and nothing else but columns and marks of the step, before it waits. Other targets have none of it.
    """
    found = not_interpreted(__file__)
    assert found.pop("elsewhere") == [[False, None], [False, None]] * 2
    assert len(found) == (16 if PROOF else 4)
    for name, (early, order) in found.items():
        first, _, rest = order.partition("wait ")
        if name.endswith("conv"):
            assert not early and first == "" and rest.startswith("launch ld"), name
            continue
        columns = 12 if "_marks" in name else 4
        assert early and set(first.split()) == {"ld", "cg"} and first.split().count("ld") <= columns, name
        assert "ld" in rest and not {"cg", "wait", "launch"} & set(rest.split()), name


def main() -> None:
    """Writes the switches of launches for other targets, and for sm_90 also the waits, loads and stores."""
    from memstate_tools.calls import CALLS, launch_of

    calls = [*CALLS["conv_delta_step"]()]
    plain = [launch_of(call, target) for target in ("sm_80", "gfx942") for call in calls[:2]]
    switches = [
        [one.arguments.get("AHEAD", one.arguments.get("BEHIND")), one.arguments.get("launch_pdl")] for one in plain
    ]
    found: dict[str, Any] = {"elsewhere": switches}
    for call in calls:
        if PROOF or (not call.rare and "fp32" in call.name):
            launch = launch_of(call, "sm_90")
            words = re.findall(
                r"griddepcontrol\.(?:wait|launch)|(?:ld|st)\.global(?:\.cg)?", launch.compiled.asm["ptx"]
            )
            order = ["cg" if ".cg" in word else re.findall("wait|launch|ld|st", word)[0] for word in words]
            found[call.name] = launch.arguments.get("launch_pdl", False), " ".join(order)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

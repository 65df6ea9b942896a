"""Compares all states and answers of an engine with those of the same prompts, each run alone."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument, LeakFound, MemstateError
from memstate.requests.handles import Rows
from memstate.requests.steps import Step
from memstate.tokens import Key, ids

State = dict[str, Tensor]  # name of a plane -> `layer ...`


class EngineDiffers(MemstateError, AssertionError):
    """Says that an engine computed something else for a prompt than when it served this prompt alone.

    Args:
        what: what differs, and where to look.
        prompt: number of the prompt.
        vector: where the difference is: "read", "write", "snapshot" or "mark" (a vector of a step), "tokens" (the
            argument of `end` and `publish`), or "answer".
        length: tokens of the state; or the number of the token in the answer, from 0 on over all turns.
        place: plane, layer and number of the step, if a state differs.
    """

    def __init__(self, what: str, prompt: int, vector: str, length: int, *place: Any) -> None:
        self.prompt, self.vector, self.length = prompt, vector, length
        self.plane, self.layer, self.step = place or (None, None, None)
        super().__init__(f"prompt {prompt}: {what}")


class Watch:
    """Watches the runs of an engine. It does not compare planes of rows, nor states of rows with tails.

    Args:
        rtol: largest allowed difference of two numbers, as a fraction of the largest number of their tensor.

    Attributes:
        answers: for each prompt, the tokens of its answer and their logits, from the run that served it alone.
        counts: counts of the current run: tokens and states compared, most pages in use.
        wrong: (request, difference of one of its states), for all differences of the current run.
        parted: requests of the current run that chose another of two equally good tokens.
    """

    def __init__(self, rtol: float) -> None:
        self.rtol, self.answers = rtol, list[list[tuple[int, Tensor]]]()
        # for each (prompt, length): different states of the run alone there; a dead step can leave a second one
        self._states = dict[tuple[int, int], list[State]]()

    def begin(self, mem: StateManager, alone: bool) -> None:
        """Begins a run.

        Args:
            mem: manager of the run, with `debug=True`.
            alone: True: the run serves the next prompt alone, and its states are noted. False: it serves all prompts.
        """
        self.counts, self.wrong, self.parted = Counter[str](), list[tuple[int, EngineDiffers]](), set[int]()
        self._mem, self._alone, stepping, ending = mem, alone, mem._parts.stepping, mem._parts.ending
        self._last = dict[int, str]()  # for each request, the last step whose state was compared; for messages
        self.answers += [[]] if alone else []
        self._numbers = range(1 if alone else 2 * len(self.answers))
        canary: Any = stepping._canary
        if canary is None:
            raise InvalidArgument("make(debug=True) gave a manager without debug: hand it on to StateManager(debug=)")
        fault = canary.fault

        def look(step: Step | None, relied: Callable[[Step], NDArray[np.bool_]]) -> Any:
            """Runs after the forward of a step, before a call changes its slots."""
            error = fault(step, relied)
            if error is None and step is not None and step is stepping.open and not mem.forward.tail:
                ids = [mem._parts.table.ids[row] for row in step.numbers.tolist()]
                self._look(
                    step, {at: ids[at] for at in np.flatnonzero(relied(step)).tolist() if ids[at] in self._numbers}
                )
            return error

        canary.fault = look
        ending._key = partial(self._filed, ending._key)  # type: ignore[method-assign]
        mem._parts.admission.admit = partial(self._started, mem._parts.admission.admit)  # type: ignore[method-assign]

    def _started(self, admit: Callable[[Any], Rows], requests: Any) -> Rows:
        """Starts requests, and counts the tokens that they do not read."""
        rows = admit(requests)
        self.counts["hits"] += sum(self._mem.info(row).length for row in rows)
        return rows

    def _look(self, step: Step, requests: dict[int, int]) -> None:
        """Compares the states in the slots of a step.

        Args:
            step: the step whose forward has run.
            requests: for each entry of the batch whose states are needed, its request.
        """
        mem, before, after, write = self._mem, step.before.tolist(), step.after.tolist(), step.write.tolist()
        self.counts["pages"] = max(self.counts["pages"], mem.pages.count - mem.free_pages)
        vectors = [("read", step.read, before), ("write", step.write, after), ("snapshot", step.snapshot, after)]
        # a snapshot that memstate copies is not in its slot yet
        vectors = vectors[:2] if mem._parts.stepping._copied else vectors
        places = [(name, at, slot, of[at]) for name, slots, of in vectors for at, slot in enumerate(slots.tolist())]
        marks = zip(*(column[: step.marked].tolist() for column in step.marks[1:]), strict=True)
        places += [("mark", at, slot, before[at] + offset) for at, offset, slot in marks]
        places = [one for one in places if one[1] in requests and one[2] > 0 and one[3] > 0]
        places = [one for one in places if one[0] != "read" or one[2] != write[one[1]]]
        saved = mem.planes.save(torch.tensor([one[2] for one in places], dtype=torch.int64, device=step.read.device))
        for number, (vector, at, _, length) in enumerate(places):
            planes = (one for one in mem.layout.planes if one.grid and one.fill is not None)
            state = {one.name: saved[one.name][:, number] for one in planes if not length % (one.grid or 1)}
            self._hold(step, vector, at, length, requests[at], state)

    def _hold(self, step: Step, vector: str, at: int, length: int, request: int, state: State) -> None:
        """Notes a state, or compares it with the states that its prompt had alone."""
        self.counts["states"] += 1
        self._last[request] = f" (the last: step {step.serial}, behind {step.after[at]} tokens)"
        prompt = self._prompt(request)
        known = self._states.setdefault((prompt, length), [])
        wrong = [self._differs(state, one) for one in known]
        if self._alone and all(wrong):
            known.append(state)
        elif not known:
            self.counts["unknown"] += 1
        elif all(wrong):
            layer, plane = min(wrong[-1])
            got, expected = (_wide(one[plane][layer]).flatten() for one in (state, known[-1]))
            worst = int((got - expected).abs().argmax())
            what = f"step {step.serial}, which reads tokens {step.before[at]} to {step.after[at]}, has a wrong state "
            what += f"of {length} tokens in its slot of `{vector}`: plane {plane!r}, layer {layer}, element {worst} is "
            what += f"{got[worst]:.9g}, alone {expected[worst]:.9g}. Is that rounding? Give rtol=. Otherwise look at "
            what += self._hint(vector, step.before[at], prompt, state, layer)
            self.wrong.append((request, EngineDiffers(what, prompt, vector, length, plane, layer, step.serial)))

    def _hint(self, vector: str, before: int, prompt: int, state: State, layer: int) -> str:
        """Returns where to look for the cause of a wrong state: the usual cause for this vector and layer."""
        had = (at for at, states in self._states.items() if not all(self._differs(state, one) for one in states))
        if whose := min(had, key=lambda at: at[0] != prompt, default=None):
            look = "`tokens=` of `end` and `publish`, `resume=`" if vector == "read" else "step.read, what the row got"
            return f"{look}: it is the state of prompt {whose[0]} after {whose[1]} tokens"
        if vector == "read":
            return "what wrote to this slot since: no step has left such a state there"
        if layer:
            return "what lies before this layer, the layers below are right: page table, positions, what KV pages hold"
        return f"step.read, its tokens, what the forward keeps for each row: the state of {before} tokens was right"

    def _filed(self, encode: Callable[[int, Any], Key], row: int, given: Any) -> Key:
        """Encodes the tokens under which states of a row are filed. Behind the prompt, they must be its answer."""
        key, table, cache = encode(row, given), self._mem._parts.table, self._mem._parts.cache
        request, lease = table.ids[row], cache.leases.get(row)
        # A keyed cache has keys of blocks, not tokens.
        if not (self._alone or cache.names.keyed) and type(request) is int and lease and lease.prompt.key:
            prompt, new = self._prompt(request), ids(key)[lease.prompt.tokens :].tolist()
            answer = [token for token, _ in self.answers[prompt]]
            if new and not any(answer[at : at + len(new)] == new[: len(answer) - at] for at in range(len(answer))):
                what = f"`tokens=` of `end` or `publish` has {new} behind its prompt, and its answer is {answer}"
                self.wrong.append((request, EngineDiffers(what, prompt, "tokens", lease.prompt.tokens + len(new))))
        return key

    def token(self, request: int, at: int, token: int, logits: Tensor) -> None:
        """Notes token number `at` of an answer, or compares it with the answer that the prompt had alone.

        Raises:
            EngineDiffers: a state of the request, the logits or the token differ.
        """
        self.counts["tokens"] += 1
        prompt, wrong = self._prompt(request), ""
        if self._alone:
            self.answers[prompt].append((token, torch.as_tensor(logits, device="cpu").clone()))
        elif at >= len(self.answers[prompt]):
            wrong = f"alone, the answer ends before token {at}. Look at what ends a row"
        elif not self._alike(torch.as_tensor(logits, device="cpu"), self.answers[prompt][at][1]):
            wrong = f"the logits of its generated token {at} are wrong, but all states before them are right"
            wrong += f"{self._last.get(request, '')}. Look at KV: page table, positions, what cached pages hold; and "
            wrong += "whether they are the logits of the row's last token"
        elif token != (wanted := self.answers[prompt][at][0]):
            wrong = f"token {at} is {token} instead of {wanted}, from the same logits. Look at the sampler and its seed"
            if self.rtol:
                self._require(request)  # raises if a state before this token differs
                self.parted.add(request)
        self._require(request, EngineDiffers(wrong, prompt, "answer", at) if wrong else None)

    def end(self, served: dict[int, int]) -> None:
        """Requires that no state differs, that no row is left, and that answers are complete.

        Args:
            served: tokens of requests that were not aborted.

        Raises:
            EngineDiffers: a state differs, or an answer is too short.
            LeakFound: a row is left.
        """
        self._require()
        for request, at in served.items():
            prompt = self._prompt(request)
            if at < (whole := len(self.answers[prompt])) and request not in self.parted:
                what = f"the answer ends after {at} tokens, alone after {whole}. Look at what ends a row"
                raise EngineDiffers(what, prompt, "answer", at)
        if leak := self.leak(lambda request: True):
            raise leak

    def leak(self, ended: Callable[[Any], bool]) -> LeakFound | None:
        """Returns an error if a row is left whose request has `ended`; None otherwise."""
        if left := [one for row in self._mem.rows if ended(one := self._mem._parts.table.ids[row.index])]:
            return LeakFound(f"rows of the requests {left} are left: end each row, also those of aborted requests")
        return None

    def _require(self, request: int | None = None, error: EngineDiffers | None = None) -> None:
        """Raises the first difference of a state of a request (None: of any request); else `error`, if there is one."""
        wrong = (first for one, first in self.wrong if request in (one, None) and one not in self.parted)
        if (first := next(wrong, error)) is not None and request not in self.parted:
            raise first

    def _prompt(self, request: int) -> int:
        """Returns the number of a request's prompt.

        Raises:
            InvalidArgument: no prompt has this number.
        """
        numbers = 1 if self._alone else 2 * len(self.answers)
        if not 0 <= request < numbers:
            raise InvalidArgument(
                f"request {request}: expected the number of one of {numbers} prompts, in Request(id) too"
            )
        return len(self.answers) - 1 if self._alone else request % len(self.answers)

    def _alike(self, got: Tensor, expected: Tensor) -> bool:
        """Returns whether all differences are at most `rtol` times the largest expected number that differs.

        So a mask of large numbers, such as -1e9, does not raise the allowed difference of the other numbers.
        """
        if got.shape != expected.shape or torch.equal(got, expected):
            return got.shape == expected.shape
        got, expected = _wide(got), _wide(expected)
        other = expected[got != expected].nan_to_num(0, 0, 0).abs()
        return torch.allclose(got, expected, rtol=0, atol=self.rtol * max(other.tolist(), default=0), equal_nan=True)

    def _differs(self, got: State, expected: State) -> list[tuple[int, str]]:
        """Returns (layer, plane) of each tensor of a state that differs."""
        places = ((layer, name) for name in got for layer in range(len(got[name])))
        return [(at, name) for at, name in places if not self._alike(got[name][at], expected[name][at])]


def _wide(tensor: Tensor) -> Tensor:
    """Returns a tensor as 64-bit floats, or as 128-bit complex numbers."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)

"""Compares an engine with itself: each prompt alone, then all prompts together, then all with few slots and pages."""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from memstate.checks import whole
from memstate.engine.manager import StateManager
from memstate.errors import InvalidArgument, OutOfPages, OutOfRows, OutOfSlots
from memstate.requests.handles import Request, Rows
from memstate.testing.chaos import Chaos, Faults
from memstate.testing.watch import EngineDiffers, Watch

ABORTS = 0.05  # probability that a request is aborted after a token
COLUMNS = ("requests", "aborted", "parted", "tokens", "states", "unknown", "hits", "faults")


class Comparison(dict[str, Counter[str]]):
    """The runs "alone", "together" and "scarce", each with these counts.

    requests  requests that were served
    aborted   requests that the run aborted
    parted    requests that chose another token, from logits equal within `rtol`; later tokens are not compared
    tokens    tokens whose logits were compared
    states    states that were compared
    unknown   states that were not compared, because the run "alone" has no state of that length
    hits      tokens that were not read, because requests started from a state
    faults    faults that were injected
    """

    def __str__(self) -> str:
        lines = [("", *COLUMNS), *((name, *(of[column] for column in COLUMNS)) for name, of in self.items())]
        return "\n".join(f"{name:8}" + "".join(f"{cell:>9}" for cell in cells) for name, *cells in lines)


def compare(make: Callable[..., Any], prompts: Sequence[Any], *, rtol: float = 0, seed: int = 0) -> Comparison:
    """Runs an engine on the same prompts in three ways. All states and all logits must equal those of the first run.

    * alone: a new engine for each prompt. No request finds a kept state, and `mem.chunk` returns 1.
    * together: each prompt twice, with one row for each prompt.
    * scarce: each prompt twice, in two rows, with few slots and pages, snapshots as often as possible, faults of
      `Chaos`, and aborts.

    After each run no request may be left, and no slot leaked. All states of the first run stay in host memory: take
    short prompts, and a model of few layers.

    An engine is an object with two attributes. `mem` is its manager. `serve(prompts)` serves prompts and yields, for
    each new token, the number of its prompt, the token, and the logits that it was chosen from. A prompt is anything
    that the engine serves: tokens, or the messages of a conversation. Each request of the engine has the number of its
    prompt as `Request(id)`. If `serve` is a generator, `abort = yield number, token, logits` says whether to abort the
    request.

    Args:
        make: makes an engine. Each run passes some of these keyword arguments: `debug`, `max_requests`, `slots`,
            `every` of the tracking, `pages` and `host_slots`. The function may ignore settings that its manager lacks.
        prompts: the prompts. Some should begin with the same tokens.
        rtol: largest allowed difference of two numbers in states or logits, as a fraction of the largest number of that
            tensor. Use 0 if a row gets the same bits in every batch and chunk.
        seed: start of the random numbers.

    Returns:
        The counts of each run.

    Raises:
        EngineDiffers: a state or an answer differs, or a state is kept under tokens that the answer does not have.
        InvalidArgument: the engine gave no state to compare.
        LeakFound: a row or a slot is left.
        Exception: an error of the engine, such as ForwardFault. A note of each error names the run.
    """
    whole("seed", seed, least=0)
    if not isinstance(rtol, int | float) or not 0 <= rtol < 1:
        raise InvalidArgument(f"rtol={rtol!r}: expected a number from 0 to below 1")
    watch, runs, pages, prompts = Watch(rtol), Comparison(alone=Counter()), 0, list(prompts)
    for prompt in prompts:
        engine = make(debug=True)
        watch.begin(engine.mem, alone=True)
        _find_nothing(engine.mem)
        runs["alone"] += _serve("alone", engine, [prompt], watch)
        pages = max(pages, watch.counts["pages"])
    if not prompts or not (runs["alone"]["states"] or engine.mem.forward.tail):
        raise InvalidArgument(f"{len(prompts)} prompts gave no state: `serve` yields, Request(id) is a prompt's number")
    parts, rows = engine.mem._parts, min(2, engine.mem._parts.table.rows)
    few = {"max_requests": rows, "slots": rows * (1 + parts.mirror.lanes_at_admission) + 1, "every": parts.pages.unit}
    few |= {"pages": pages * 3 // 2, "host_slots": 2}
    for name, settings in ("together", {"max_requests": min(len(prompts), parts.table.rows)}), ("scarce", few):
        engine, draw = make(debug=True, **settings), Random(seed) if settings is few else None
        if draw is not None:
            Faults(Chaos(seed=seed, claims=0.2, admissions=0.2, polls=0.2)).inject(engine.mem)
        watch.begin(engine.mem, alone=False)
        runs[name] = _serve(f"{name}, with {settings}", engine, [*prompts, *prompts], watch, draw)
    return runs


def _find_nothing(mem: StateManager) -> None:
    """Makes each request start from its first token and read its prompt token by token."""
    admission, admit, salts = mem._parts.admission, mem._parts.admission.admit, count()

    def admit_fresh(requests: Sequence[Request]) -> Rows:
        fresh = [replace(one, salt=next(salts), fetch=None) for one in requests]
        return admit(fresh if mem.prefix is None else [replace(one, session=None) for one in fresh])

    admission.admit = admit_fresh  # type: ignore[method-assign]
    mem._reports.chunk = lambda row, most: 1  # type: ignore[method-assign]


def _serve(name: str, engine: Any, prompts: Sequence[Any], watch: Watch, draw: Random | None = None) -> Counter[str]:
    """Serves prompts. Returns the counts of the run.

    Args:
        name: name of the run, for notes.
        engine: an engine as `make` returns it.
        prompts: the prompts to serve.
        watch: compares states and answers.
        draw: draws which requests are aborted. None: no request is aborted.
    """
    events, mem, abort = iter(engine.serve(prompts)), engine.mem, None
    served, aborted = Counter[int](), set[int]()
    try:
        with suppress(StopIteration):
            while True:
                number, token, logits = events.send(abort) if isinstance(events, Generator) else next(events)
                watch.token(number, served[number], int(token), logits)
                served[number] += 1
                if abort := draw is not None and isinstance(events, Generator) and draw.random() < ABORTS:
                    aborted.add(number)
        watch.end({number: served[number] for number in {*range(len(prompts))} - aborted})
        mem.device.check()
        mem.close()
    except Exception as error:
        first = error if isinstance(error, EngineDiffers) or not watch.wrong else watch.wrong[0][1]
        if isinstance(first, OutOfSlots | OutOfRows | OutOfPages):  # perhaps aborted requests still hold rows
            first = watch.leak(aborted.__contains__) or first
        first.add_note(f"compare: run {name}")
        raise first from error.__cause__ if first is error else error
    stats, counts = mem.stats(), watch.counts
    counts["faults"] = sum(vars(stats.chaos).values()) if stats.chaos else 0
    return counts + Counter(requests=len(prompts), aborted=len(aborted), parted=len(watch.parted))

"""Runs a demo: the same conversations cached and uncached, the comparison, the audits."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from memstate.engine.manager import StateManager
from memstate.requests.handles import Request
from memstate.slots.audit import AuditReport
from memstate.tiers import Store
from memstate_tools.demo import peek
from memstate_tools.demo.admission import DemoQueue
from memstate_tools.demo.answers import longest_context
from memstate_tools.demo.chance import Chance
from memstate_tools.demo.compare import compare
from memstate_tools.demo.config import DemoConfig
from memstate_tools.demo.corpus import ChatScript, first_requests, from_docstrings, from_file
from memstate_tools.demo.engines import DemoEngine
from memstate_tools.demo.guesses import Guesser
from memstate_tools.demo.meter import Meter
from memstate_tools.demo.report import DemoReport
from memstate_tools.demo.sabotage import Sabotage
from memstate_tools.demo.scheduler import Scheduler
from memstate_tools.demo.stepper import Stepper
from memstate_tools.demo.tiers import storage_of
from memstate_tools.demo.transcript import Witness
from memstate_tools.demo.uncached import Uncached
from memstate_tools.threads import one_thread

REQUESTS = 20
Progress = Callable[[int, int], None]


def run(config: DemoConfig, progress: Progress | None = None) -> DemoReport:
    """Runs the decode loop, then every conversation alone without a cache, and compares. Audits run during and after.

    Args:
        config: Settings of the run.
        progress: Called with (done, total) requests; the total counts both runs.

    Returns:
        The results.

    Raises:
        InvalidArgument: The settings cannot work.

    Syncs: yes.
    """
    with one_thread(), torch.inference_mode(), storage_of(config) as store:
        return _run(config, store, progress or (lambda done, total: None))


def _run(given: DemoConfig, store: Store | None, report: Progress) -> DemoReport:
    conversations = _conversations(given)
    requests = sum(len(conversation.turns) for conversation in conversations)
    longest = max(longest_context(conversation, given.page_size) for conversation in conversations)
    # every prefill step is padded to a whole chunk: a chunk is not longer than the longest text
    config = replace(given, chunk=min(given.chunk, longest))
    # rejected nodes of two steps, which need pages for a moment
    rejected = 2 * (len(config.tree) - 1 - config.tree.depth)
    pages_per_row = -(-(longest + rejected) // config.page_size)
    pages = config.pages if config.pages is not None else 2 * pages_per_row
    engine = DemoEngine(config, pages, pages_per_row, store)
    mem = engine.mem
    uncached = Uncached(engine.model, config.chunk, pages_per_row, config.page_size, config.seed)

    witness, meter = Witness(mem), Meter()
    sabotage = Sabotage(config.sabotage, mem, uncached.state_after) if config.sabotage else None
    admission = DemoQueue(config, mem, meter, witness, sabotage)
    audits: list[AuditReport] = []

    def request_done(done: int) -> None:
        report(done, 2 * requests)
        if done in (requests // 3, 2 * requests // 3):
            audits.append(mem.audit())  # requests run now, and the audit must still find nothing

    stepper = Stepper(
        engine.model, engine.memory, config.batch, config.chunk, engine.launch, engine.marks, config.tree, config.slack,
        mem.device.keep_path,
    )  # fmt: skip
    known = {c.number: uncached.answer(c) for c in conversations} if config.speculates else {}
    chance, guesser, started = Chance(config.seed, config.park), Guesser(config.seed, known), time.perf_counter()
    transcripts = Scheduler(
        config, engine, stepper, admission, chance, meter, witness, request_done, guesser
    ).run(conversations)  # fmt: skip
    witness.look_now()
    if config.inspect:
        mem.inspect().save(config.inspect)
    if mem.tiers is not None:
        mem.tiers.flush()
    stats = mem.stats()
    audits.append(mem.audit())
    admission.cache.clear()
    empty = mem.stats()  # neither requests nor cached states are left
    planted = _plant_leak(mem) if config.plant_leak else None
    last = mem.audit()
    if mem.tiers is not None:
        mem.tiers.close()
    between = time.perf_counter()
    comparison = compare(
        conversations, transcripts, witness.sightings, uncached, lambda done: report(requests + done, 2 * requests)
    )
    answers = [answer for _, transcript in sorted(transcripts.items()) for answer in transcript.answers]
    meter.generated_tokens = sum(map(len, answers))
    unclean = next((audit for audit in audits if not audit.clean), None)
    return DemoReport(
        config=given,
        backend=mem.backend.name,
        requests=requests,
        conversations=len(conversations),
        meter=meter,
        comparison=comparison,
        answers=answers,
        stats=stats,
        snapshots_unseen=witness.missed,
        snapshot_bytes_copied=stats.copied_bytes - _copied_by_hits(mem, meter),
        leaked=sorted({*last.leaked}),
        double_owned=sorted({*last.double_owned, *last.owned_but_free}),
        leaked_pages=empty.pages - empty.pages_free,
        leaked_rows=empty.rows_used,
        leak_named=last.lost,
        astray=[*last.foreign, *last.unexpected],
        audits_running_clean=unclean is None,
        audit_text=str(unclean or last),
        foreign_bytes=int(engine.arena.foreign().sum()) if engine.arena else 0,
        foreign_changed=engine.arena.changed() if engine.arena else [],
        strikes=sabotage.strikes if sabotage else 0,
        strikes_at_sessions=sabotage.strikes_at_sessions if sabotage else 0,
        planted=planted,
        timings={"cached": between - started, "uncached": time.perf_counter() - between},
    )


def _conversations(config: DemoConfig) -> list[ChatScript]:
    if config.input is None:
        return from_docstrings(config.requests or REQUESTS, config.seed)
    given = from_file(config.input)
    return first_requests(given, config.requests) if config.requests else given


def _copied_by_hits(mem: StateManager, meter: Meter) -> int:
    """Returns the bytes that were copied from cached states; 0 if the first step reads them directly."""
    return 0 if mem.forward.direct_hits else meter.read_cached * mem.planes.whole.slot_bytes


def _plant_leak(mem: StateManager) -> int:
    """Admits a request and empties its register. Returns the slot, which has no owner then. Syncs: yes."""
    (row,) = mem.admit([Request("planted leak")])
    mem.submit()
    return peek.empty_register(mem, peek.live_register(row))

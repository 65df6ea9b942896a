"""Runs the decode loop: continuous batching over one manager, with overlap, chunked prefill, aborts and retractions.

with overlap       plan(t+1) forward(t+1)   read results(t)   settle(t)   ends, publications   plan(t+2) ..
without            plan(t)   forward(t)     read results(t)   settle(t)   ends, publications   plan(t+1) ..

Sometimes requests are retracted, admitted and published between a plan and its forward, as a scheduler in its own
thread would do. The scheduler works with tokens, rows and counts, never with slots.
"""

from collections.abc import Callable, Sequence

from memstate.errors import OutOfPages, OutOfRecords
from memstate.requests.handles import Snapshot
from memstate.requests.steps import Step
from memstate_tools.demo import peek
from memstate_tools.demo.admission import DemoQueue
from memstate_tools.demo.answers import rule_for
from memstate_tools.demo.chance import Chance
from memstate_tools.demo.config import DemoConfig
from memstate_tools.demo.corpus import ChatScript
from memstate_tools.demo.engines import DemoEngine
from memstate_tools.demo.guesses import Guesser
from memstate_tools.demo.meter import DeviceCounts, Gauge, Meter
from memstate_tools.demo.stepper import Results, Stepper
from memstate_tools.demo.transcript import Transcript, Witness
from memstate_tools.demo.work import Flight, Going, NextStep, Work, assemble

ARRIVAL_GAP = 4.0  # steps between the first turns of conversations
REPLY_GAP = 6.0  # steps from an answer to the next turn


class Scheduler:
    """Runs all turns of all conversations through one manager.

    Args:
        config: Settings of the run.
        engine: The engine. Its manager has fewer rows than the batch, so that there is always padding.
        stepper: Runs the forward on the engine's memory.
        admission: Decides which request gets a row.
        chance: Decides which disturbances happen.
        meter: Counts what the run does.
        witness: Reads states back, for the comparison.
        progress: Called with the number of requests done.
        guesser: Guesses tokens, with `speculate`.
    """

    def __init__(
        self, config: DemoConfig, engine: DemoEngine, stepper: Stepper, admission: DemoQueue, chance: Chance,
        meter: Meter, witness: Witness, progress: Callable[[int], None], guesser: Guesser,
    ) -> None:  # fmt: skip
        self.config, self.engine, self.mem, self.stepper = config, engine, engine.mem, stepper
        self.admission, self.chance, self.gauge = admission, chance, Gauge(engine.mem.backend.counts)
        self.meter, self.witness, self.progress, self.guesser = meter, witness, progress, guesser
        self.running: list[Work] = []
        self.parked: list[Work] = []  # requests of which results are still to be read
        self.transcripts: dict[int, Transcript] = {}
        self._arrivals: list[tuple[int, Work]] = []
        self._clock = self._done = 0
        self._open: Step | None = None  # the step that is planned while its forward is not launched
        self._flight: Flight | None = None

    def run(self, conversations: Sequence[ChatScript]) -> dict[int, Transcript]:
        """Runs until every turn has ended.

        Returns:
            Conversation -> its transcript.

        Syncs: yes, for results.
        """
        at = 0
        for conversation in conversations:
            self.transcripts[conversation.number] = Transcript()
            self._arrive(at, conversation, 0, list(conversation.system))
            at += self.chance.gap(ARRIVAL_GAP)
        while self._arrivals or self.admission.waiting or self.running or self.parked:
            self._iterate()
        if self._flight:  # the last step, which was planned before the ends of its rows were known
            self._collect(self._flight)
            self._flight = None
        return self.transcripts

    def _arrive(self, at: int, conversation: ChatScript, turn: int, tokens: list[int]) -> None:
        tokens = tokens + list(conversation.turns[turn])
        rule = rule_for(self.config.seed, conversation.number, turn, len(tokens), self.config.page_size)
        self._arrivals.append((at, Work(conversation, turn, tokens, rule)))

    def _iterate(self) -> None:
        self._clock += 1
        self.admission.waiting += [work for at, work in self._arrivals if at <= self._clock]
        self._arrivals = [(at, work) for at, work in self._arrivals if at > self._clock]
        self._unpark()
        self._retract_at_random()
        self._admit()
        self._publish_due()
        flight = self._launch()
        if flight is None:
            self.mem.poll()
            if self.admission.waiting and not self.running:
                self.admission.nap()
        if self.config.overlap:
            flight, self._flight = self._flight, flight
        if flight:
            self._collect(flight)
        self.meter.look(self.mem, (work.handle for work in self.running))

    def _launch(self) -> Flight | None:
        """Plans and submits a step for every request that is not known to end."""
        going = self._with_pages()
        if not going:
            return None
        batch = assemble(self.config, going)
        asked, run = DeviceCounts(), list[Results]()
        whole = self.meter.steps % 2 == 1 and not self.config.sabotage  # every other step is one upload and one graph
        replay = (lambda: run.append(self.stepper.run(batch.inputs))) if whole else None
        with self.gauge.adding_to(asked):
            drafts = batch.drafts if self.config.speculates else 0
            step = self.mem.plan(batch.rows, batch.counts, replay=replay, drafts=drafts, defer=self.config.tail)
        # until the accepted guesses of the last step are known, rows of this step cannot be given up
        told = self._flight is None or not self._flight.step.drafted
        if not whole and told and self.chance.cancels():
            self._cancel(step, batch)
            return None
        self.witness.look()
        for entry in batch.entries:
            self.meter.prompt_chunks += entry.work.folded < entry.work.given
            self.meter.prompts_read += not entry.work.begun
            entry.work.folded = entry.after
        if not whole:
            self._meddle(step, told)
        results = run[0] if whole else self.stepper.run(batch.inputs, self.engine.slots(step))
        if self.config.sabotage or self.chance.tells():
            self.mem.submit(step)
        self.meter.look(self.mem, (work.handle for work in self.running))
        with self.gauge.adding_to(asked):
            self.mem.poll()
        self.meter.steps += 1
        self.meter.mixed_steps += not batch.decode_only
        return Flight(step, results, batch.entries, batch.decode_only, asked)

    def _admit(self) -> None:
        admitted = self.admission.admit(self.running)
        self.running += admitted
        self._break_off(admitted)

    def _meddle(self, step: Step, told: bool) -> None:
        """Makes calls between a plan and its forward: fewer unless `told`, which says that row lengths are known."""
        self._open = step
        calls: dict[str, Callable[[], object]] = {
            "retract": lambda: self._retract(self.chance.retracts_one(self.running), "between plan and forward"),
            "admit": self._admit,
            "publish": self._publish_due,
            "submit": self.mem.submit,
            "read_slots": lambda: self.mem.device.read_slots([work.handle for work in self.running]),
            "audit": lambda: self.mem.audit().raise_if_leaking(),
            "poll": self.mem.poll,
        }
        for call in self.chance.calls_between():
            if not told and call in ("retract", "admit", "publish"):
                continue
            self.meter.between[call] += 1
            # under sabotage, an admission reads slots, which would have to wait here
            if call != "admit" or not self.config.sabotage:
                act = calls[call]
                act()
        self._open = None

    def _with_pages(self) -> list[Going]:
        """Returns the next tokens of each request that goes on, after giving it KV pages for them.

        If pages run out, the cache gives up its pages first; then the youngest request is retracted.
        """
        while True:
            going = [self._next(work) for work in self.running if not (work.sure_to_end or work.leaves)]
            if not going:
                return []
            try:
                lengths = [one.work.folded + one.flying + one.tokens + one.drafts for one in going]
                self.mem.extend([one.work.handle for one in going], lengths)
                return going
            except OutOfPages:
                self.meter.refused["pages to go on"] += 1
                self._make_way()

    def _next(self, work: Work) -> Going:
        """Chooses the next tokens and guesses of a request, limited by its tail and by the end of its answer."""
        coming = work.folded >= len(work.tokens)  # whether a sampled token is not read yet
        n = self.mem.chunk(work.handle, min(max(1, len(work.tokens) - work.folded), self.config.chunk))
        if not self.config.speculates or work.folded + n < len(work.tokens):
            return Going(work, n, 0, [], 0)
        tree, before = self.config.tree, self._flight.entries if self._flight else []
        flying = sum(entry.drafts for entry in before if entry.current and entry.work is work)
        gained = tree.depths[flying]  # most tokens that the previous step can add
        depth = min(len(tree) - n, work.rule.limit - len(work.answer) - 1 - coming - gained)
        candidates = self.guesser.guess(work, work.folded + n, max(0, depth) + gained, tree)
        return Going(work, n, tree.fit(len(tree) - n, min(depth, len(candidates[0]) - gained)), candidates, flying)

    def _make_way(self) -> None:
        """Retracts the youngest request. If it ran alone, clears the cache too."""
        alone = len(self.running) == 1
        self._retract([self.running[-1]], "pages ran out", at_once=True)
        while alone and self.admission.give_way():
            pass

    def _collect(self, flight: Flight) -> None:
        """Reads the results of a step, settles it, and ends the requests that are done."""
        sampled, logits = flight.results.read()
        finished = [False] * self.config.batch
        accepted = flight.step.tokens_of.tolist()
        broken_off = []
        later = {entry.row: entry for entry in self._flight.entries} if self._flight else {}
        for entry in flight.entries:
            work, place, path = entry.work, entry.place, entry.path(self.config.tree, sampled[entry.place])
            right = len(path) - 1
            accepted[place] -= entry.drafts - right
            if not (entry.current and entry.samples) or not work.rule.cap:
                continue
            work.folded += right
            if entry.row in later:
                later[entry.row].shift = right
            for at, node in enumerate(path, entry.after + entry.shift):
                work.tokens.append(sampled[place][node])
                self.transcripts[work.conversation.number].logits[at] = logits[place, node].copy()
                finished[place] = work.rule.ends(len(work.answer), work.tokens[-1])
                stops = len(work.answer) == work.rule.abort_after
                if finished[place] or stops:
                    break
            self.meter.guessed += entry.drafts
            self.meter.right += right
            if stops and not finished[place]:
                broken_off.append(work)
        with self.gauge.adding_to(flight.asked):
            if flight.step.drafted:
                self.mem.accept(flight.step, accepted, finished=finished, written=True)
            else:
                self.mem.settle(flight.step, finished)
        if flight.decode_only:
            self.meter.decode.append(flight.asked)
        done = [entry.work for entry in flight.entries if entry.current and finished[entry.place]]
        if done:
            self._finish(done)
        for work in broken_off:
            self._abort(work)

    def _publish_due(self) -> None:
        """Publishes whole confirmed pages of running requests to the cache, with their snapshots."""
        page, due = self.config.page_size, []
        for work in self.running:
            confirmed = self.mem.info(work.handle).confirmed
            whole = confirmed // page * page
            if whole > work.published:
                due.append(work)
                # under Redirect a snapshot comes one step after the boundary, with guesses up to two, and never later
                if confirmed > whole + 2 * self.config.tails:
                    work.published = whole
        if due:
            self._watch(
                due, self.mem.publish([work.handle for work in due], keep="cache", tokens=[work.tokens for work in due])
            )

    def _watch(self, works: Sequence[Work], snapshots: Sequence[Snapshot | None]) -> None:
        for work, snapshot in zip(works, snapshots, strict=True):
            if snapshot:
                self.witness.watch(work.conversation.number, snapshot, "snapshot")

    def _retract_at_random(self) -> None:
        page, mem = self.config.page_size, self.mem
        unlucky = [
            work for work in self.running
            if self.chance.retracts(work.retractions, mem.info(work.handle).confirmed % page == 0) or work.leaves
        ]  # fmt: skip
        if unlucky:
            self._retract(unlucky, "at random")

    def _break_off(self, admitted: Sequence[Work]) -> None:
        """Aborts requests whose user gives up during the prompt, some of them before any step."""
        at_once = [work for work in admitted if work.rule.abort_prompt and self.chance.aborts_at_once()]
        for work in list(self.running):
            if work in at_once or (work.rule.abort_prompt and work.folded >= work.rule.abort_prompt):
                self._abort(work)

    def _finish(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.parked is not None:
                self._give_up(work, "finished while parked")
        works = [work for work in works if work.row is not None]
        for work in works:
            info = self.mem.info(work.handle)
            self.meter.dead_entries += info.length > info.confirmed
        self._keep(works, "finished")
        for work in works:
            self._end(work, "finished")

    def _give_up(self, work: Work, how: str) -> None:
        """Ends a parked request, of which the last results have been read."""
        self.mem.drop([work.parked])
        self.parked.remove(work)
        work.parked = work.parked_in = None
        self._end(work, how)

    def _abort(self, work: Work) -> None:
        if work.parked is not None:
            self._give_up(work, "aborted while parked")
            return
        self._see(work, "aborted")
        self.mem.end([work.handle])
        self._end(work, "aborted")

    def _retract(self, works: Sequence[Work], why: str, at_once: bool = False) -> None:
        """Parks requests, and sends back those that may not be parked. Unless `at_once`, unread guesses come first."""
        works = [work for work in works if not self._park(work, why, at_once)]
        self._keep(works, "retracted")
        for work in works:
            self._send_back(work, f"retracted, {why}")

    def _park(self, work: Work, why: str, at_once: bool) -> bool:
        """Parks a request, and returns whether it may be parked. Turns may not.

        A row with unread guesses may not be parked at once: it is left out of the next plans, until they are read.
        """
        steps = [step for step in (self._flight.step if self._flight else None, self._open) if step is not None]
        if not self.config.park or self.admission.session_of(work):
            return False
        if any(step.drafted and work.handle.index in step.numbers for step in steps):
            work.leaves = not at_once
            return work.leaves
        self._see(work, "parked")
        try:
            (work.parked,) = self.mem.park([work.handle], [work.tokens], user=[work.name.encode()])
        except OutOfRecords:
            self.meter.refused["records"] += 1
            return False
        self.meter.parked += 1
        self.meter.parked_inside_a_page += work.parked.length % self.config.page_size > 0
        self.meter.parked_behind_the_fence += peek.waits(self.mem)
        work.retractions += 1
        work.parked_in = work.row
        self._leave(work, f"parked, {why}")
        self.parked.append(work)
        return True

    def _unpark(self) -> None:
        """Lets parked requests wait for a row, once all results of their old rows are read."""
        flying = [entry.row for entry in self._flight.entries] if self._flight else []
        for work in [work for work in self.parked if work.parked_in not in flying]:
            self.parked.remove(work)
            work.parked_in = None
            self.admission.waiting.insert(0, work)

    def _keep(self, works: Sequence[Work], why: str) -> None:
        """Ends rows, and keeps their states in the cache."""
        for work in works:
            self._see(work, why)
        rows, tokens = [work.handle for work in works], [work.tokens for work in works]
        lengths = [len(work.tokens) for work in works]  # the device may have computed tokens after the end
        self._watch(works, self.mem.end(rows, keep="cache", tokens=tokens, lengths=lengths))

    def _cancel(self, step: Step, batch: NextStep) -> None:
        """Cancels a step. Its rows end, and their requests start again from the states that were kept."""
        tokens: list[list[int] | None] = [None] * self.config.batch
        for entry in batch.entries:
            tokens[entry.place] = entry.work.tokens
        snapshots = self.mem.cancel(step, keep="cache", tokens=tokens)
        self._watch([entry.work for entry in batch.entries], [snapshots[entry.place] for entry in batch.entries])
        for entry in batch.entries:
            self._send_back(entry.work, "cancelled")

    def _see(self, work: Work, why: str) -> None:
        if work.begun and self._open is None:  # if the step's forward is not launched yet, the state is not written yet
            self.witness.see_live(work.conversation.number, work.handle, why, len(work.tokens))

    def _send_back(self, work: Work, why: str) -> None:
        work.retractions += 1
        self._leave(work, why)
        self.admission.waiting.insert(0, work)

    def _end(self, work: Work, how: str) -> None:
        """Notes the answer, and lets the next turn arrive."""
        conversation, turn = work.conversation, work.turn + 1
        transcript = self.transcripts[conversation.number]
        transcript.answers.append(work.answer)
        transcript.tokens = work.tokens
        self._leave(work, how)
        if turn < len(conversation.turns):
            self._arrive(self._clock + self.chance.gap(REPLY_GAP), conversation, turn, work.tokens)
        else:
            self.admission.close_session(work)
        self._done += 1
        self.progress(self._done)

    def _leave(self, work: Work, how: str) -> None:
        self.meter.ended[how] += 1
        if self.admission.session_of(work):
            self._note_turn(work, how)
        work.stop()
        if work in self.running:
            self.running.remove(work)

    def _note_turn(self, work: Work, how: str) -> None:
        """Counts the end of a session's turn, and watches the states that the session keeps."""
        aborted = "turn" if work.begun else "turn before any step"
        which = "first" if work.turn == 0 else "later"
        self.meter.session_turns[f"{how}, {which} {aborted}" if how == "aborted" else how] += 1
        for snapshot in self.admission.kept(work):
            self.witness.watch(work.conversation.number, snapshot, "state of a session")

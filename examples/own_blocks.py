"""A small engine that finds its own KV blocks by hashes, and states by the same hashes. See docs/own_blocks.md."""

from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from hashlib import blake2b
from itertools import takewhile

import torch

import memstate as ms

BLOCK, WORDS, CHUNK = 4, 50, 12  # tokens in: a KV block, the vocabulary, a chunk
STATE = ms.StateLayout((ms.Plane("ssm", (8,), torch.float32),), layers=2)
EMBED = torch.randn(WORDS, 8, generator=torch.Generator().manual_seed(0))


class Blocks:
    """The KV blocks of all requests. A free block keeps its KV and its key until it is taken for other tokens."""

    def __init__(self, count: int, mem: ms.StateManager) -> None:
        self.keys, self.users = list[bytes | None]([None] * count), [0] * count
        self.free = OrderedDict.fromkeys(range(count))  # the first is taken next
        self.by_key, self.mem = dict[bytes, int](), mem

    def held(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the keys before the first key that has no block."""
        return [self.by_key[key] for key in takewhile(self.by_key.__contains__, keys)]

    def share(self, blocks: Sequence[int]) -> None:
        """Gives blocks one more user."""
        for block in blocks:
            self.free.pop(block, None)
            self.users[block] += 1

    def take(self) -> int:
        """Returns a block for new tokens. Its old KV is gone."""
        block, _ = self.free.popitem(last=False)
        self.users[block], key = 1, self.keys[block]
        if key is not None and self.by_key.get(key) == block:
            del self.by_key[key]
            self.mem.forget([key])  # the state that needs this KV has no use now, so it is the first to be evicted
        self.keys[block] = None
        return block

    def fill(self, block: int, key: bytes) -> int:
        """Notes that a block is full. Returns the block that its row reads now: an older one with this KV, if any."""
        kept = self.by_key.setdefault(key, block)
        if kept == block:
            self.keys[block] = key
        else:  # the hit ended at its state, before this block; so the KV of this block was computed again
            self.share([kept])
            self.give([block], useful=0)
        return kept

    def give(self, blocks: Sequence[int], useful: int) -> None:
        """Takes one user from each block. Only the first `useful` blocks are of use: a state follows them."""
        for at in reversed(range(len(blocks))):
            self.users[blocks[at]] -= 1
            if not self.users[blocks[at]]:
                self.free[blocks[at]] = None
                self.free.move_to_end(blocks[at], last=at < useful)


class Writing:
    """A request: all tokens so far, the number of tokens at its end, and the keys of its whole blocks."""

    row: ms.Row  # while it runs

    def __init__(self, number: int, prompt: Sequence[int], new: int) -> None:
        self.number, self.tokens, self.goal = number, list(prompt), len(prompt) + new
        self.keys, self.table = list[bytes](), list[int]()
        self.hash()

    def hash(self) -> None:
        """Hashes the blocks that are whole. A key stands for all tokens up to the end of its block."""
        while len(self.keys) < len(self.tokens) // BLOCK:
            at = len(self.keys) * BLOCK
            before = self.keys[-1] if self.keys else b""
            self.keys.append(blake2b(before + bytes(self.tokens[at : at + BLOCK]), digest_size=16).digest())


class Engine:
    """Serves requests. If blocks run out, the newest request goes back to the queue."""

    def __init__(self, slots=24, max_requests=6, blocks=40, every=BLOCK, debug=False) -> None:
        self.kv = torch.full((blocks, BLOCK, 8), torch.nan)
        self.mem = ms.StateManager(
            STATE, slots=slots, max_requests=max_requests, tracking=ms.Redirect(every=every), debug=debug,
            pages=ms.Pages(size=BLOCK), prefix=ms.Prefix(keyed=True), forward=ms.Forward(grid=1),
        )  # fmt: skip
        self.blocks, self.waiting, self.running = Blocks(blocks, self.mem), deque[Writing](), list[Writing]()
        self.hits = 0

    def forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> torch.Tensor:
        """Reads the tokens `fed` to each row. Returns the logits after the last token of each row."""
        states, after = self.mem.planes["ssm"], {}
        for entry, tokens in enumerate(fed):
            table, state = self.running[entry].table, states[:, step.read[entry]].clone()
            for offset, token in enumerate(tokens, 1):
                at = int(step.before[entry]) + offset - 1
                self.kv[table[at // BLOCK], at % BLOCK] = EMBED[token]
                seen = self.kv[table].flatten(0, 1)[: at + 1]
                state[0] = 0.9 * state[0] + EMBED[token]  # a recurrent layer; next, attention and a second one
                state[1] = 0.9 * state[1] + torch.softmax(seen @ state[0], 0) @ seen
                after[entry, offset] = state.clone()
            states[:, step.write[entry]] = state
        for mark in range(step.marked):  # states inside the chunks
            states[:, step.marks.slot[mark]] = after[int(step.marks.entry[mark]), int(step.marks.offset[mark])]
        return torch.stack([EMBED @ after[entry, len(tokens)][1] for entry, tokens in enumerate(fed)])

    def admit(self) -> None:
        """Starts requests as long as there is room."""
        while self.waiting:
            job = self.waiting[0]
            held = self.blocks.held(job.keys)
            length, reach = len(job.tokens), len(held) * BLOCK
            start = self.mem.match(keys=job.keys, length=length, reach=reach).length // BLOCK
            shared = sum(block in self.blocks.free for block in held[:start])
            if len(self.blocks.free) - shared < length // BLOCK + 1 - start:
                return
            try:
                (job.row,) = self.mem.admit([ms.Request(job.number, keys=job.keys, length=length, reach=reach)])
            except (ms.OutOfSlots, ms.OutOfRows):
                return
            self.blocks.share(held[:start])
            job.table = held[:start] + [self.blocks.take() for _ in range(length // BLOCK + 1 - start)]
            self.hits += start * BLOCK
            self.running.append(self.waiting.popleft())

    def end(self, job: Writing) -> None:
        """Ends a request: first its row, then its blocks."""
        keys = job.keys[: self.mem.info(job.row).length // BLOCK]
        self.mem.end([job.row], keep="cache", keys=[keys])
        state = self.mem.match(keys=keys, length=len(keys) * BLOCK + 1).length
        self.leave(job, state)

    def leave(self, job: Writing, state: int = 0) -> None:
        """Gives the blocks of a request back. Its longest cached state has `state` tokens."""
        self.blocks.give(job.table, state // BLOCK)
        job.table = []
        self.running.remove(job)

    def grow(self) -> None:
        """Gives each running request the block of its next token. If none is free, the newest requests end and wait."""
        for job in [*self.running]:
            while job in self.running and len(job.table) <= len(job.tokens) // BLOCK:
                if self.blocks.free:
                    job.table.append(self.blocks.take())
                else:
                    self.waiting.appendleft(newest := self.running[-1])
                    self.end(newest)

    def abort(self, number: int) -> None:
        """Ends a request that waits or runs, also in the middle of its prompt."""
        for job in [job for job in self.running if job.number == number]:
            self.end(job)
        self.waiting = deque(job for job in self.waiting if job.number != number)

    def serve(self, jobs: Sequence[Writing]) -> Generator[tuple[int, int, torch.Tensor], bool, None]:
        """Yields (number of the job, token, logits) for each new token. Send True to abort the request."""
        mem = self.mem
        self.waiting.extend(jobs)
        try:
            while self.waiting or self.running:
                self.grow()
                self.admit()
                rows = [job.row for job in self.running]
                if not rows:
                    raise MemoryError(f"{len(self.waiting)} requests wait, and none of them fits")
                starts = [mem.info(row).length for row in rows]
                goals = [at + mem.chunk(row, CHUNK) for at, row in zip(starts, rows, strict=True)]
                fed = [job.tokens[at:to] for job, at, to in zip(self.running, starts, goals, strict=True)]
                step = mem.plan(rows, [len(tokens) for tokens in fed])
                try:
                    logits = self.forward(step, fed)
                except BaseException:
                    mem.end(rows)  # nobody knows which states the failed forward has stored
                    mem.settle(step)
                    for job in [*self.running]:
                        self.leave(job)
                    raise
                mem.settle(step)
                ends = step.after.tolist()
                for job, at, end in zip(self.running, starts, ends, strict=True):
                    for n in range(at // BLOCK, end // BLOCK):
                        job.table[n] = self.blocks.fill(job.table[n], job.keys[n])
                filled = [job.keys[: end // BLOCK] for job, end in zip(self.running, ends, strict=True)]
                mem.publish(rows, keep="cache", keys=filled)
                for job, end, scores in zip([*self.running], ends, logits, strict=True):
                    if end < len(job.tokens) or job not in self.running:
                        continue  # its prompt goes on, or it was aborted
                    job.tokens.append(int(scores.argmax()))
                    job.hash()
                    abort = yield job.number, job.tokens[-1], scores
                    if job in self.running and (abort or len(job.tokens) == job.goal):
                        self.end(job)
        finally:
            for job in [*self.running]:  # also if the caller stops early, or an error comes
                self.end(job)

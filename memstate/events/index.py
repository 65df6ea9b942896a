"""Answers which worker can resume a prompt, and how far, from the events of all workers. Knows no socket.

    (hash of the block before, tokens of the block) ─▶ hash of the block ─▶ groups that have the block    per worker

An index computes no hashes, because events name the tokens of each block and the block before. So it also takes events
of vLLM and SGLang, whose hashes differ. A block counts as long as any medium has it, such as device or host memory.
"""

from collections.abc import Hashable
from typing import NamedTuple

from memstate.events.wire import RECURRENT, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Hash, salt_tag
from memstate.tokens import BYTES as TOKEN
from memstate.tokens import Key, Tokens, encode

Above = Hash | tuple[str | None]  # hash of the block before, or for a prompt's first block (tag of its salt,)


class Resumable(NamedTuple):
    """How far one worker can resume a prompt.

    Attributes:
        worker: The name of the worker.
        length: Tokens that the worker need not compute.
        kv: Tokens whose KV the worker has.
    """

    worker: str
    length: int
    kv: int


class WorkerBlocks:
    """The blocks of one worker."""

    def __init__(self) -> None:
        self.size = 0
        self._recurrent: set[int] = set()  # groups that need only the last block of a prefix, such as states
        self._reading: set[int] = set()  # groups that need all blocks of a prefix, such as KV
        self._next: dict[tuple[Above, Key], Hash] = {}
        self._step: dict[Hash, tuple[Above, Key]] = {}
        self._groups: dict[Hash, dict[int, set[str | None]]] = {}  # for each block and group, the media that have it

    def __len__(self) -> int:
        return len(self._groups)

    def clear(self) -> None:
        """Forgets all blocks."""
        self._next, self._step, self._groups = {}, {}, {}

    def stored(self, event: BlockStored) -> None:
        """Adds the blocks of an event."""
        group, count = event.group_idx or 0, len(event.block_hashes)
        (self._recurrent if event.kv_cache_spec_kind in RECURRENT else self._reading).add(group)
        self.size = self.size or event.block_size
        for block in event.block_hashes:
            self._groups.setdefault(block, {}).setdefault(group, set()).add(event.medium)
        if event.block_size != self.size or len(event.token_ids) != count * self.size:
            return  # the event lacks tokens of some blocks: the event of another group has them
        key, unit = encode(event.token_ids), self.size * TOKEN
        above: Above = event.parent_block_hash if event.parent_block_hash is not None else (_tag(event),)
        for at, block in enumerate(event.block_hashes):
            step = above, key[at * unit : (at + 1) * unit]
            if self._step.get(block, step) != step:  # the worker named other tokens for this hash before
                self._unlink(block)
            self._next[step], self._step[block], above = block, step, block

    def removed(self, event: BlockRemoved) -> None:
        """Removes the blocks of an event."""
        for block in event.block_hashes:
            groups = self._groups.get(block, {})
            for group in [event.group_idx] if event.group_idx is not None else list(groups):
                places = groups.get(group, set())
                places -= {event.medium} if event.medium is not None else set(places)
                if not places:
                    groups.pop(group, None)
            if block in self._groups and not groups:
                del self._groups[block]
                self._unlink(block)

    def _unlink(self, block: Hash) -> None:
        step = self._step.pop(block, None)
        if step is not None and self._next.get(step) == block:
            del self._next[step]

    def reach(self, key: Key, tag: str | None, most: int) -> tuple[int, int]:
        """Returns how many tokens of a prompt can be resumed, and how many have KV.

        Args:
            key: The prompt's tokens, encoded.
            tag: The tag of its salt.
            most: Limit of the tokens to look at.
        """
        above: Above = (tag,)
        length = kv = 0
        for end in range(self.size, most + 1, self.size) if self.size else ():
            block = self._next.get((above, key[(end - self.size) * TOKEN : end * TOKEN]))
            if block is None or not self._groups[block].keys() >= self._reading:
                break
            above, kv = block, end
            if self._groups[block].keys() >= self._recurrent:
                length = end
        return length, kv


def _tag(event: BlockStored) -> str | None:
    """Returns the tag of the salt in an event of memstate, vLLM or SGLang whose first block begins a prompt."""
    first = event.extra_keys[0] if event.extra_keys else None
    return "\0".join(map(str, first)) if first else event.cache_salt


class Index:
    """Answers which worker can resume a prompt, from the events of all workers.

    Example:
        >>> from memstate.events import BlockStored, EventBatch
        >>> index = Index()
        >>> index.apply("a", EventBatch(0.0, [BlockStored([1, 2], None, [5, 6, 7, 8], block_size=2)]))
        >>> index.find([5, 6, 7, 8, 9])
        [Resumable(worker='a', length=4, kv=4)]
    """

    def __init__(self) -> None:
        self._workers: dict[str, WorkerBlocks] = {}

    def __repr__(self) -> str:
        return f"Index({len(self._workers)} workers, {sum(map(len, self._workers.values()))} blocks)"

    @property
    def workers(self) -> tuple[str, ...]:
        """The workers whose events have been applied."""
        return tuple(self._workers)

    def apply(self, worker: str, batch: EventBatch) -> None:
        """Applies a batch of events.

        Args:
            worker: The worker that sent the batch.
            batch: The events. The batches of a worker must be applied in the order in which it sent them.
        """
        blocks = self._workers.setdefault(worker, WorkerBlocks())
        for event in batch.events:
            match event:
                case BlockStored():
                    blocks.stored(event)
                case BlockRemoved():
                    blocks.removed(event)
                case AllBlocksCleared():
                    blocks.clear()

    def forget(self, worker: str) -> None:
        """Forgets the blocks of a worker that has ended, or some of whose events were lost."""
        self._workers.pop(worker, None)

    def find(self, tokens: Tokens, salt: Hashable = None, *, tag: str | None = None) -> list[Resumable]:
        """Returns how far each worker can resume a prompt, the furthest first.

        The last token of a prompt never counts, because a request always computes it.

        Args:
            tokens: The whole prompt.
            salt: The salt of the request.
            tag: The tag of the salt in the events of another engine, instead of `salt`. For vLLM: the text of
                `cache_salt`.

        Returns:
            The workers that have KV of the prompt.

        Raises:
            InvalidArgument: `tokens` are not valid tokens, or `salt` is not a valid salt.
        """
        key = encode(tokens)
        tag, most = tag or salt_tag(salt), max(0, len(key) // TOKEN - 1)
        reached = [Resumable(worker, *blocks.reach(key, tag, most)) for worker, blocks in self._workers.items()]
        return sorted((each for each in reached if each.kv), key=lambda each: (-each.length, -each.kv, each.worker))

"""A small engine: batches, chunks, KV pages, a prefix cache, sessions, host memory, aborts. See docs/integrate.md."""

from collections import deque
from collections.abc import Generator, Sequence

import torch

import memstate as ms

PAGE, WORDS, ANSWER, CHUNK = 4, 50, 6, 12  # tokens of: a KV page, the vocabulary, an answer, a chunk
STATE = ms.StateLayout((ms.Plane("ssm", (8,), torch.float32),), layers=2)
KV = ms.StateLayout((ms.Plane("kv", (PAGE, 8), torch.float32),), layers=1)
EMBED = torch.randn(WORDS, 8, generator=torch.Generator().manual_seed(0))


class Chat:
    """A conversation: next messages, all tokens so far, and the number of tokens after the next answer."""

    row: ms.Row  # set while a turn runs

    def __init__(self, number: int, messages: Sequence[list[int]], session: ms.Session) -> None:
        self.number, self.messages, self.session = number, deque(messages), session
        self.tokens, self.goal = list[int](), 0
        self.ask()

    def ask(self) -> None:
        """Adds the next message."""
        self.tokens += self.messages.popleft()
        self.goal = len(self.tokens) + ANSWER


class Engine:
    """Serves conversations."""

    def __init__(self, slots=64, max_requests=8, pages=512, every=16, host_slots=64, debug=False) -> None:
        self.kv = ms.Planes(KV, pages, ms.Backend("auto"))  # all KV pages: pages are laid out like slots
        self.mem = ms.StateManager(
            STATE, slots=slots, max_requests=max_requests, tracking=ms.Redirect(every=every), prefix=ms.Prefix(),
            pages=ms.Pages(count=pages, size=PAGE, per_row=64), forward=ms.Forward(grid=1), debug=debug,
            tiers=ms.Tiers("toy", host_slots=host_slots, kv=self.kv),
        )  # fmt: skip

    def forward(self, step: ms.Step, fed: list[list[int]]) -> torch.Tensor:
        """Reads the tokens `fed` to each row. Returns the logits after the last token of each row."""
        states, kv, after = self.mem.planes["ssm"], self.kv["kv"][0], {}
        for entry, tokens in enumerate(fed):
            pages, state = self.mem.device.page_table[step.rows[entry]], states[:, step.read[entry]].clone()
            for offset, token in enumerate(tokens, 1):
                at = int(step.before[entry]) + offset - 1
                kv[pages[at // PAGE], at % PAGE] = EMBED[token]
                seen = kv[pages].flatten(0, 1)[: at + 1]
                state[0] = 0.9 * state[0] + EMBED[token]  # a recurrent layer; then attention and a second one
                state[1] = 0.9 * state[1] + torch.softmax(seen @ state[0], 0) @ seen
                after[entry, offset] = state.clone()
            states[:, step.write[entry]] = state
        for mark in range(step.marked):  # states at marks inside chunks, for the prefix cache
            states[:, step.marks.slot[mark]] = after[int(step.marks.entry[mark]), int(step.marks.offset[mark])]
        return torch.stack([EMBED @ after[entry, len(tokens)][1] for entry, tokens in enumerate(fed)])

    def admit(self, waiting: deque[Chat], running: list[Chat]) -> None:
        """Starts waiting turns until no slot, row or page is free."""
        while waiting:
            chat = waiting[0]
            request = ms.Request(chat.number, tokens=chat.tokens, length=chat.goal, session=chat.session)
            try:
                (chat.row,) = self.mem.admit([request])
            except (ms.OutOfSlots, ms.OutOfRows, ms.OutOfPages):
                if running:
                    return  # the other turns wait until one ends
                raise
            running.append(waiting.popleft())

    def serve(self, chats: Sequence[list[list[int]]]) -> Generator[tuple[int, int, torch.Tensor], bool, None]:
        """Yields (conversation, token, logits) for each new token. Send True to abort the conversation."""
        mem, running = self.mem, list[Chat]()
        waiting = deque(Chat(number, chat, mem.sessions.open(number)) for number, chat in enumerate(chats))
        try:
            while waiting or running:
                mem.poll()
                self.admit(waiting, running)
                rows, lengths = [chat.row for chat in running], [mem.info(chat.row).length for chat in running]
                ends = [length + mem.chunk(row, CHUNK) for row, length in zip(rows, lengths, strict=True)]
                fed = [chat.tokens[at:end] for chat, at, end in zip(running, lengths, ends, strict=True)]
                step = mem.plan(rows, [len(tokens) for tokens in fed])
                logits = self.forward(step, fed)
                mem.settle(step)
                mem.publish(rows, keep="cache", tokens=[chat.tokens for chat in running])
                for chat, length, scores in zip([*running], step.after, logits, strict=True):
                    if length < len(chat.tokens):
                        continue  # the prompt has more chunks
                    chat.tokens.append(int(scores.argmax()))
                    abort = yield chat.number, chat.tokens[-1], scores
                    if abort or len(chat.tokens) == chat.goal:
                        running.remove(chat)
                        mem.end([chat.row], keep="cache", tokens=[chat.tokens])
                        if chat.messages and not abort:
                            chat.ask()
                            waiting.append(chat)
                        else:
                            mem.sessions.close(chat.session)
        finally:
            mem.end([chat.row for chat in running])  # also after an error, or if the caller stops early

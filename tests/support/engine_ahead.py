"""Defines an engine without KV that plans each step before it knows the tokens of the last one."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch

import memstate as ms

LAYOUT = ms.StateLayout((ms.Plane("ssm", (4,), torch.float64),), layers=2)
WORDS, ANSWER = 50, 2


class Engine:
    """Serves prompts. Finds snapshots in an index of its own."""

    def __init__(
        self, *, slots: int = 40, max_requests: int = 8, every: int = 4, debug: bool = False, **_: int
    ) -> None:
        tracking = ms.Redirect(every=every)
        self.mem = ms.StateManager(
            LAYOUT, slots=slots, max_requests=max_requests, tracking=tracking, debug=debug, backend="reference"
        )
        self.index: dict[tuple[int, ...], ms.Snapshot] = {}  # tokens -> snapshot of their state

    def forward(self, step: ms.Step, fed: Sequence[Sequence[int]]) -> torch.Tensor:
        """Folds tokens into states, and returns logits."""
        states = self.mem.planes["ssm"]
        state = states[:, step.read.long()].clone()
        for at in range(max(map(len, fed))):
            more = torch.tensor([at < len(tokens) for tokens in fed])
            token = torch.tensor([tokens[at] if at < len(tokens) else 0 for tokens in fed], dtype=torch.float64)
            state = torch.where(more[:, None], 0.5 * state + token[:, None] + torch.arange(4), state)
        states[:, step.write.long()] = state
        return -((torch.arange(WORDS) - 7 * state[1, :, :1]) % WORDS)

    def admit(self, waiting: deque[tuple[int, Sequence[int]]], running: dict[int, ms.Row]) -> dict[int, int]:
        """Admits the requests that fit. Returns request -> number of tokens of the state that it starts from."""
        read = {}
        while waiting:
            number, prompt = waiting[0]
            known = [
                tokens for tokens in self.index if tokens == tuple(prompt[: len(tokens)]) and len(tokens) < len(prompt)
            ]
            best = max(known, key=len, default=())
            try:
                (running[number],) = self.mem.admit([ms.Request(number, resume=self.index.get(best))])
            except (ms.OutOfSlots, ms.OutOfRows):
                if running:
                    break
                self.mem.drop([self.index.pop(next(iter(self.index)))])
                continue
            read[number] = len(best)
            waiting.popleft()
        return read

    def serve(self, prompts: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yields (number of a prompt, next token of its answer, logits of the token)."""
        mem, running, read, flying = self.mem, dict[int, ms.Row](), dict[int, int](), None
        waiting, texts, left = deque(enumerate(prompts)), [list(prompt) for prompt in prompts], [ANSWER] * len(prompts)
        while waiting or running or flying:
            read |= self.admit(waiting, running)
            last, flying = flying, None
            if running:
                numbers = list(running)
                ends = [min(read[number] + 3, mem.info(row).next_boundary) for number, row in running.items()]
                fed = [texts[number][read[number] : end] for number, end in zip(numbers, ends, strict=True)]
                step = mem.plan([running[number] for number in numbers], [len(tokens) for tokens in fed])
                flying = step, numbers, dict[int, torch.Tensor]()
                for number, tokens, scores in zip(numbers, fed, self.forward(step, fed), strict=True):
                    read[number] += len(tokens)
                    if read[number] == len(texts[number]):
                        flying[2][number] = scores
                        texts[number].append(int(scores.argmax()))
            if last is None:
                continue
            step, numbers, answered = last
            answered = {number: scores for number, scores in answered.items() if number in running}
            for number, scores in answered.items():
                left[number] -= 1
                yield number, texts[number][len(prompts[number]) + ANSWER - left[number] - 1], scores
            ends = [number for number in answered if not left[number]]
            mem.settle(step, [number in ends for number in numbers])
            most = [len(prompts[number]) - 1 for number in ends]  # an equal prompt can start from this state
            kept = mem.end([running.pop(number) for number in ends], keep="handle", lengths=most)
            for number, state in zip(ends, kept, strict=True):
                if state is not None:
                    tokens = tuple(texts[number][: state.length])
                    mem.drop([self.index.get(tokens)])
                    self.index[tokens] = state

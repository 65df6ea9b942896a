"""Runs every conversation alone: one slot updated in place, its own pages, no cache, no manager.

The prompt of the last turn contains all turns before it. So one pass over a conversation computes every position once,
from an empty state, with the model object and the answer rules of the cached loop. The batch is one row;
`memstate_tools.demo.arithmetic` makes results independent of the batch.
"""

from collections.abc import Iterable, Sequence

import torch

from memstate.state.planes import Planes
from memstate_tools.demo.answers import noise, rule_for
from memstate_tools.demo.corpus import ChatScript
from memstate_tools.demo.engines import memory_of
from memstate_tools.demo.mixers import state_layout
from memstate_tools.demo.model import HybridModel, StepPlaces
from memstate_tools.demo.peek import state_bytes
from memstate_tools.demo.stepper import Inputs, Logits, Stepper
from memstate_tools.demo.transcript import Transcript


class Uncached:
    """A batch of one row and a pool of one slot, in their own memory.

    Args:
        model: The model of the cached loop.
        chunk: Tokens of a prefill step, as in the cached loop.
        pages: KV pages of a row, enough for the longest conversation.
        page_size: Tokens of a page, as in the cached loop.
        seed: Seed of the noise, as in the cached loop.
    """

    def __init__(self, model: HybridModel, chunk: int, pages: int, page_size: int, seed: int) -> None:
        device = model.backend.device
        self.chunk, self.page_size, self.seed = chunk, page_size, seed
        self.state = Planes(state_layout(model.size, model.mixer, state_order=model.state_order), 1, model.backend)
        kv = Planes(model.size.page_layout(page_size), pages, model.backend)
        table = torch.zeros(2, pages, dtype=torch.int32, device=device)
        table[1] = torch.arange(1, pages + 1, device=device)
        self.stepper = Stepper(model, memory_of(self.state, kv, table), 1, chunk)
        one = torch.ones(1, dtype=torch.int32, device=device)
        self._slots = StepPlaces(one, one.clone(), one.clone(), one.clone(), torch.zeros_like(one))
        self.start_over()

    def start_over(self) -> None:
        """Empties the state. The next step reads the null slot, and the slot itself holds NaN."""
        for plane in self.state.values():
            plane.fill_(float("nan"))
        self._slots.read[0] = 0
        self.folded = 0

    def fold(self, tokens: Sequence[int], conversation: int) -> tuple[int, Logits]:
        """Folds one chunk into the state, and samples the next token.

        Returns:
            The token and its logits.

        Syncs: yes.
        """
        width = self.chunk if len(tokens) > 1 else 1
        inputs = Inputs(1, width)
        inputs.tokens[0, 0, : len(tokens)] = tokens
        inputs.start[0] = self.folded
        self.folded += len(tokens)
        inputs.noise[0, 0] = noise(self.seed, conversation, self.folded)
        self._slots.tokens[0] = len(tokens)
        sampled, logits = self.stepper.run(inputs, self._slots).read()
        self._slots.read[0] = 1
        return sampled[0][0], logits[0, 0].copy()

    def state_after(self, tokens: Sequence[int]) -> bytes:
        """Returns the state after some tokens.

        Syncs: yes.
        """
        self.start_over()
        for at in range(0, len(tokens), self.chunk):
            self.fold(tokens[at : at + self.chunk], 0)
        return state_bytes(self.state, 1)

    def answer(self, conversation: ChatScript, lengths: Iterable[int] = ()) -> Transcript:
        """Runs a whole conversation. Chunks are cut at `lengths`, and the states there are kept.

        Syncs: yes.
        """
        wanted = sorted(set(lengths))
        self.start_over()
        out = Transcript(list(conversation.system))
        for turn, text in enumerate(conversation.turns):
            out.tokens += text
            rule = rule_for(self.seed, conversation.number, turn, len(out.tokens), self.page_size)
            answer: list[int] = []
            while len(answer) < rule.cap and not (answer and rule.ends(len(answer), answer[-1])):
                token = self._fold_all(conversation.number, out, wanted)
                answer.append(token)
                out.tokens.append(token)
            out.answers.append(answer)
        if wanted and wanted[-1] > self.folded:
            self._fold_all(conversation.number, out, wanted, logits=False)
        return out

    def _fold_all(self, number: int, out: Transcript, wanted: list[int], logits: bool = True) -> int:
        """Folds every known token that is not folded yet, chunk by chunk. Returns the token sampled last."""
        token = 0
        while self.folded < len(out.tokens):
            ends = [self.folded + self.chunk, len(out.tokens), *(n for n in wanted if n > self.folded)]
            token, row = self.fold(out.tokens[self.folded : min(ends)], number)
            if self.folded in wanted:
                out.states[self.folded] = state_bytes(self.state, 1)
        if logits:
            out.logits[self.folded] = row
        return token

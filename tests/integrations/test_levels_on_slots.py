"""A model of log-linear attention that decodes on level slots, beside the matrix of flash-linear-attention."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, softplus

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.fenwick import CHUNK, INNER
from tests.integrations.test_models_on_slots import WORDS, Weights
from tests.support.build import on
from tests.support.peers import module

HIDDEN, KEY, VALUE, HEADS, LAYERS, LEVELS = 32, 16, 16, 2, 2, 3
SIZES = {"q": (1, KEY), "k": (1, KEY), "v": (HEADS, VALUE), "decay": (HEADS,), "level_scales": (HEADS, INNER + LEVELS)}
Attend = Callable[[int, dict[str, Tensor]], Tensor]  # the number of a layer, inputs of tokens -> what they read


def planes(grid: int, **shapes: tuple[int, ...]) -> ms.StateLayout:
    made = tuple(ms.Plane(name, shape, torch.float32, grid=grid) for name, shape in shapes.items())
    return ms.StateLayout(made, LAYERS)


CHUNKS = planes(1, chunk_k=(CHUNK, 1, KEY), chunk_v=(CHUNK, HEADS, VALUE), chunk_decay=(CHUNK, HEADS))
LAYOUT = ms.StateLayout(
    (ms.Plane("last", (HIDDEN,), torch.float32),), LAYERS, rows=CHUNKS,
    levels=planes(CHUNK, levels=(HEADS, KEY, VALUE), level_decay=(HEADS,)),
)  # fmt: skip


def said(w: Weights, words: list[list[int]], before: Callable[[int, Tensor], Tensor], attend: Attend) -> Tensor:
    """What each word is followed by: logits, `batch token word`. Layers mix a token with the one before it.

    before: the number of a layer, its tokens -> for each of them, the token before it.
    """
    x = w.of("words", WORDS, HIDDEN)[torch.tensor(words)].to(w.generator.device)
    for layer in range(LAYERS):
        rms = torch.nn.functional.rms_norm(x, (HIDDEN,))
        mixed = rms + before(layer, rms) @ w.of(f"{layer} before", HIDDEN, HIDDEN).T
        given = {
            name: (mixed @ w.of(f"{layer} {name}", torch.Size(shape).numel(), HIDDEN).T).unflatten(-1, shape)
            for name, shape in SIZES.items()
        }
        given |= {"decay": logsigmoid(given["decay"]) / 8, "level_scales": softplus(given["level_scales"])}
        x = x + attend(layer, given).flatten(2) @ w.of(f"{layer} out", HIDDEN, HEADS * VALUE).T
    return torch.nn.functional.rms_norm(x, (HIDDEN,)) @ w.of("heads", WORDS, HIDDEN).T


class Served:
    """The model on slots of a manager, whose memory holds no number before it is written."""

    def __init__(self, backend: Backend, w: Weights) -> None:
        self.mem, self.backend, self.w = on(
            backend, LAYOUT, slots=12, max_requests=4, level_slots=12, tracking=ms.Redirect(every=CHUNK)
        ), backend, w  # fmt: skip
        assert self.mem.planes.levels is not None and self.mem.planes.rows is not None
        for plane in (*self.mem.planes.values(), *self.mem.planes.levels.values(), *self.mem.planes.rows.values()):
            plane.fill_(torch.nan)
        self.mem.device.scrub_null()
        self.texts: dict[ms.Row, list[int]] = {}

    def step(self, rows: list[ms.Row], count: int) -> None:
        """So many tokens of each row; where the next is not given, the likeliest is added."""
        mem, step = self.mem, self.mem.plan(rows, count)
        table = mem.device.level_table
        columns = {
            "rows": step.rows, "tokens": step.tokens, "lengths": mem.device.lengths[step.rows] - step.tokens,
            "table": table[:, 0, :LEVELS][step.rows], "target": table[:, 1][step.rows].amax(1),
        }  # fmt: skip
        assert columns["lengths"].tolist() == step.before.tolist()

        def before(layer: int, x: Tensor) -> Tensor:
            last = mem.planes["last"][layer]
            earlier = torch.cat([last[step.read][:, None], x[:, :-1]], 1)
            last[step.write] = x[:, -1]
            return earlier

        def attend(layer: int, x: dict[str, Tensor]) -> Tensor:
            kept = {**mem.planes.levels, **mem.planes.rows}
            return self.backend.log_linear_step(**x, **{name: y[layer] for name, y in kept.items()}, **columns)

        words = [self.texts[row][at : at + count] for row, at in zip(rows, step.before.tolist(), strict=True)]
        for row, logits, at in zip(rows, said(self.w, words, before, attend), step.after.tolist(), strict=True):
            if len(self.texts[row]) == at:
                self.texts[row].append(int(logits[-1].argmax()))
        mem.settle(step)

    def begin(self, text: list[int], resume: ms.Snapshot | None = None) -> ms.Row:
        """A request and the steps of its prompt, each to the end of a chunk at the latest."""
        (row,) = self.mem.admit([ms.Request("r", resume=resume)])
        self.texts[row], given = text, len(text)
        while (done := self.mem.info(row).length) < given:
            self.step([row], min(given - done, CHUNK - done % CHUNK))
        return row

    def check(self, text: list[int], given: int) -> None:
        """Every word behind those that were given is the likeliest, as the matrix of the whole text has it."""
        naive = module("fla.ops.log_linear_attn.naive").naive_log_linear_attn

        def attend(layer: int, x: dict[str, Tensor]) -> Tensor:
            return naive(*(x[name] for name in SIZES))

        changed = [*text[:-1]]
        changed[-9] = (changed[-9] + 1) % WORDS
        logits, others = said(self.w, [text[:-1], changed], lambda layer, x: pad(x[:, :-1], (0, 0, 1, 0)), attend)
        assert (logits[-1] - others[-1]).abs().amax() > 1e-3  # what came before counts
        chosen = logits[given - 1 :].gather(1, torch.tensor(text[given:])[:, None])[:, 0]
        assert (chosen >= logits[given - 1 :].amax(1) - 1e-4).all()  # nearly as likely: rounding may choose it


@pytest.mark.sample(interpreter=0)
@pytest.mark.filterwarnings("ignore:Triton is not supported")  # as fla says where it sees no GPU
def test_a_model_says_on_level_slots_what_it_says_of_whole_texts(backend: Backend, generator: torch.Generator) -> None:
    """Two requests; a third goes on from the snapshot of 128 tokens, and a fourth is a fork amid a chunk."""
    a_given, b_given, steps, more = (5, 17, 135, 70) if backend.name == "reference" else (126, 62, 4, 2)
    served = Served(backend, Weights(generator))
    mem, texts = served.mem, served.texts
    prompts = [torch.randint(WORDS, (n,), generator=generator).tolist() for n in (a_given, b_given)]
    a, b = map(served.begin, prompts)
    for _ in range(steps):
        served.step([a, b], 1)
    (kept,) = mem.end([a], keep="handle", lengths=[2 * CHUNK])
    assert kept is not None and kept.length == 2 * CHUNK
    c = served.begin(texts[a][: kept.length + 1], resume=kept)
    (d,) = mem.fork(b, ["d"]).rows
    forked = len(texts[b])
    texts[d] = [*texts[b][:-1], (texts[b][-1] + 1) % WORDS]
    for _ in range(more):
        served.step([c, b, d], 1)
    for row, given in ((a, a_given), (b, b_given), (c, a_given), (d, forked)):
        served.check(texts[row], given)
    assert mem.planes.levels.traffic.copied == 0
    mem.audit().raise_if_leaking()

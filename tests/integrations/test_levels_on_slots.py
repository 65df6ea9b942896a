"""A model of log-linear attention that decodes on level slots, beside its own cache: flash-linear-attention's."""

import builtins
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.fenwick import CHUNK, INNER
from tests.support.build import on
from tests.support.fla_models import WORDS, SaidToBeOnCuda, draw, fla_model
from tests.support.peers import CUDA, module

HIDDEN, KEY, VALUE, HEADS, LAYERS, LEVELS, TAPS = 32, 64, 16, 2, 2, 3, 4  # kernels of fla take keys of 64


def planes(grid: int, **shapes: tuple[int, ...]) -> ms.StateLayout:
    made = tuple(ms.Plane(name, shape, torch.float32, grid=grid) for name, shape in shapes.items())
    return ms.StateLayout(made, LAYERS)


CHUNKS = planes(1, chunk_k=(CHUNK, 1, KEY), chunk_v=(CHUNK, HEADS, VALUE), chunk_decay=(CHUNK, HEADS))
LAYOUT = ms.StateLayout(
    (ms.Plane("conv", (HIDDEN + 2 * KEY, TAPS - 1), torch.float32),), LAYERS, rows=CHUNKS,
    levels=planes(CHUNK, levels=(HEADS, KEY, VALUE), level_decay=(HEADS,)),
)  # fmt: skip


def made(patch: pytest.MonkeyPatch, device: torch.device, generator: torch.Generator) -> Any:
    model = fla_model(
        patch, "LogLinearMamba2", device, hidden_size=HIDDEN, num_hidden_layers=LAYERS, expand=1, head_dim=VALUE,
        num_heads=HEADS, state_size=KEY, n_groups=1, rmsnorm=False,  # the interpreter would spend most time in its norm
    )  # fmt: skip
    draw(model, generator)
    for block in model.backbone.layers:
        block.mixer.in_proj = SaidToBeOnCuda(block.mixer.in_proj)
    if CUDA:
        import triton

        patch.setattr(triton.knobs.language, "fp32_default", "ieee")  # products of fp32, as ours
    else:
        patch.setattr(module("fla.ops.log_linear_attn.chunk"), "range", counted, raising=False)
    return model


def counted(*ends: Any) -> Iterable[Any]:
    """The range of a kernel, which has one end, as tensors: the interpreter counts with numbers of Python."""
    import triton.language as tl

    if len(ends) > 1:
        return builtins.range(*ends)
    return (tl.full((), at, tl.int32) for at in builtins.range(int(ends[0])))


class Served:
    """The model on slots of a manager, whose memory holds no number before it is written."""

    def __init__(self, backend: Backend, model: Any, patch: pytest.MonkeyPatch) -> None:
        self.mem, self.backend, self.model = on(
            backend, LAYOUT, slots=12, max_requests=4, level_slots=12, tracking=ms.Redirect(every=CHUNK)
        ), backend, model  # fmt: skip
        assert self.mem.planes.levels is not None and self.mem.planes.rows is not None
        for plane in (*self.mem.planes.values(), *self.mem.planes.levels.values(), *self.mem.planes.rows.values()):
            plane.fill_(torch.nan)
        self.mem.device.scrub_null()
        self.texts: dict[ms.Row, list[int]] = {}
        self.last: dict[ms.Row, Tensor] = {}  # logits
        patch.setattr("fla.layers.log_linear_mamba2.chunk_log_linear_attn", self.attend)
        for layer, block in enumerate(model.backbone.layers):
            patch.setattr(block.mixer, "causal_conv1d_fn", partial(self.convolve, layer))

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor, activation: str) -> tuple[Tensor, None]:
        self.layer, step, state = layer, self.plan, self.mem.planes["conv"][layer].mT
        columns = step.read, step.write, step.snapshot, step.tokens
        return self.backend.conv_step(x.contiguous(), weight, bias, state, *columns, activation=activation), None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, level_scales: Tensor, **given: Any
    ) -> tuple[Tensor, None]:
        step, table, lengths = self.plan, self.mem.device.level_table, self.mem.device.lengths
        columns = {
            "rows": step.rows, "tokens": step.tokens, "lengths": lengths[step.rows] - step.tokens,
            "table": table[:, 0, :LEVELS][step.rows], "target": table[:, 1][step.rows].amax(1),
        }  # fmt: skip
        assert columns["lengths"].tolist() == step.before.tolist()
        kept = {name: y[self.layer] for name, y in {**self.mem.planes.levels, **self.mem.planes.rows}.items()}
        scales = level_scales[..., : INNER + LEVELS].contiguous()
        return self.backend.log_linear_step(q, k, v, g, scales, **kept, **columns), None

    def step(self, rows: list[ms.Row], count: int) -> None:
        """So many tokens of each row; where the next is not given, the likeliest is added."""
        self.plan = step = self.mem.plan(rows, count)
        words = [self.texts[row][at : at + count] for row, at in zip(rows, step.before.tolist(), strict=True)]
        logits = said(self.model, words).logits
        for row, self.last[row], at in zip(rows, logits[:, -1], step.after.tolist(), strict=True):
            if len(self.texts[row]) == at:
                self.texts[row].append(int(self.last[row].argmax()))
        self.mem.settle(step)

    def begin(self, text: list[int], resume: ms.Snapshot | None = None) -> ms.Row:
        """A request and the steps of its prompt, each to the end of a chunk at the latest."""
        (row,) = self.mem.admit([ms.Request("r", resume=resume)])
        self.texts[row], given = text, len(text)
        while (done := self.mem.info(row).length) < given:
            self.step([row], min(given - done, CHUNK - done % CHUNK))
        return row


@torch.no_grad()
def said(model: Any, words: list[list[int]], **cache: Any) -> Any:
    """What each word is followed by: `logits`, `batch token word`. With use_cache there is a cache as well."""
    return model(torch.tensor(words, device=model.device), **{"use_cache": False} | cache)


def check(model: Any, text: list[int], given: int, last: Tensor) -> Tensor:
    """Every word behind those that were given is the likeliest, as the model has it without slots.

    So it says of the whole text at once. And so it says with its own cache, in four words that pass the end of a chunk.
    """
    logits = said(model, [text[:-1]]).logits[0]
    assert last.allclose(logits[-1], atol=1e-4)
    likeliest(logits, text, given)
    start = (len(text) - 1) // CHUNK * CHUNK - 2
    out = said(model, [text[:start]], use_cache=True)
    for at in range(start, start + 4):
        out = said(model, [text[at : at + 1]], use_cache=True, past_key_values=out.past_key_values)
        assert out.logits[0, 0].allclose(logits[at], atol=1e-4)
        logits[at] = out.logits[0, 0]
    likeliest(logits, text, given)
    return logits


def likeliest(logits: Tensor, text: list[int], given: int) -> None:
    chosen = logits[given - 1 :].gather(1, torch.tensor(text[given:], device=logits.device)[:, None])[:, 0]
    assert (chosen >= logits[given - 1 :].amax(1) - 1e-4).all()  # nearly as likely: rounding may choose it


@pytest.mark.sample(interpreter=0)
@pytest.mark.filterwarnings("ignore:Triton is not supported", "ignore:Triton>3.2.0 detected")  # as fla says
def test_a_model_says_on_level_slots_what_it_says_without(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests; a third goes on from the snapshot of 128 tokens, and a fourth is a fork amid a chunk."""
    a_given, b_given, steps, more = (126, 62, 4, 66 if backend.name == "reference" else 2)
    monkeypatch.setenv("FLA_CONV_BACKEND", "triton")  # whichever library an earlier test made fla find
    model = made(monkeypatch, backend.device, generator)
    with monkeypatch.context() as patch:
        served = Served(backend, model, patch)
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
    assert texts[c][: len(texts[a])] == texts[a]
    _, _, logits = (
        check(model, texts[row], n, served.last[row]) for row, n in ((c, a_given), (d, forked), (b, b_given))
    )
    other = said(model, [[*texts[b][:CHUNK][::-1], *texts[b][CHUNK:-1]]]).logits[0]
    assert not other[-1].allclose(logits[-1], atol=1e-3)  # the first chunk counts to the end
    assert mem.planes.levels.traffic.copied == 0
    mem.audit().raise_if_leaking()

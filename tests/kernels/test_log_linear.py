"""The log-linear attention step: its answer beside the matrix that states it, and what becomes of level slots."""

import random
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.fenwick import CHUNK, INNER, levels_of, merge_of
from tests.support.decode_case import rubbish, same_bits
from tests.support.peers import module
from tests.support.recurrences import float64, log_linear, log_linear_bound

LEVELS = 3
INPUTS = ("q", "k", "v", "decay", "level_scales")


class Texts:
    """Rows of random tokens, and the planes that they grow in: rubbish, with distances between slots and rows.

    It keeps what a host keeps: the length of each row, and the slot of each of its levels. Row r is text r - 1.
    """

    def __init__(
        self, backend: Backend, generator: torch.Generator, lengths: list[int],
        dims: tuple[int, int, int, int] = (2, 1, 6, 5), state: torch.dtype = torch.float32,
        inputs: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        heads, key_heads, key, value = dims
        self.backend, self.scale = backend, 0.7
        sizes = {"q": (key_heads, key), "k": (key_heads, key), "v": (heads, value), "decay": (heads,)}
        made = {
            name: torch.randn(len(lengths), max(lengths), *size, generator=generator) for name, size in sizes.items()
        }
        made["decay"] = -made["decay"].abs() / 8
        made["level_scales"] = torch.rand(len(lengths), max(lengths), heads, INNER + LEVELS, generator=generator)
        self.inputs = {
            name: x.to(backend.device, torch.float32 if name == "decay" else inputs) for name, x in made.items()
        }
        shapes = {
            "levels": (12, (heads, key, value), state), "level_decay": (12, (heads,), torch.float32),
            "chunk_k": (len(lengths) + 1, (CHUNK, key_heads, key), inputs),
            "chunk_v": (len(lengths) + 1, (CHUNK, heads, value), inputs),
            "chunk_decay": (len(lengths) + 1, (CHUNK, heads), torch.float32),
        }  # fmt: skip
        self.memory, self.planes = {}, {}
        for name, (slots, shape, dtype) in shapes.items():
            stride = -(-int(np.prod(shape)) // 8) * 8 + 8
            self.memory[name] = rubbish(slots * stride * dtype.itemsize, backend.device, generator)
            strides = (stride, *torch.empty(shape, device="meta").stride())
            self.planes[name] = self.memory[name].view(dtype).as_strided((slots, *shape), strides)
        self.limits, self.lengths = lengths, [0] * len(lengths)
        self.held: list[dict[int, int]] = [{} for _ in lengths]
        self.free = list(range(1, 12))
        self.outs: list[list[Tensor]] = [[] for _ in lengths]

    def column(self, *values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.backend.device)

    def step(self, counts: dict[int, int], room: int) -> None:
        """So many tokens of each row, in this order; row 0 is padding. No byte changes that should not."""
        targets = [self.free[i] for i in range(len(counts))]
        given = {}
        for name in INPUTS:
            x = self.inputs[name]
            given[name] = rubbish(len(counts) * room * x[0, 0].nbytes, x.device, torch.Generator().manual_seed(1))
            given[name] = given[name].view(x.dtype).view(len(counts), room, *x.shape[2:])
            for i, (row, n) in enumerate(counts.items()):
                if row:
                    at = self.lengths[row - 1]
                    given[name][i, :n] = x[row - 1, at : at + n]
        table = [[self.held[row - 1].get(level, 7777) if row else 1 for level in range(LEVELS)] for row in counts]
        same = {name: whole.clone() for name, whole in self.memory.items()}
        out = torch.full_like(given["v"], torch.nan)
        returned = self.backend.log_linear_step(
            **given, **self.planes, rows=self.column(*counts), tokens=self.column(*counts.values()),
            lengths=self.column(*(self.lengths[row - 1] if row else 77 for row in counts)),
            table=self.column(*table), target=self.column(*targets), scale=self.scale, out=out,
        )  # fmt: skip
        assert returned is out
        changed: dict[str, list[Tensor]] = {name: [] for name in self.planes}
        for i, (row, n) in enumerate(counts.items()):
            real = n if row else 0
            assert not out[i, real:].any()
            if not row or not n:
                continue
            at = self.lengths[row - 1] % CHUNK
            for name in ("chunk_k", "chunk_v", "chunk_decay"):
                kept = self.planes[name][row, at : at + n]
                assert same_bits(kept, given[name.removeprefix("chunk_")][i, :n])
                changed[name].append(kept)
            self.outs[row - 1].append(out[i, :n])
            self.lengths[row - 1] += n
            if self.lengths[row - 1] % CHUNK == 0:
                merging, level = merge_of(self.lengths[row - 1])
                self.free += [self.held[row - 1].pop(low) for low in merging]
                self.held[row - 1][level] = targets[i]
                self.free.remove(targets[i])
                changed["levels"].append(self.planes["levels"][targets[i]])
                changed["level_decay"].append(self.planes["level_decay"][targets[i]])
                assert all(bool(x[-1].isfinite().all()) for x in (changed["levels"], changed["level_decay"]))
            assert tuple(sorted(self.held[row - 1])) == levels_of(self.lengths[row - 1])
        for name, parts in changed.items():
            now = self.memory[name].clone()
            for part in parts:
                part.copy_(same[name].view(part.dtype).as_strided(part.shape, part.stride(), part.storage_offset()))
            assert torch.equal(self.memory[name], same[name]), name
            self.memory[name].copy_(now)

    def grow(self, rng: random.Random, *sizes: int) -> list[Tensor]:
        """Steps of these sizes, of rows in any order beside padding, until all texts are whole; outputs of each."""
        while todo := [i + 1 for i, n in enumerate(self.limits) if self.lengths[i] < n]:
            rng.shuffle(todo)
            most = {row: min(self.limits[row - 1], self.lengths[row - 1] // CHUNK * CHUNK + CHUNK) for row in todo}
            room = rng.choice(sizes)
            counts = {row: min(room, most[row] - self.lengths[row - 1]) for row in todo}
            self.step(counts | {0: room} if len(todo) % 2 else {0: room} | counts, room)
        return [torch.cat(outs) for outs in self.outs]


def check(texts: Texts, outs: list[Tensor]) -> None:
    """Every output is within its bound of the matrix."""
    for i, out in enumerate(outs):
        q, k, v, decay, scales = (float64(texts.inputs[name][i, : len(out)]) for name in INPUTS)
        for h in range(v.shape[1]):
            kh = h // (v.shape[1] // q.shape[1])
            given = q[:, kh], k[:, kh], v[:, h], decay[:, h], scales[:, h], texts.scale
            bound = log_linear_bound(*given, texts.planes["levels"].dtype, texts.backend.name)
            apart = np.abs(float64(out[:, h]) - log_linear(*given))
            assert (apart <= bound.stored(out.dtype, texts.backend.name).error).all()


def test_levels_are_a_binary_counter() -> None:
    """Brute force: buckets of chunks, of which two of one size become one; and the levels that the matrix has."""
    buckets: list[int] = []  # sizes, the oldest first
    for m in range(1, 300):
        merging = []
        buckets.append(1)
        while len(buckets) > 1 and buckets[-1] == buckets[-2]:
            merging.append(buckets.pop().bit_length() - 1)
            buckets[-1] *= 2
        assert merge_of(m * CHUNK) == (tuple(merging), buckets[-1].bit_length() - 1)
        t = m * CHUNK + m % CHUNK
        assert levels_of(t) == tuple(size.bit_length() - 1 for size in reversed(buckets))
        seen = [(s ^ t).bit_length() - INNER for s in range(m * CHUNK)]
        assert [(level, len(list(same))) for level, same in groupby(seen)] == [
            (size.bit_length() - 1, size * CHUNK) for size in buckets
        ]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dims", [(2, 1, 6, 5), (2, 2, 16, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_outputs_are_within_the_bound_of_the_matrix(
    backend: Backend, generator: torch.Generator, dims: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    """One key head for two heads, and one for each; a part of a block, and two blocks of values; whole accesses."""
    texts = Texts(backend, generator, [CHUNK + 9, 20], dims, dtype, dtype)
    check(texts, texts.grow(random.Random(generator.initial_seed()), 1, 7, 33, 64))


def test_five_chunks_and_a_part_are_within_the_bound(backend: Backend, generator: torch.Generator) -> None:
    """Levels 0 to 2, merges of none, one and two of them; beside the matrix of flash-linear-attention too."""
    texts = Texts(backend, generator, [5 * CHUNK + 17], (1, 1, 4, 3))
    (out,) = texts.grow(random.Random(generator.initial_seed()), 17, 64, 64)
    check(texts, [out])
    naive = module("fla.ops.log_linear_attn.naive").naive_log_linear_attn(
        *(x.cpu() for x in texts.inputs.values()), scale=texts.scale
    )[0]
    assert torch.allclose(out.cpu(), naive, rtol=0, atol=1e-5 * float(naive.abs().max()))


def test_bits_depend_on_no_cut_and_on_no_place_in_the_batch(backend: Backend, generator: torch.Generator) -> None:
    """Outputs and levels, of rows beside others, in other orders, in other steps and in other slots."""
    one = Texts(backend, generator, [CHUNK + 3, 2 * CHUNK], (1, 1, 5, 3))
    outs = one.grow(random.Random(1), 64)
    for rows, sizes in (([1, 0], (11, 64)), ([1], (40,))):
        other = Texts(backend, generator, [one.limits[i] for i in rows], (1, 1, 5, 3))
        other.inputs = {name: x[rows].contiguous() for name, x in one.inputs.items()}
        for i, out in zip(rows, other.grow(random.Random(2), *sizes), strict=True):
            assert same_bits(out, outs[i])
            for level, slot in one.held[i].items():
                mine = other.held[rows.index(i)][level]
                assert same_bits(one.planes["levels"][slot], other.planes["levels"][mine])
                assert same_bits(one.planes["level_decay"][slot], other.planes["level_decay"][mine])


def test_a_row_goes_on_from_the_levels_of_another(backend: Backend, generator: torch.Generator) -> None:
    """A snapshot at the end of a chunk is a set of slots: both rows read them, neither changes them."""
    texts = Texts(backend, generator, [3 * CHUNK + 2, 3 * CHUNK + 2], (1, 1, 5, 3))
    for x in texts.inputs.values():
        x[1, : 3 * CHUNK] = x[0, : 3 * CHUNK]
    for _ in range(3):
        texts.step({1: CHUNK}, CHUNK)
    texts.lengths[1], texts.held[1], texts.outs[1] = 3 * CHUNK, dict(texts.held[0]), list(texts.outs[0])
    check(texts, texts.grow(random.Random(1), 2))


def test_a_token_that_is_rejected_leaves_nothing(backend: Backend, generator: torch.Generator) -> None:
    """Its length does not grow: the next step writes over it, also where a chunk had ended."""
    texts = Texts(backend, generator, [CHUNK + 2], (1, 1, 5, 3))
    texts.step({1: 60}, 60)
    before = list(texts.lengths), list(texts.held), list(texts.free), list(texts.outs[0])
    kept = {name: x.clone() for name, x in texts.inputs.items()}
    for x in texts.inputs.values():
        x[0, 61:] = x[0, :5].flip(0)
    texts.step({1: 4}, 4)
    texts.lengths, texts.held, texts.free, texts.outs[0] = [61], [{}], before[2], [*before[3], texts.outs[0][-1][:1]]
    texts.inputs = kept
    check(texts, texts.grow(random.Random(1), 3))


def test_states_of_a_prefill_become_levels(backend: Backend, generator: torch.Generator) -> None:
    """`chunk_log_linear_attn` gives levels decayed to the last chunk's end: as if no level had decayed anything since.

    So each goes to a slot whose decay is 0, and the inputs behind the last whole chunk go to the open chunk.
    """
    texts = Texts(backend, generator, [3 * CHUNK + 12], (2, 1, 5, 3))
    length, start = 3 * CHUNK + 9, 3 * CHUNK
    k, v, decay = (texts.inputs[name][0].double() for name in ("k", "v", "decay"))
    end = 0
    for level in sorted(levels_of(length), reverse=True):
        begin, end = end, end + (CHUNK << level)
        left = torch.stack([decay[s + 1 : start].sum(0) for s in range(begin, end)]).exp()
        state = torch.einsum("tgk,thv,th->hkv", k[begin:end], v[begin:end], left)
        slot = texts.held[0][level] = texts.free.pop(0)
        texts.planes["levels"][slot], texts.planes["level_decay"][slot] = state, 0
    for name in ("k", "v", "decay"):
        texts.planes[f"chunk_{name}"][1, :9] = texts.inputs[name][0, start:length]
    texts.lengths[0] = length
    (out,) = texts.grow(random.Random(1), 2)
    whole = log_linear_of(texts)
    assert np.allclose(float64(out), whole[length:], rtol=0, atol=1e-5 * np.abs(whole).max())


def log_linear_of(texts: Texts) -> np.ndarray:
    """Exact outputs of the first text, `token head value`."""
    q, k, v, decay, scales = (float64(texts.inputs[name][0]) for name in INPUTS)
    heads = [log_linear(q[:, 0], k[:, 0], v[:, h], decay[:, h], scales[:, h], texts.scale) for h in range(v.shape[1])]
    return np.stack(heads, 1)


def test_what_a_level_has_decayed_itself_costs_no_digits(backend: Backend, generator: torch.Generator) -> None:
    """Level 2 decayed by 30 000 inside, and by 1/2 since. The second token forgets all, and no NaN comes of it."""
    texts = Texts(backend, generator, [5 * CHUNK + 2], (1, 1, 4, 3))
    texts.lengths, texts.held = [5 * CHUNK], [{0: 1, 2: 2}]
    states = torch.randn(2, 1, 4, 3, generator=generator)
    texts.planes["levels"][1:3], texts.planes["level_decay"][1:3] = states, torch.tensor([[-0.5], [-3e4]])
    texts.inputs["decay"][0, 5 * CHUNK + 1] = -torch.inf
    texts.step({1: 2}, 2)
    q, k, v, decay, scales = (float64(texts.inputs[name][0, 5 * CHUNK :]) for name in INPUTS)
    first, second = (texts.scale * scales[t, 0, 0] * (q[t, 0] @ k[t, 0]) * v[t, 0] for t in (0, 1))
    for state, level, since in zip(float64(states[:, 0]), (0, 2), (0, -0.5), strict=True):
        first += texts.scale * scales[0, 0, INNER + level] * np.exp(decay[0, 0] + since) * (q[0, 0] @ state)
    assert np.allclose(float64(texts.outs[0][0][:, 0]), [first, second], rtol=1e-5, atol=1e-5)

"""Measures how far the outputs of decode steps drift if states are kept in fewer bits: `docs/fewer_bits.md`.

    python -m tests.proof.drift delta|kda|mamba2 [TOKENS] [TEXTS]

Prints the errors of the outputs of the last 64 tokens, in percent of the same recurrence in float64: of the worst head
and of the median head. Each text has other random inputs, which are like those of models: keys change slowly and have a
common part, some values are large, and queries are near keys of the past. There are 8 heads of 128 keys, whose states
lose from a 3 000th to two thirds of their values with each token; of `kda`, each key has a rate of its own. Steps are
those of the reference backend, of one token each.
"""

import argparse
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from memstate.kernels.dispatch import Backend

HEADS, KEYS, VALUES, FEATURES = 8, 128, 8, 24
LAST = 64  # tokens whose outputs count
PAST = 256  # tokens back to which queries go
FORMATS: dict[str, tuple[torch.dtype, int | None]] = {  # name -> dtype of the state, seed of chance
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "int16": (torch.int16, None),
    "int8": (torch.int8, None),
    "int8 by chance": (torch.int8, 0),
}


class Inputs(NamedTuple):
    """Inputs of all tokens, fp32 with axes `token head ..`."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor  # natural log, `token head`, or `token head key` of kda
    beta: Tensor  # factor of what a token adds


class Error(NamedTuple):
    """Errors of outputs in percent."""

    worst: float
    median: float


def inputs(rule: str, tokens: int, text: int) -> Inputs:
    """Returns random inputs of a rule, "delta", "kda" or "mamba2"; another text has others."""
    generator = torch.Generator().manual_seed(text)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    mix, common = normal(HEADS, FEATURES, KEYS) / FEATURES**0.5, 0.7 * normal(HEADS, KEYS)
    large, feature = (0.8 * normal(HEADS, VALUES)).exp(), normal(HEADS, FEATURES)
    wandering = []
    for change in normal(tokens, HEADS, FEATURES):
        feature = 0.95 * feature + (1 - 0.95**2) ** 0.5 * change
        wandering.append(feature)
    features = torch.stack(wandering) + 0.5 * normal(tokens, HEADS, FEATURES)
    k = F.silu(torch.einsum("thf,hfk->thk", features, mix) + common + 0.3 * normal(tokens, HEADS, KEYS)).contiguous()
    at = torch.arange(tokens)
    back = (torch.rand(tokens, generator=generator) * at.add(1).clamp(max=PAST)).long()
    q = k[at - back] + 0.2 * normal(tokens, HEADS, KEYS)
    v = normal(tokens, HEADS, VALUES) * large
    rate = torch.logspace(-3.5, 0, HEADS)
    step = F.softplus(1.5 * normal(tokens, HEADS) - 1 + rate.expm1().log())
    if rule == "mamba2":
        return Inputs(q, k, F.silu(1.5 * v), -step, step)
    beta = torch.sigmoid(1.5 * normal(tokens, HEADS))
    decay = -step
    if rule == "kda":
        decay = decay[..., None] * (normal(HEADS, KEYS) + 0.5 * normal(tokens, HEADS, KEYS)).exp()
    return Inputs(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, decay, beta)


def exact(rule: str, given: Inputs) -> Tensor:
    """Returns the outputs `token head value` in float64."""
    q, k, v, decay, beta = (each.double() for each in given)
    s, outputs = torch.zeros(HEADS, KEYS, VALUES, dtype=torch.float64), []
    for token in range(len(q)):
        s = s * decay[token].exp().view(HEADS, -1, 1)
        seen = 0 if rule == "mamba2" else torch.einsum("hk,hkv->hv", k[token], s)
        s = s + k[token][:, :, None] * (beta[token][:, None] * (v[token] - seen))[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", q[token], s))
    return torch.stack(outputs)


def stepped(rule: str, given: Inputs, dtype: torch.dtype, seed: int | None) -> Tensor:
    """Returns the outputs of decode steps, whose state has a dtype. With a seed it is rounded by chance."""
    backend, slot = Backend("reference"), torch.tensor([1])
    shape = (VALUES, KEYS) if rule == "mamba2" else (KEYS, VALUES)
    state, scales = torch.zeros(2, HEADS, *shape, dtype=dtype), torch.zeros(2, HEADS, VALUES)
    slots = {"state": state, "read": slot, "write": slot, "snapshot": torch.tensor([0]), "tokens": torch.tensor([1])}
    if not dtype.is_floating_point:
        slots["scales"] = scales
    outputs = []
    for token in range(len(given.q)):
        q, k, v, decay, beta = (each[None, token : token + 1] for each in given)
        chance = {} if seed is None else {"seed": seed, "lengths": torch.tensor([token])}
        if rule == "mamba2":
            out = backend.selective_step(x=v, dt=beta, a=-torch.ones(HEADS), b=k, c=q, **slots, **chance)
        else:
            out = backend.gated_delta_step(q=q, k=k, v=v, decay=decay, beta=beta, scale=1.0, **slots, **chance)
        outputs.append(out[0, 0])
    return torch.stack(outputs)


def drift(rule: str, tokens: int, formats: list[str], text: int = 0) -> dict[str, Error]:
    """Returns for each format the errors after some tokens of a text."""
    given = inputs(rule, tokens, text)
    wanted, found = exact(rule, given)[-LAST:], {}
    for name in formats:
        off = stepped(rule, given, *FORMATS[name])[-LAST:].double() - wanted
        errors = 100 * off.norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
        found[name] = Error(errors.max().item(), errors.median().item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.drift", description=__doc__.splitlines()[0])
    parser.add_argument("rule", choices=("delta", "kda", "mamba2"))
    parser.add_argument("tokens", type=int, nargs="?", default=1000)
    parser.add_argument("texts", type=int, nargs="?", default=5)
    rule, tokens, texts = vars(parser.parse_args()).values()
    torch.set_num_threads(1)
    found = [drift(rule, tokens, [*FORMATS], text) for text in range(texts)]
    print(f"{rule}, {tokens} tokens, error of outputs in %: median of {texts} texts, and the least and largest of them")
    print(f"{'state':16}{'worst head':>28}{'median head':>28}")
    for name in FORMATS:
        columns = [sorted(column) for column in zip(*(one[name] for one in found), strict=True)]
        said = [f"{median(column):.4f} ({column[0]:.4f} to {column[-1]:.4f})" for column in columns]
        print(f"{name:16}{said[0]:>28}{said[1]:>28}")


if __name__ == "__main__":
    main()

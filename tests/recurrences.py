"""The recurrences as their papers state them, in float64, and how far correct fp32 arithmetic may be from them.

The statements share nothing with kernels or references. The bounds follow the algorithm that both of those use, one
operation after the other: a `Rounded` carries an exact value and a bound on the error of its computed counterpart.
"""

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

U = 2.0**-24  # unit roundoff of fp32
TINY = 2.0**-126  # a GPU may flush what is smaller to zero
HUGE = 2.0**126


def gated_delta(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, scale: float
) -> tuple[Array, Array]:
    """One head: S_t = S_{t-1} (a_t (I - b_t k_t k_t^T)) + b_t v_t k_t^T and o_t = S_t q_t, S being `value key`.

    Yang, Kautz, Hatamizadeh 2024, Gated Delta Networks, arXiv:2412.06464. q, k: `token key`; v: `token value`;
    decay (log a), beta: `token`; state: `key value`, as memstate stores it. Returns `token value` and the new state.
    """
    s = state.T
    out = []
    for t in range(len(v)):
        forget = np.exp(decay[t]) * (np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t]))
        s = s @ forget + beta[t] * np.outer(v[t], k[t])
        out.append(scale * (s @ q[t]))
    return np.array(out).reshape(v.shape), s.T


def causal_conv(x: Array, weight: Array, bias: Array, window: Array, silu: bool) -> tuple[Array, Array]:
    """Each channel convolved with its own short filter over what came before, then y sigmoid(y) where `silu`.

    The causal convolution in the block of Mamba: Gu, Dao 2023, arXiv:2312.00752. x: `token channel`; weight:
    `channel tap`, the last tap weighs the newest input; window: `tap-1 channel`. Returns `token channel` and the new
    window.
    """
    inputs = np.concatenate([window, x])
    out = np.empty_like(x)
    for c in range(x.shape[1] if len(x) else 0):
        out[:, c] = np.convolve(inputs[:, c], weight[c, ::-1], mode="valid") + bias[c]
    return out / (1 + np.exp(-out)) if silu else out, inputs[len(x) :]


class Rounded:
    """An exact value and a bound on the error of the fp32 number that stands for it.

    Every operation adds what it inherits and one rounding of the largest number it may have produced (running error
    analysis: Higham, Accuracy and Stability of Numerical Algorithms, 3.3). A fused multiply-add rounds less: the bounds
    hold for it too.
    """

    def __init__(self, value: Array, error: Array | float = 0.0) -> None:
        self.value, self.error = value, np.broadcast_to(error, value.shape)

    def _rounded(self, inherited: Array, value: Array, ulps: Array | float = 1.0) -> "Rounded":
        return Rounded(value, inherited + ulps * U * (np.abs(value) + inherited) + TINY)

    def __add__(self, other: "Rounded") -> "Rounded":
        return self._rounded(self.error + other.error, self.value + other.value)

    def __sub__(self, other: "Rounded") -> "Rounded":
        return self._rounded(self.error + other.error, self.value - other.value)

    def __mul__(self, other: "Rounded") -> "Rounded":
        a, b = np.abs(self.value), np.abs(other.value)
        return self._rounded(a * other.error + b * self.error + self.error * other.error, self.value * other.value)

    def over_one_plus(self, other: "Rounded") -> "Rounded":
        """self / (1 + other) for a positive other; division is good to 2 ulp, 4 roundings, on every target.

        Above HUGE the divisor may overflow, or a GPU's division underflow: then the quotient may be zero.
        """
        below = Rounded(np.ones_like(other.value)) + other
        value = self.value / below.value
        inherited = (self.error + np.abs(value) * below.error) / (below.value - below.error)
        inherited += np.where(below.value + below.error > HUGE, np.abs(value), 0)
        return self._rounded(inherited, value, ulps=4)

    def exp(self) -> "Rounded":
        """On a GPU 2^(x log2 e): 2^-22 from the instruction, 2 |x| roundings from its argument; on a CPU 4 ulp."""
        value = np.exp(self.value)
        return self._rounded(value * np.expm1(self.error), value, ulps=8 + 2 * np.abs(self.value))

    def sum(self, axis: int) -> "Rounded":
        """n - 1 additions in any order: no term meets more than n - 1 roundings."""
        n = self.value.shape[axis]
        error = self.error.sum(axis)
        gamma = n * U / (1 - n * U)
        return Rounded(self.value.sum(axis), error + gamma * (np.abs(self.value).sum(axis) + error) + n * TINY)

    def __getitem__(self, at: object) -> "Rounded":
        return Rounded(self.value[at], self.error[at])  # type: ignore[index]

    def __neg__(self) -> "Rounded":
        return Rounded(-self.value, self.error)

    def stored(self, dtype: torch.dtype, backend: str) -> "Rounded":
        """After rounding to the dtype of a tensor; what is smaller than its normal numbers is rounded absolutely."""
        info = torch.finfo(dtype)
        # Triton's interpreter cuts fp32 off where it becomes bf16: a whole last place instead of half of one.
        places = 1.0 if backend == "interpreter" and dtype == torch.bfloat16 else 0.5
        error = self.error + places * info.eps * (np.abs(self.value) + self.error) + info.tiny * info.eps + TINY
        return Rounded(self.value, error)


def gated_delta_bound(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, scale: float
) -> tuple[Rounded, Rounded]:
    """Bounds for one head, of the outputs `token value` and the new state, before they are stored."""
    s = Rounded(state)
    out: list[Rounded] = []
    for t in range(len(v)):
        key, query = Rounded(k[t][:, None]), Rounded(q[t][:, None])
        s = s * Rounded(decay[t]).exp()
        delta = Rounded(beta[t]) * (Rounded(v[t]) - (key * s).sum(0))
        s = s + key * delta
        out.append((query * s).sum(0) * Rounded(np.float64(scale), abs(scale) * U))
    shape = v.shape
    return Rounded(*(np.array([getattr(o, part) for o in out]).reshape(shape) for part in ("value", "error"))), s


def causal_conv_bound(x: Array, weight: Array, bias: Array, window: Array, silu: bool) -> Rounded:
    """Bounds of the outputs `token channel`, before they are stored; the window is not computed with."""
    inputs = np.concatenate([window, x])
    y = Rounded(np.broadcast_to(bias, x.shape))
    for tap in range(weight.shape[1]):
        y = y + Rounded(weight[:, tap]) * Rounded(inputs[tap : tap + len(x)])
    return y.over_one_plus((-y).exp()) if silu else y

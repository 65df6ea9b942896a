"""Computes the recurrences as their papers state them, in float64, and bounds on the error of correct fp32 arithmetic.

The recurrences share no code with kernels or references. The bounds follow the algorithm of kernels and references,
operation by operation: a `Rounded` carries an exact value and a bound on the error of its computed counterpart.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

U = 2.0**-24  # unit roundoff of fp32
TINY = 2.0**-126  # a GPU may flush smaller numbers to zero
HUGE = 2.0**126


def float64(tensor: torch.Tensor) -> Array:
    return tensor.double().cpu().numpy()


def gated_delta(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, scale: float
) -> tuple[Array, Array]:
    """Computes one head: S_t = S_{t-1} (a_t (I - b_t k_t k_t^T)) + b_t v_t k_t^T, o_t = S_t q_t, with S `value key`.

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
    """Convolves each channel with its own short causal filter, then computes y sigmoid(y) if `silu`.

    The causal convolution in the block of Mamba: Gu, Dao 2023, arXiv:2312.00752. x: `token channel`; weight:
    `channel tap`, the last tap weighs the newest input; window: the inputs before x, `tap-1 channel`. Returns
    `token channel` and the new window.
    """
    inputs = np.concatenate([window, x])
    out = np.empty_like(x)
    for c in range(x.shape[1] if len(x) else 0):
        out[:, c] = np.convolve(inputs[:, c], weight[c, ::-1], mode="valid") + bias[c]
    return out / (1 + np.exp(-out)) if silu else out, inputs[len(x) :]


class Rounded:
    """An exact value and a bound on the error of the fp32 number that stands for it.

    The bound of a result is the error that its operands cause, plus one rounding of the largest number that may come
    out (running error analysis: Higham, Accuracy and Stability of Numerical Algorithms, 3.3). A fused multiply-add
    rounds less, so the bounds hold for it too.
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
        """Returns self / (1 + other) for a positive other. Division is within 2 ulp, 4 roundings, on every target.

        If the divisor is above HUGE, it may overflow, or a GPU's division may underflow: then the quotient may be zero.
        """
        below = Rounded(np.ones_like(other.value)) + other
        value = self.value / below.value
        finite = np.isfinite(below.value + below.error)  # otherwise the quotient is 0, with no inherited error
        divisor, error = np.where(finite, below.value, np.inf), np.where(finite, below.error, 0)
        inherited = (self.error + np.abs(value) * error) / (divisor - error)
        inherited += np.where(below.value + below.error > HUGE, np.abs(value), 0)
        return self._rounded(inherited, value, ulps=4)

    def exp(self) -> "Rounded":
        """Returns exp(x). A CPU errs by at most 4 ulp.

        A GPU computes 2^(x log2 e), with a relative error of 2^-22, plus 2 |x| roundings from the exponent.
        """
        value = np.exp(self.value)
        return self._rounded(value * np.expm1(self.error), value, ulps=8 + 2 * np.abs(self.value))

    def rsqrt(self) -> "Rounded":
        """Returns 1 / sqrt of a positive number, within 2 ulp, 4 roundings, on every target."""
        value = 1 / np.sqrt(self.value)
        return self._rounded(1 / np.sqrt(self.value - self.error) - value, value, ulps=4)

    def sum(self, axis: int) -> "Rounded":
        """Returns the sum of n terms along an axis. In any order, each term takes part in at most n - 1 roundings."""
        n = self.value.shape[axis]
        error = self.error.sum(axis)
        gamma = n * U / (1 - n * U)
        return Rounded(self.value.sum(axis), error + gamma * (np.abs(self.value).sum(axis) + error) + n * TINY)

    def __getitem__(self, at: object) -> "Rounded":
        return Rounded(self.value[at], self.error[at])  # type: ignore[index]

    def __neg__(self) -> "Rounded":
        return Rounded(-self.value, self.error)

    def stored(self, dtype: torch.dtype, backend: str) -> "Rounded":
        """Returns the value rounded to a dtype. Below the dtype's normal numbers the rounding error is constant."""
        info = torch.finfo(dtype)
        # Triton's interpreter truncates fp32 to bf16: an error of a whole last place instead of half of one.
        places = 1.0 if backend == "interpreter" and dtype == torch.bfloat16 else 0.5
        error = self.error + places * info.eps * (np.abs(self.value) + self.error) + info.tiny * info.eps + TINY
        return Rounded(self.value, error)


class Gates(NamedTuple):
    """Inputs of one head after its gates: q and k (of length 1 with `normalize`), the log decay, and beta."""

    q: Rounded
    k: Rounded
    decay: Rounded
    beta: Rounded


def gates(
    q: Array, k: Array, decay: Array, beta: Array, a_log: Array | None, dt_bias: Array, sigmoid: bool, normalize: bool
) -> Gates:
    """Applies the gates of Gated DeltaNet, arXiv:2412.06464, and Kimi Delta Attention, arXiv:2510.26692.

    With `a_log` the log decay is -exp(a_log) softplus(decay + dt_bias), with `sigmoid` beta is sigmoid(beta), and with
    `normalize` q and k are divided by their lengths. q, k: `token key`; beta: `token`; decay: `token` or `token key`;
    a_log: a number.
    """
    step, rate = Rounded(decay), Rounded(beta)
    if a_log is not None:
        step = -(Rounded(a_log).exp() * softplus_bound(step + Rounded(dt_bias)))
    if sigmoid:
        rate = Rounded(np.ones_like(beta)).over_one_plus((-rate).exp())
    query, key = Rounded(q), Rounded(k)
    if normalize:
        epsilon = Rounded(np.float64(1e-6), 1e-6 * U)
        query, key = (x * ((x * x).sum(1) + epsilon).rsqrt()[:, None] for x in (query, key))
    return Gates(query, key, step, rate)


def gated_delta_bound(
    q: Array | Rounded, k: Array | Rounded, v: Array, decay: Array | Rounded, beta: Array | Rounded, state: Array,
    scale: float,
) -> tuple[Rounded, Rounded]:  # fmt: skip
    """Returns bounds of one head's outputs, `token value`, and of its new state, both in fp32."""
    q, k, decay, beta = (x if isinstance(x, Rounded) else Rounded(x) for x in (q, k, decay, beta))
    s = Rounded(state)
    out: list[Rounded] = []
    for t in range(len(v)):
        key, query = k[t][:, None], q[t][:, None]
        s = s * decay[t].exp()
        delta = beta[t] * (Rounded(v[t]) - (key * s).sum(0))
        s = s + key * delta
        out.append((query * s).sum(0) * Rounded(np.float64(scale), abs(scale) * U))
    shape = v.shape
    return Rounded(*(np.array([getattr(o, part) for o in out]).reshape(shape) for part in ("value", "error"))), s


def causal_conv_bound(x: Array, weight: Array, bias: Array, window: Array, silu: bool) -> Rounded:
    """Returns bounds of the outputs, `token channel`, in fp32. The new window has no error."""
    inputs = np.concatenate([window, x])
    y = Rounded(np.broadcast_to(bias, x.shape))
    for tap in range(weight.shape[1]):
        y = y + Rounded(weight[:, tap]) * Rounded(inputs[tap : tap + len(x)])
    return y.over_one_plus((-y).exp()) if silu else y


def kda(q: Array, k: Array, v: Array, decay: Array, beta: Array, state: Array, scale: float) -> tuple[Array, Array]:
    """Computes one head: S_t = (I - b_t k_t k_t^T) Diag(a_t) S_{t-1} + b_t k_t v_t^T and o_t = S_t^T q_t.

    Kimi Team 2025, Kimi Linear, arXiv:2510.26692. q, k, decay (log a): `token key`; v: `token value`; beta: `token`;
    state S: `key value`. Returns `token value` and the new state.
    """
    s = state
    out = []
    for t in range(len(v)):
        forget = (np.eye(k.shape[1]) - beta[t] * np.outer(k[t], k[t])) @ np.diag(np.exp(decay[t]))
        s = forget @ s + beta[t] * np.outer(k[t], v[t])
        out.append(scale * (s.T @ q[t]))
    return np.array(out).reshape(v.shape), s


def kda_bound(
    q: Array | Rounded, k: Array | Rounded, v: Array, decay: Array | Rounded, beta: Array | Rounded, state: Array,
    scale: float,
) -> tuple[Rounded, Rounded]:  # fmt: skip
    """Returns bounds for one head: those of the gated delta rule, but with a decay for each key channel."""
    return gated_delta_bound(q, k, v, decay[:, :, None], beta, state, scale)


def low_rank(
    q: Array, k: Array, v: Array, decay: Array, a: Array, b: Array, state: Array, scale: float
) -> tuple[Array, Array]:
    """Computes one head: S_t = (Diag(w_t) + b_t a_t^T) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, where S is `key value`.

    The generalized delta rule of RWKV-7: Peng et al. 2025, arXiv:2503.14456, with its S transposed. decay (log w):
    `token key`, or `token 1`.
    """
    s = state
    out = []
    for t in range(len(v)):
        s = (np.diag(np.exp(np.broadcast_to(decay[t], k[t].shape))) + np.outer(b[t], a[t])) @ s + np.outer(k[t], v[t])
        out.append(scale * (s.T @ q[t]))
    return np.array(out).reshape(v.shape), s


def low_rank_bound(
    q: Array, k: Array, v: Array, decay: Array, a: Array, b: Array, state: Array, scale: float
) -> tuple[Rounded, Rounded]:
    """Returns bounds for one head. The kernel reads the state with a, decays it, then adds along b, then along k."""
    s = Rounded(state)
    out: list[Rounded] = []
    for t in range(len(v)):
        seen = (Rounded(a[t][:, None]) * s).sum(0)
        s = s * Rounded(decay[t][:, None]).exp() + Rounded(b[t][:, None]) * seen
        s = s + Rounded(k[t][:, None]) * Rounded(v[t])
        out.append((Rounded(q[t][:, None]) * s).sum(0) * Rounded(np.float64(scale), abs(scale) * U))
    return Rounded(*(np.array([getattr(o, part) for o in out]).reshape(v.shape) for part in ("value", "error"))), s


def selective(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, z: Array | None, state: Array, softplus: bool,
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> tuple[Array, Array]:  # fmt: skip
    """Computes one head, unrolled: with D_i = dt_1 + ... + dt_i, the state h_i after token i is
    exp(D_i a) h_0 + sum over j <= i of exp((D_i - D_j) a) dt_j x_j b_j^T, and y_i = (h_i c_i + d x_i) z_i sigmoid(z_i).

    The matrix form of the selective state space model: Dao, Gu 2024, arXiv:2405.21060, section 3; softplus of dt and
    the gate: Gu, Dao 2023, arXiv:2312.00752. x, dt, z: `token dim`; a, state: `dim state`; b, c: `token state`;
    d: `dim`. Returns y and h_0, h_1, ...: `token+1 dim state`.
    """
    dt = np.clip(np.logaddexp(0, dt) if softplus else dt, *limits)
    total = np.cumsum(dt, axis=0)[:, :, None]
    states = [state]
    for i in range(len(x)):
        h = np.exp(total[i] * a) * state
        for j in range(i + 1):
            h = h + np.exp((total[i] - total[j]) * a) * np.outer(dt[j] * x[j], b[j])
        states.append(h)
    y = np.array([h @ read + d * value for h, read, value in zip(states[1:], c, x, strict=True)]).reshape(x.shape)
    return y if z is None else y * z / (1 + np.exp(-z)), np.array(states)


def softplus_bound(x: Rounded) -> Rounded:
    """Returns softplus(x) with a bound: 16 roundings (log 4 ulp, quotient 2 ulp, sums, a product), and those of exp(x).

    A relative error e of exp(x) is an error of e sigmoid(x) in log(1 + exp(x)). Above 20 a kernel may return x itself,
    which is less than softplus(x) by at most exp(-x).
    """
    value = np.logaddexp(0, x.value)
    slope = np.exp(x.value - value)
    ulps = 16 + (8 + 2 * np.abs(x.value)) * slope / value
    linear = np.where(x.value + x.error >= 20, np.exp(x.error - x.value), 0)
    inherited = np.minimum(x.error, value * np.expm1(x.error)) + linear
    return Rounded(value, inherited + ulps * U * (value + inherited) + TINY)


def selective_bound(
    x: Array, dt: Array, bias: Array, a: Array, b: Array, c: Array, d: Array, z: Array | None, state: Array,
    softplus: bool, limits: tuple[float, float] = (-np.inf, np.inf),
) -> tuple[list[Rounded], list[Rounded]]:  # fmt: skip
    """Returns bounds of one head's outputs and of h_0, h_1, ..., in fp32. bias: `dim`, added to dt."""
    s = Rounded(state)
    out, states = [], [s]
    for t in range(len(x)):
        step = Rounded(dt[t][:, None]) + Rounded(bias[:, None])
        step = softplus_bound(step) if softplus else step
        step = Rounded(np.clip(step.value, *limits), step.error)
        s = s * (step * Rounded(a)).exp() + step * Rounded(x[t][:, None]) * Rounded(b[t])
        y = (s * Rounded(c[t])).sum(1) + Rounded(d) * Rounded(x[t])
        out.append(y if z is None else y * Rounded(z[t]).over_one_plus(Rounded(-z[t]).exp()))
        states.append(s)
    return out, states


class Mamba3(NamedTuple):
    """Inputs, weights and state (`angle`, `ssm`, `k`, `v`) of one head of Mamba-3.

    x, z: `token dim`; b, c: `token state`; dt, decay, trap: `token`; rotation: `token angle`; b_bias, c_bias: `state`;
    d: a number; angle: `angle`; ssm: `dim state`; k: `state`; v: `dim`.
    """

    x: Array
    b: Array
    c: Array
    dt: Array
    decay: Array
    trap: Array
    rotation: Array
    b_bias: Array
    c_bias: Array
    d: Array
    z: Array | None
    angle: Array
    ssm: Array
    k: Array
    v: Array


def mamba3(head: Mamba3) -> tuple[Array, tuple[Array, ...]]:
    """Computes one head, unrolled: with D_i = decay_1 + ... + decay_i and n = sigmoid(trap), the state h_i after token
    i is exp(D_i) h_0 + sum over j = 0 .. i of exp(D_i - D_j) w_j v_j k_j^T, where w_j = dt_j n_j + dt_(j+1) (1 -
    n_(j+1)). The second term of w_j is 0 for the last token, j = i; the first is 0 for j = 0, the v and k of the state.

    This is a trapezoidal rule over each two inputs, as in `mamba_ssm` 2.3.2. Keys and queries are complex numbers,
    turned by pi (tanh(r_1) dt_1 + ... + tanh(r_i) dt_i) plus the angle of the state. Returns y, and the angle, h, k
    and v after the last token.
    """
    count, pairs = len(head.x), head.k.shape[0] // 2
    turn = np.zeros((count + 1, pairs))
    turn[:, : len(head.angle)] = head.angle
    turn[1:, : len(head.angle)] += np.cumsum(np.pi * np.tanh(head.rotation) * head.dt[:, None], 0)

    def turned(vectors: Array, bias: Array) -> Array:
        points = (vectors + bias)[:, 0::2] + 1j * (vectors + bias)[:, 1::2]
        points = points * np.exp(1j * turn[1:])
        return np.stack([points.real, points.imag], -1).reshape(count, 2 * pairs)

    keys, queries = np.concatenate([head.k[None], turned(head.b, head.b_bias)]), turned(head.c, head.c_bias)
    values, total = np.concatenate([head.v[None], head.x]), np.concatenate([[0.0], np.cumsum(head.decay)])
    now = 1 / (1 + np.exp(-head.trap))
    own, later = np.concatenate([[0.0], head.dt * now]), np.append(head.dt * (1 - now), 0.0)
    out, h = np.zeros_like(head.x), head.ssm
    for i in range(1, count + 1):
        h = np.exp(total[i]) * head.ssm
        for j in range(i + 1):
            weight = own[j] + (later[j] if j < i else 0)
            h = h + np.exp(total[i] - total[j]) * weight * np.outer(values[j], keys[j])
        out[i - 1] = h @ queries[i - 1] + head.d * head.x[i - 1]
    out = out if head.z is None else out * head.z / (1 + np.exp(-head.z))
    return out, (turn[-1, : len(head.angle)], h, keys[-1], values[-1])


def mamba3_bound(head: Mamba3) -> tuple[list[Rounded], tuple[Rounded, ...]]:
    """Returns bounds of one head's outputs, and of the new angle, h, k and v, all in fp32."""

    def sigmoid(x: Array) -> Rounded:
        return Rounded(np.ones_like(x)).over_one_plus(Rounded(-x).exp())

    def turned(x: Array, bias: Array, cosine: Rounded, sine: Rounded) -> Rounded:
        point = Rounded(x) + Rounded(bias)
        even, odd = point[0::2], point[1::2]
        parts = even * cosine - odd * sine, even * sine + odd * cosine
        return Rounded(*(np.stack([getattr(p, name) for p in parts], -1).ravel() for name in ("value", "error")))

    angle, s, k, v = (Rounded(kept) for kept in (head.angle, head.ssm, head.k, head.v))
    still = np.zeros(head.k.shape[0] // 2 - len(head.angle))
    one, pi, out = Rounded(np.ones(())), Rounded(np.array(np.pi), np.pi * U), []
    for t in range(len(head.x)):
        dt, decay, now = Rounded(head.dt[t]), Rounded(head.decay[t]).exp(), sigmoid(head.trap[t])
        twice = sigmoid(2 * head.rotation[t])
        angle = angle + (twice + twice - one) * (dt * pi)
        # Kernels subtract whole turns in two parts. The roundings are at most 3 of the angle plus one turn.
        angle = Rounded(angle.value, angle.error + 3 * U * (np.abs(angle.value) + 2 * np.pi))
        full, error = (np.concatenate([part, still]) for part in (angle.value, angle.error))
        cosine, sine = (Rounded(wave(full), error + 4 * U) for wave in (np.cos, np.sin))
        key, query = (
            turned(vector[t], bias, cosine, sine) for vector, bias in ((head.b, head.b_bias), (head.c, head.c_bias))
        )
        x = Rounded(head.x[t])
        s = s * decay + (decay * dt * (one - now) * v)[:, None] * k + (dt * now * x)[:, None] * key
        k, v = key, x
        y = (s * query).sum(1) + Rounded(head.d) * x
        out.append(y if head.z is None else y * (Rounded(head.z[t]) * sigmoid(head.z[t])))
    return out, (angle, s, k, v)

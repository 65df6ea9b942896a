"""Runs memstate's kernels on slots where a layer of Transformers asks for one token of decode: nothing is gathered.

The cache hands a layer a *reference* to its state instead of a tensor. The layer gives the reference to one of the few
functions that the modelling code calls by name. Here such a function, if it is given a reference, launches the kernel
on the slots that the reference names. With a tensor it is what it was.

    layer ── get_conv_state ──▶ Reference(plane, step) ── causal_conv1d_update(x, reference, ..) ──▶ conv_step on slots
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.requests.steps import Step


class Reference:
    """A state of a batch, in the slots where a step reads and writes it.

    Args:
        plane: one layer of a plane, `slot ...`.
        step: the step.
        backend: runs the kernel.
    """

    def __init__(self, plane: Tensor, step: Step, backend: Backend) -> None:
        self.plane, self.step, self.backend = plane, step, backend

    @property
    def slots(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The vectors that every kernel takes: read, write, snapshot, tokens."""
        return self.step.read, self.step.write, self.step.snapshot, self.step.tokens

    @property
    def shape(self) -> torch.Size:
        """Of the state of the batch."""
        return torch.Size((len(self.step.numbers), *self.plane.shape[1:]))

    def __getitem__(self, at: tuple[slice, int]) -> "Reference":
        """Returns a reference to a part of every state, such as one head: `state[:, head]`."""
        return Reference(self.plane[at], self.step, self.backend)

    def to(self, *_: Any, **__: Any) -> "Reference":
        """Returns itself: the kernels take any dtype."""
        return self

    def copy_(self, state: object) -> "Reference":
        """Does nothing: the kernel has stored the state.

        Args:
            state: this reference.

        Raises:
            InvalidArgument: it is a tensor, so a layer computed the state by itself.
        """
        if state is not self:
            raise InvalidArgument("a layer computed its state without the kernels on slots: use kernels='gathered'")
        return self


def conv(
    hidden_states: Tensor, conv_state: Reference, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """`causal_conv1d_update` on slots.

    Args:
        hidden_states: `batch channel token`.
        conv_state: of `channel tap-1`.
        weight: `channel tap`.
        bias: `channel`, or None.
        activation: "silu" or None.
    """
    ref = conv_state
    inputs, window = dense(hidden_states.transpose(1, 2)), ref.plane.transpose(1, 2)
    bias = None if bias is None else dense(bias)
    return ref.backend.conv_step(inputs, dense(weight), bias, window, *ref.slots, activation=activation).transpose(1, 2)


def delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Reference,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, scale: float | None = None,
) -> tuple[Tensor, Reference]:  # fmt: skip
    """The gated delta rule and Kimi's rule, one token a row, on slots.

    Args:
        query: `batch token key_head key`.
        key: `batch token key_head key`.
        value: `batch token head value`.
        g: log decay, `batch token head` or `batch token head key`.
        beta: `batch token head`.
        initial_state: of `head key value`.
        output_final_state: ignored: the state is in its slot.
        use_qk_l2norm_in_kernel: whether to normalise query and key.
        scale: of the output.
    """
    ref = initial_state
    out = ref.backend.gated_delta_step(
        dense(query), dense(key), dense(value), dense(g), dense(beta), ref.plane, *ref.slots, scale=scale,
        normalize=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out, ref


def mamba2(
    state: Reference, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
) -> Tensor:  # fmt: skip
    """The selective state update of Mamba-2 on slots; models expand what is one value a head.

    Args:
        state: of `head dim state`.
        hidden_states: `batch head dim`.
        dt: `batch head dim`, one value a head.
        A: `head dim state`, one value a head.
        B: `batch group state`.
        C: `batch group state`.
        D: `head dim`, one value a head, or None.
        z: `batch head dim`, or None.
        dt_bias: `head dim`, one value a head, or None.
        dt_softplus: whether dt is the softplus of the sum.
    """
    d, bias = (None if one is None else dense(one[:, 0]) for one in (D, dt_bias))
    x, step, b, c = (dense(one[:, None]) for one in (hidden_states, dt[:, :, 0], B, C))
    out = state.backend.selective_step(
        x, step, dense(A[:, 0, 0]), b, c, state.plane, *state.slots, d=d,
        z=None if z is None else dense(z[:, None]), dt_bias=bias, softplus=dt_softplus,
    )  # fmt: skip
    return out[:, 0]


def mamba1(
    state: Reference, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
) -> Tensor:  # fmt: skip
    """The selective state update of Mamba-1 on slots: all channels are one head.

    Args:
        state: of `channel state`.
        hidden_states: `batch channel`.
        dt: `batch channel`.
        A: `channel state`.
        B: `batch state`.
        C: `batch state`.
        D: `channel`, or None.
        z: `batch channel`, or None.
        dt_bias: `channel`, or None.
        dt_softplus: whether dt is the softplus of the sum.
    """
    x, step, b, c = (dense(one[:, None, None]) for one in (hidden_states, dt, B, C))
    d, bias = (None if one is None else dense(one[None]) for one in (D, dt_bias))
    out = state.backend.selective_step(
        x, step, dense(A[None]), b, c, state.plane.unsqueeze(1), *state.slots, d=d,
        z=None if z is None else dense(z[:, None, None]), dt_bias=bias, softplus=dt_softplus,
    )  # fmt: skip
    return out[:, 0, 0]


def dense(tensor: Tensor) -> Tensor:
    """Returns the tensor, contiguous and from a multiple of 16 bytes on, as kernels want it: copied if it is not.

    Args:
        tensor: an activation or a weight of a layer.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "causal_conv1d_update": conv,
    "torch_recurrent_gated_delta_rule": delta,
    "recurrent_kimi_delta_attention": delta,
    "mamba2_selective_state_update": mamba2,
    "mamba_selective_state_update": mamba1,
}


def install(model: Any) -> None:
    """Lets the functions of a model's modelling code take references. Calls without one do what they did.

    Args:
        model: the model.
    """
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, ours in FUNCTIONS.items():
            theirs = getattr(module, name, None)
            if theirs is not None and not hasattr(theirs, "takes_references"):
                setattr(module, name, _either(theirs, ours))


def _either(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    known = inspect.signature(ours).parameters

    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(one, Reference) for one in (*args, *kwargs.values())):
            with torch.no_grad():  # it changes slots
                return ours(*args, **{name: value for name, value in kwargs.items() if name in known})
        return theirs(*args, **kwargs)

    function.takes_references = True  # type: ignore[attr-defined]
    return function

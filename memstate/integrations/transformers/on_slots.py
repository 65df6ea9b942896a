"""Runs memstate's kernels on slots where a layer of Transformers decodes, so that no state is gathered.

The cache hands a layer a *reference* to its state instead of a tensor. The layer passes the reference to one of a few
functions that the modelling code calls by name. `install` wraps these functions: for a reference, the wrapped function
launches the kernel on the slots that the reference names; for a tensor, it calls the original function.

    layer ── get_conv_state ──▶ Reference(plane, step) ── causal_conv1d_update(x, reference, ..) ──▶ conv_step on slots

In a step with guesses, a row has several tokens, and layers call the functions for chunks. Before that,
they call `torch.cat` on the window and the new inputs. If the window is a reference, this returns a `Joined` for the
convolution.
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
from memstate.kernels.tables import Tail
from memstate.requests.steps import Step


class Reference:
    """The states of a batch, in the slots where a step reads and writes them.

    Args:
        plane: one layer of a plane, `slot ...`.
        step: the step.
        backend: backend that runs the kernel.
        tail: the memory for tails of this layer (rings); None if rows have no tail.

    Attributes:
        note: function that is called with the inputs that a tail keeps, in the kernel's form; None: no function.
    """

    def __init__(self, plane: Tensor, step: Step, backend: Backend, tail: Tail | None = None) -> None:
        self.plane, self.step, self.backend, self.tail = plane, step, backend, tail
        self.note: Callable[[dict[str, Tensor]], None] | None = None

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Lets `torch.cat` of a reference and inputs return a `Joined`. Other torch functions refuse a reference."""
        if function is not torch.cat:
            return NotImplemented
        window, inputs = args[0]
        return Joined(window, inputs)

    def dense(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns activations as kernels need them: `dense`, and in the dtype of the tail, also under autocast."""
        dtype = None if self.tail is None else self.tail[0].dtype
        return tuple(dense(one if dtype is None else one.to(dtype)) for one in inputs)

    def behind(self, **inputs: Tensor) -> dict[str, Any]:
        """Returns the arguments by which the kernel writes the tail of each row; none if rows have no tail.

        Args:
            **inputs: the kernel's input for each field of the tail, `batch token ...`.
        """
        if self.note is not None:
            self.note(inputs)
        return {} if self.tail is None else {"tail": self.tail, "cursor": self.step.cursor}

    @property
    def slots(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four vectors that every kernel takes: slots to read, to write, for snapshots; and numbers of tokens."""
        return self.step.read, self.step.write, self.step.snapshot, self.step.tokens

    @property
    def shape(self) -> torch.Size:
        """Shape of the states of the batch."""
        return torch.Size((len(self.step.numbers), *self.plane.shape[1:]))

    def __getitem__(self, at: tuple[slice, int]) -> "Reference":
        """Returns a reference to a part of every state, such as one head: `state[:, head]`. It has no tail."""
        return Reference(self.plane[at], self.step, self.backend)

    def to(self, *_: Any, **__: Any) -> "Reference":
        """Returns this reference unchanged, because the kernels take any dtype."""
        return self

    def copy_(self, state: object) -> "Reference":
        """Does nothing, because the kernel has stored the state.

        Args:
            state: this reference.

        Raises:
            InvalidArgument: `state` is a tensor: a layer computed the state by itself.
        """
        if state is not self:
            raise InvalidArgument("a layer computed its state without the kernels on slots: use kernels='gathered'")
        return self


class Joined:
    """A window and the new inputs after it, in place of the tensor that `torch.cat` would return.

    Args:
        window: reference to states of `channel tap-1`.
        inputs: `batch channel token`.
    """

    def __init__(self, window: Reference, inputs: Tensor) -> None:
        self.window, self.inputs = window, inputs

    def __getitem__(self, at: object) -> Reference:
        """Returns the reference to the window. The kernel updates the window, so the cache need not store it."""
        return self.window


def conv(
    hidden_states: Tensor, conv_state: Reference, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """Does on slots what `causal_conv1d_update` does: one step of a causal convolution.

    Args:
        hidden_states: the inputs, `batch channel token`.
        conv_state: reference to states of `channel tap-1`.
        weight: the taps of each channel, `channel tap`.
        bias: number that is added to each channel, `channel`, or None.
        activation: "silu" or None.
    """
    ref = conv_state
    (inputs,), window = ref.dense(hidden_states.transpose(1, 2)), ref.plane.transpose(1, 2)
    bias = None if bias is None else dense(bias)
    out = ref.backend.conv_step(
        inputs, dense(weight), bias, window, *ref.slots, activation=activation, **ref.behind(x=inputs)
    )
    return out.transpose(1, 2).to(hidden_states.dtype)


def conv_chunk(
    hidden_states: Joined, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Does on slots what `causal_conv1d_fn` does after a window. Returns the outputs of the new tokens only.

    Args:
        hidden_states: the window and the inputs after it.
        weight: the taps of each channel, `channel tap`.
        bias: number that is added to each channel, `channel`, or None.
        activation: "silu" or None.
    """
    return conv(hidden_states.inputs, hidden_states.window, weight, bias, activation)


def delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Reference,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, scale: float | None = None,
) -> tuple[Tensor, Reference]:  # fmt: skip
    """Computes the gated delta rule, or Kimi's delta rule, on slots. Returns the outputs and the reference.

    Args:
        query: the queries, `batch token key_head key`.
        key: the keys, `batch token key_head key`.
        value: the values, `batch token head value`.
        g: logarithm of the decay, `batch token head` or `batch token head key`.
        beta: the learning rates, `batch token head`.
        initial_state: reference to states of `head key value`.
        output_final_state: ignored: the kernel stores the state in its slot.
        use_qk_l2norm_in_kernel: whether to normalise query and key.
        scale: factor of the output.
    """
    ref, decay, rate = initial_state, dense(g), dense(beta)
    q, k, v = ref.dense(query, key, value)
    out = ref.backend.gated_delta_step(
        q, k, v, decay, rate, ref.plane, *ref.slots, scale=scale, normalize=use_qk_l2norm_in_kernel,
        **ref.behind(k=k, v=v, gate=decay, beta=rate),
    )  # fmt: skip
    return out.to(query.dtype), ref


def mamba2(
    state: Reference, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
) -> Tensor:  # fmt: skip
    """Computes the selective state update of Mamba-2 on slots. Models expand one value per head to all its elements.

    Args:
        state: reference to states of `head dim state`.
        hidden_states: the inputs, `batch head dim`.
        dt: the step sizes, `batch head dim`, one value per head.
        A: the decay rates, `head dim state`, one value per head.
        B: vectors by which inputs are written to the state, `batch group state`.
        C: vectors by which outputs are read from the state, `batch group state`.
        D: factor of the input that is added to the output, `head dim`, one value per head, or None.
        z: the gates of the output, `batch head dim`, or None.
        dt_bias: number that is added to `dt`, `head dim`, one value per head, or None.
        dt_softplus: whether the kernel takes the softplus of `dt + dt_bias`.
    """
    d, bias = (None if one is None else one[:, 0] for one in (D, dt_bias))
    x, step, b, c = (one[:, None] for one in (hidden_states, dt[:, :, 0], B, C))
    gate = None if z is None else z[:, None]
    return mamba2_chunk(x, step, A[:, 0, 0], b, c, d, gate, bias, state, dt_softplus)[0][:, 0]


def mamba2_chunk(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Reference | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Reference]:  # fmt: skip
    """Computes the scan of Mamba-2 on slots. Returns the outputs and the reference.

    Args:
        hidden_states: the inputs, `batch token head dim`.
        dt: the step sizes, `batch token head`.
        A: the decay rates, `head`.
        B: vectors by which inputs are written to the state, `batch token group state`.
        C: vectors by which outputs are read from the state, `batch token group state`.
        D: factor of the input that is added to the output, `head`, or None.
        z: the gates of the output, `batch token head dim`, or None.
        dt_bias: number that is added to `dt`, `head`, or None.
        initial_states: reference to states of `head dim state`.
        dt_softplus: whether the kernel takes the softplus of `dt + dt_bias`.
    """
    assert initial_states is not None
    ref, step, a = initial_states, dense(dt), dense(A)
    x, b, c = ref.dense(hidden_states, B, C)
    d, bias = (None if one is None else dense(one) for one in (D, dt_bias))
    gate = None if z is None else ref.dense(z)[0]
    out = ref.backend.selective_step(
        x, step, a, b, c, ref.plane, *ref.slots, d=d, z=gate, dt_bias=bias, softplus=dt_softplus,
        **ref.behind(x=x, b=b, dt=step),
    )  # fmt: skip
    return out.to(hidden_states.dtype), ref


def mamba1(
    state: Reference, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
) -> Tensor:  # fmt: skip
    """Computes the selective state update of Mamba-1 on slots. All channels are one head.

    Args:
        state: reference to states of `channel state`.
        hidden_states: the inputs, `batch channel`.
        dt: the step sizes, `batch channel`.
        A: the decay rates, `channel state`.
        B: vector by which inputs are written to the state, `batch state`.
        C: vector by which outputs are read from the state, `batch state`.
        D: factor of the input that is added to the output, `channel`, or None.
        z: the gates of the output, `batch channel`, or None.
        dt_bias: number that is added to `dt`, `channel`, or None.
        dt_softplus: whether the kernel takes the softplus of `dt + dt_bias`.
    """
    x, step, b, c = (dense(one[:, None, None]) for one in (hidden_states, dt, B, C))
    d, bias = (None if one is None else dense(one[None]) for one in (D, dt_bias))
    out = state.backend.selective_step(
        x, step, dense(A[None]), b, c, state.plane.unsqueeze(1), *state.slots, d=d,
        z=None if z is None else dense(z[:, None, None]), dt_bias=bias, softplus=dt_softplus, **state.behind(),
    )  # fmt: skip
    return out[:, 0, 0]


def dense(tensor: Tensor) -> Tensor:
    """Returns the tensor if it is contiguous and aligned to 16 bytes, as kernels need it; otherwise a copy that is.

    Args:
        tensor: an activation or a weight of a layer.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "causal_conv1d_update": conv,
    "causal_conv1d_fn": conv_chunk,
    "torch_recurrent_gated_delta_rule": delta,
    "torch_chunk_gated_delta_rule": delta,
    "recurrent_kimi_delta_attention": delta,
    "chunk_kimi_delta_attention": delta,
    "mamba2_selective_state_update": mamba2,
    "mamba2_chunk_scan": mamba2_chunk,
    "mamba_selective_state_update": mamba1,
}


REFERENCES: Final = frozenset((Reference, Joined))


def install(model: Any) -> None:
    """Lets the functions of a model's modelling code accept references. Calls with tensors run as before.

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
    launched: Callable[..., Any] = torch.compiler.disable(ours)  # Dynamo must not trace a launch

    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not REFERENCES.isdisjoint(map(type, (*args, *kwargs.values()))):
            with torch.no_grad():  # the kernel writes to slots
                return launched(*args, **{name: value for name, value in kwargs.items() if name in known})
        return theirs(*args, **kwargs)

    function.takes_references = True  # type: ignore[attr-defined]
    return function

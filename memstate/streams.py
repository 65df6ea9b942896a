"""Keeps the device work of one manager in one order: on one stream of its device, outside of graph captures."""

import torch

from memstate.errors import InvalidArgument
from memstate.kernels.dispatch import on

_STREAMS: dict[tuple[int | None, int], "torch.cuda.Stream"] = {}  # (index of the device, handle) -> stream


def current_stream(device: torch.device) -> "torch.cuda.Stream":
    """Returns the current stream of a CUDA device. The same stream is always the same object.

    It asks for the handle of the stream, which takes 0.3 us on the host of an H100; `torch.cuda.current_stream` takes
    5 us.

    Args:
        device: the device, with its index.

    Syncs: no.
    """
    handle_of = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # private: Triton calls it before each launch
    if handle_of is None:
        return torch.cuda.current_stream(device)
    key = device.index, handle_of(device.index)
    if (stream := _STREAMS.get(key)) is None:
        stream = _STREAMS[key] = torch.cuda.current_stream(device)
    return stream


def mark(device: torch.device) -> "torch.cuda.Event":
    """Records an event on the current stream of a device.

    Syncs: no.
    """
    event = torch.cuda.Event()
    event.record(current_stream(device))
    return event


class WorkStream:
    """Remembers the stream on which the slots of an allocator change owners, and refuses calls on another stream.

    The first checked call decides the stream, which then waits for the stream on which the allocator was built. On a
    CPU there are no streams, and `require` allows every call.

    Args:
        device: where the slots are.

    Attributes:
        matters: whether the device has streams, so that `require` can refuse a call.
    """

    def __init__(self, device: torch.device) -> None:
        self.matters = device.type == "cuda"
        self._device = device if self.matters else None
        self._stream: torch.cuda.Stream | None = current_stream(device) if self._device else None
        self._decided = False

    def __repr__(self) -> str:
        return f"WorkStream({self._stream})"

    def require(self) -> None:
        """Refuses a call that comes on another stream, or while a graph is captured.

        Raises:
            InvalidArgument: the current stream is not the remembered one, or captures a graph; nothing changed.

        Syncs: no.
        """
        if self._device is None:
            return
        self.refuse_capture()
        current = current_stream(self._device)
        if current is not self._stream:
            if current != self._stream and self._decided:
                raise InvalidArgument(
                    f"this call comes on {current}, but the manager works on {self._stream}: call use_stream(...) "
                    "first, or make all calls under torch.cuda.stream(...) with one stream"
                )
            self.use(current)
        self._decided = True

    @property
    def capturing(self) -> bool:
        """Whether the current stream captures a CUDA graph."""
        if self._device is None:
            return False
        with on(self._device):
            return torch.cuda.is_current_stream_capturing()

    def refuse_capture(self) -> None:
        """Refuses a call while the current stream captures a CUDA graph: a replay would not repeat it.

        Raises:
            InvalidArgument: the current stream captures a graph; nothing changed.

        Syncs: no.
        """
        if self.capturing:
            raise InvalidArgument(
                f"this call comes while {torch.cuda.current_stream(self._device)} captures a CUDA graph: make "
                "this call before or after the capture; launch(batch) can be captured"
            )

    def use(self, stream: "torch.cuda.Stream") -> None:
        """See `DeviceCalls.use_stream`."""
        if self._device is None or self._stream is None:
            raise InvalidArgument(f"use_stream({stream!r}): the states are on the CPU, which has no streams")
        if not isinstance(stream, torch.cuda.Stream) or stream.device != self._device:
            raise InvalidArgument(f"use_stream({stream!r}): expected a torch.cuda.Stream of {self._device}")
        self.refuse_capture()
        if stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream, self._decided = stream, True

"""Fakes CUDA devices: host tensors that say they are on a GPU, and streams and events that record their order.

Reference kernels can compute on a fake tensor, because its memory is host memory. Work runs at once. Clocks record the
order that streams and events would guarantee on a GPU: a clock says how many pieces of work of each stream have run.

    work.clock    how much of each stream had certainly run when this work began
    cuda.host     how much of each stream the host knows to have run

A stream that lags behind (`cuda.lag`) runs a launch, or a copy that need not block, when other work comes behind it or
when the test says so. No work runs before the work that its clock names.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from memstate.kernels.dispatch import OPS

Clock = dict["Stream", int]
HOST = torch.device("cpu")
QUIET = (  # they read and write no bytes of a tensor
    "__get__", "view", "reshape", "detach", "numel", "dim", "size", "stride", "is_contiguous", "__getitem__", "__len__",
    "data_ptr", "element_size", "storage_offset", "is_neg", "is_conj", "empty", "empty_like",
)  # fmt: skip


def joined(*clocks: Clock) -> Clock:
    """Returns a clock with, for each stream, the largest number of these clocks."""
    return {stream: max(clock.get(stream, 0) for clock in clocks) for stream in {s for c in clocks for s in c}}


@dataclass(eq=False)
class Work:
    """One piece of work on a stream. what: the name of the op, or of the torch function, such as "copy_"."""

    what: str
    stream: "Stream"
    number: int
    clock: Clock = field(repr=False)

    @property
    def device(self) -> int:
        return self.stream.index

    def behind(self, other: "Work") -> bool:
        """Whether this work always begins after the other has ended, however fast the streams are."""
        return self.clock.get(other.stream, 0) >= other.number


class Event:
    """A fake event. Its clock says what has run when the event is reached."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock | None = None
        self.stream: Stream | None = None

    @property
    def device(self) -> torch.device | None:
        return self.stream.device if self.stream else None

    def record(self, stream: "Stream | None" = None) -> None:
        self.stream = stream or CUDA.current_stream()
        self.clock = dict(self.stream.clock)

    def query(self) -> bool:
        return all(CUDA.host.get(stream, 0) >= n for stream, n in (self.clock or {}).items())

    def synchronize(self) -> None:
        CUDA.host = joined(CUDA.host, self.clock or {})
        CUDA.do(CUDA.host)


class Stream:
    """A fake stream. Its clock says what has run when its next work begins."""

    def __init__(self, device: "torch.device | int | None" = None) -> None:
        self.index = CUDA.index_of(device)
        self.clock: Clock = {}
        CUDA.streams.append(self)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def wait_event(self, event: Event) -> None:
        self._wait(event.clock or {})

    def wait_stream(self, stream: "Stream") -> None:
        self._wait(stream.clock)

    def _wait(self, clock: Clock) -> None:
        CUDA.waits.append(self)
        self.clock = joined(self.clock, clock)

    def synchronize(self) -> None:
        CUDA.host = joined(CUDA.host, self.clock)
        CUDA.do(CUDA.host)

    def __repr__(self) -> str:
        return f"<fake stream {CUDA.streams.index(self) if self in CUDA.streams else '?'} of cuda:{self.index}>"


class FakeCuda:
    """A stand-in for `torch.cuda`.

    Attributes:
        current: the current device.
        capturing: streams that capture a graph.
        work: all work of all devices, in the order of the calls.
        host: how much of each stream the host knows to have run.
        waits: streams that were made to wait for others, once for each wait.
        lagging: streams that lag behind, with the work that they have not run.
        kept: tensors that `record_stream` named, with the stream.
    """

    def __init__(self) -> None:
        self.current, self.devices = 0, 2
        self.streams: list[Stream] = []
        self.capturing: set[Stream] = set()
        self.work: list[Work] = []
        self.host: Clock = {}
        self.waits: list[Stream] = []
        self.lagging: dict[Stream, deque[tuple[Work, Callable[[], Any]]]] = {}
        self.kept: list[tuple[torch.Tensor, Stream]] = []
        self.pinned_on: list[int] = []  # the current device at each allocation of pinned memory
        self.on_stream: dict[int, Stream] = {}

    def index_of(self, device: "torch.device | int | None") -> int:
        index = torch.device(device).index if isinstance(device, torch.device | str) else device
        return self.current if index is None else index

    def current_stream(self, device: "torch.device | int | None" = None) -> Stream:
        index = self.index_of(device)
        if index not in self.on_stream:
            self.on_stream[index] = self.new_stream(index)
        return self.on_stream[index]

    def new_stream(self, device: "torch.device | int | None" = None) -> Stream:
        return Stream(device)

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream() in self.capturing

    def synchronize(self, device: "torch.device | int | None" = None) -> None:
        index = self.index_of(device)
        self.host = joined(self.host, *(stream.clock for stream in self.streams if stream.index == index))
        self.do(self.host)

    def lag(self, *streams: Stream) -> None:
        """Makes streams lag: from now on their work waits until `do` or `advance` runs it."""
        self.lagging |= {stream: deque() for stream in streams}

    def do(self, clock: Clock) -> None:
        """Runs all work of lagging streams that has run according to `clock`."""
        for stream, number in clock.items():
            queue = self.lagging.get(stream, deque())
            while queue and queue[0][0].number <= number:
                self._run(queue)

    def advance(self, stream: Stream, most: int) -> None:
        """Runs at most `most` pieces of work of a lagging stream, and lets the host know that they have run."""
        for _ in range(min(most, len(self.lagging[stream]))):
            work = self._run(self.lagging[stream])
            self.host = joined(self.host, work.clock, {stream: work.number})

    def _run(self, queue: deque[tuple[Work, Callable[[], Any]]]) -> Work:
        """Runs the next work of a lagging stream, after all work of others for which it waits."""
        work, call = queue.popleft()
        self.do(work.clock)
        call()
        return work

    @contextmanager
    def device(self, device: "torch.device | int") -> Iterator[None]:
        before, self.current = self.current, self.index_of(device)
        yield
        self.current = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with self.device(stream.index):
            before, self.on_stream[stream.index] = self.current_stream(), stream
            yield
            self.on_stream[stream.index] = before

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        """Captures a graph on a stream of its own, as `torch.cuda.graph` does."""
        self.capturing.add(stream)
        with self.stream(stream):
            yield
        self.capturing.discard(stream)

    def cudart(self) -> SimpleNamespace:
        def register(address: int, nbytes: int, flags: int) -> int:
            self.pinned_on.append(self.current)
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)

    def give(self, what: str, stream: Stream) -> Work:
        """Records work on a stream. The work begins after everything that the host knows to have run."""
        clock = joined(stream.clock, self.host)
        self.work.append(Work(what, stream, clock.get(stream, 0) + 1, clock))
        stream.clock = clock | {stream: self.work[-1].number}
        return self.work[-1]

    def launch(self, what: str) -> Work:
        """Records a launch on the current stream of the current device, where Triton would launch."""
        return self.give(what, self.current_stream())

    def given(self, *what: str) -> list[Work]:
        """Returns the work with these names."""
        return [work for work in self.work if work.what in what]


CUDA = FakeCuda()


class OnDevice(torch.Tensor):
    """A tensor in host memory that says it is on a device. Like a tensor on a GPU, it refuses `numpy()`."""

    index: int

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a tensor of a device has no numpy array")

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        CUDA.kept.append((self, stream))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a host tensor as a fake tensor of a device; for the CPU the tensor itself."""
    if device.type == "cpu":
        return tensor
    fake = tensor.as_subclass(OnDevice)
    fake.index = CUDA.index_of(device)
    return fake


def call(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a torch function on the host tensors inside fake tensors. Records work on the device's current stream."""
    if func is torch.device:
        return func(*args, **kwargs)
    name, to, inside = getattr(func, "__name__", ""), target(args, kwargs), list[OnDevice]()
    name, to = (name, torch.device("cpu")) if name == "cpu" else (name, to)

    def below(x: Any) -> Any:
        if isinstance(x, OnDevice):
            inside.append(x)
            return x.as_subclass(torch.Tensor)
        return x

    with torch._C.DisableTorchFunctionSubclass():
        plain, named = tree_map(below, (tuple(args), kwargs))
    place = to if to is not None else inside[0].device if inside else HOST
    busy = inside[0].device if inside else place
    stream = CUDA.current_stream(busy) if busy.type == "cuda" and name not in QUIET else None
    mixed = name == "copy_" and len(inside) < 2 and not named.get("non_blocking")
    blocks = mixed or name in ("tolist", "item") or (inside and place.type == "cpu")
    if stream is not None:
        work = CUDA.give(name, stream)
        if name == "copy_" and not blocks and stream in CUDA.lagging:
            CUDA.lagging[stream].append((work, lambda: func(*plain, **named)))
            return args[0]
        CUDA.do(work.clock)
        if blocks:
            CUDA.host = joined(CUDA.host, stream.clock)
    with torch._C.DisableTorchFunctionSubclass():
        if named.get("pin_memory"):
            CUDA.pinned_on.append(CUDA.current)
            named["pin_memory"] = False
        if to is not None:  # the function makes or copies a tensor: do it in host memory
            plain = tuple(HOST if is_device(x) else x for x in plain)
            named |= {"device": HOST} if "device" in named else {}
        made = func(*plain, **named)
        if name in ("to", "cpu", "as_tensor") and to is not None and plain and made is plain[0]:
            made = made.clone() if args[0].device != to else made  # a transfer to another device is a copy
    if plain and made is plain[0]:
        return args[0]  # an operation in place
    return tree_map(lambda x: placed(x, place) if type(x) is torch.Tensor else x, made)


def is_device(x: Any) -> bool:
    return isinstance(x, torch.device) or (isinstance(x, str) and x.split(":")[0] in ("cuda", "cpu"))


def target(args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """Returns the device that the arguments of a call name, or None."""
    named = [x for x in (kwargs.get("device"), *args) if is_device(x)]
    return torch.device(named[0]) if named else None


class Placing(TorchFunctionMode):
    """A mode in which torch functions make tensors on fake devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Replaces `torch.cuda` by two fake devices. Device 0 is the current one.

    With the backend "reference", each op counts as a launch on the current device.
    """
    CUDA.__init__()  # type: ignore[misc]
    for name in ("current_stream", "device", "stream", "is_current_stream_capturing", "synchronize", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(CUDA, name))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CUDA.current)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**36, 2**36))
    for op, module in OPS.items():
        reference = import_module(f"memstate.kernels.reference.{module}")
        monkeypatch.setattr(reference, op, launching(op, getattr(reference, op)))
    with Placing():
        yield CUDA


def launching(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an op that records exactly one launch, however many torch functions its reference calls."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        work = CUDA.launch(name)
        if work.stream in CUDA.lagging:
            return CUDA.lagging[work.stream].append((work, lambda: run(work, args, kwargs)))
        CUDA.do(work.clock)
        return run(work, args, kwargs)

    def run(work: Work, args: Any, kwargs: dict[str, Any]) -> Any:
        lagging, CUDA.lagging = CUDA.lagging, {}
        before = len(CUDA.work), dict(CUDA.host), {stream: dict(stream.clock) for stream in CUDA.streams}
        made = op(*args, **kwargs)
        del CUDA.work[before[0] :]  # torch functions inside the reference are part of the launch
        CUDA.host = before[1]
        for stream, clock in before[2].items():
            stream.clock = clock
        work.clock, CUDA.lagging = dict(work.clock), lagging
        return made

    return launch

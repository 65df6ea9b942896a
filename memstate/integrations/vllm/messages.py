"""What the scheduler's side and the workers tell each other: plain data that can be pickled."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Record(NamedTuple):
    """A block below the device.

    Attributes:
        key: vLLM's hash of all tokens up to the block's end, with the group.
        number: Its record in host memory, the same on each rank.
        length: Tokens up to its end.
    """

    key: bytes
    number: int
    length: int


@dataclass
class Save:
    """Blocks that the step's forward completes. They go to host memory behind it, or behind later ones.

    Attributes:
        job: Number of this save.
        blocks: Block ids.
        records: Where each goes.
    """

    job: int
    blocks: list[int]
    records: list[Record]


@dataclass
class Load:
    """Blocks of a request that come up.

    Attributes:
        request: The request.
        blocks: Block ids.
        records: Where each comes from.
        fetched: Those of the records that must be read from the store first.
    """

    request: str
    blocks: list[int]
    records: list[Record]
    fetched: list[Record]


@dataclass
class Write:
    """Records in host memory that go to the store.

    Attributes:
        job: Number of this write.
        records: The records. They stay until each rank has reported the job.
    """

    job: int
    records: list[Record]


@dataclass
class Plan:
    """What one step does on each rank.

    Attributes:
        save: What to save behind the forward, None for nothing.
        gone: Records of earlier saves, by number, whose blocks vLLM has given to others. Not packed yet, they are lost.
        loads: What to load.
        writes: What to write to the store.
        lost: Requests whose load cannot be done: a record has gone between the question and the answer.
        digest: What `naming.with_seed` returned; empty where there is no store.
    """

    save: Save | None = None
    gone: set[int] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    digest: bytes = b""


@dataclass
class Report:
    """What ranks have done, by job.

    Attributes:
        saved: How many ranks are done with a save.
        gone: Which records of a save a rank had not packed when their blocks were given away, by number.
        written: How many ranks are done with a write, whether or not the store took it.
        lost: Which records of a request's load the store did not give a rank, by number.
    """

    saved: dict[int, int] = field(default_factory=dict)
    gone: dict[int, set[int]] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    lost: dict[str, set[int]] = field(default_factory=dict)

    def add(self, other: "Report") -> None:
        """Adds what other ranks have done."""
        for mine, theirs in ((self.saved, other.saved), (self.written, other.written)):
            for job, ranks in theirs.items():
                mine[job] = mine.get(job, 0) + ranks
        for job, numbers in other.gone.items():
            self.gone.setdefault(job, set()).update(numbers)
        for request, numbers in other.lost.items():
            self.lost.setdefault(request, set()).update(numbers)

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.saved or self.gone or self.written or self.lost)

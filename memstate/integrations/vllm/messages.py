"""Messages between the scheduler's side and the workers: plain data that can be pickled."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Record(NamedTuple):
    """A block in host memory or in the store.

    Attributes:
        key: vLLM's hash of all tokens up to the block's end, followed by the group.
        number: Number of its record in host memory, equal on all ranks.
        length: Tokens up to the block's end.
    """

    key: bytes
    number: int
    length: int


@dataclass
class Save:
    """Blocks that a step's forward completes. They are copied to host memory after this forward or a later one.

    Attributes:
        job: Number of this save.
        blocks: Block ids.
        records: Record for each block.
    """

    job: int
    blocks: list[int]
    records: list[Record]


@dataclass
class Load:
    """Blocks of a request that are filled from records.

    Attributes:
        request: The request.
        blocks: Block ids.
        records: Record for each block.
        fetched: Those of the records that must first be read from the store.
    """

    request: str
    blocks: list[int]
    records: list[Record]
    fetched: list[Record]


@dataclass
class Write:
    """Records in host memory that are to be written to the store.

    Attributes:
        job: Number of this write.
        records: The records. They stay in host memory until each rank has reported the job.
    """

    job: int
    records: list[Record]


@dataclass
class Plan:
    """The work of one step on each rank.

    Attributes:
        save: What to save after the forward, None for nothing.
        gone: Numbers of records of earlier saves whose blocks vLLM has given to other requests. If a rank has not yet
            packed such a block, its record is lost.
        loads: Loads to begin.
        writes: Writes to begin.
        lost: Requests whose load cannot begin: a record was evicted after `matched` counted it, or there is no room for
            a record that must be fetched.
        digest: Result of `naming.with_seed`; empty if there is no store.
    """

    save: Save | None = None
    gone: set[int] = field(default_factory=set)
    loads: list[Load] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    digest: bytes = b""


@dataclass
class Report:
    """The finished work of one or more ranks, by job.

    Attributes:
        saved: Job of a save -> number of ranks that have finished it.
        gone: Job of a save -> numbers of records whose blocks vLLM gave to others before a rank had packed them.
        written: Job of a write -> number of ranks that have finished it, even if the store did not take the records.
        lost: Request -> numbers of records that a rank could not get from the store.
    """

    saved: dict[int, int] = field(default_factory=dict)
    gone: dict[int, set[int]] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    lost: dict[str, set[int]] = field(default_factory=dict)

    def add(self, other: "Report") -> None:
        """Adds the report of other ranks."""
        for mine, theirs in ((self.saved, other.saved), (self.written, other.written)):
            for job, ranks in theirs.items():
                mine[job] = mine.get(job, 0) + ranks
        for job, numbers in other.gone.items():
            self.gone.setdefault(job, set()).update(numbers)
        for request, numbers in other.lost.items():
            self.lost.setdefault(request, set()).update(numbers)

    def __bool__(self) -> bool:
        """Returns whether there is anything to report."""
        return bool(self.saved or self.gone or self.written or self.lost)

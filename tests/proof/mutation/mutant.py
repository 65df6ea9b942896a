"""What a mutant is, and the kinds of faults that mutants stand for."""

from typing import NamedTuple

# Category -> what goes wrong with a fault of this kind.
CATEGORIES = {
    "lost update": "two writers, or two steps of one change, of which one is lost",
    "missing barrier": "what one phase of a launch writes, the next one may not see",
    "stale label": "a label that does not say what its slot holds",
    "out-of-range slot": "an access outside the planes, or in the null slot",
    "leak": "a slot or a page that has no owner and is not free",
    "double owner": "a slot or a page with two owners, or one that is free and owned",
    "stale byte": "bytes of another slot, step or request",
    "lost snapshot": "a snapshot that was due and is not there, or is not kept",
    "wrong count": "a count of the host or of the device that is not what there is",
    "wrong stream": "work on another device or stream, or in a graph, without the order that it needs",
}


class Mutant(NamedTuple):
    """One text of one file replaced by another.

    old: stands exactly once in the file. killer: the test that must fail, by its node id. fate: what becomes of the
    mutant: "crashed" where an address may lie outside of the process, which ends it, or may be found wrong first.
    """

    name: str
    category: str
    file: str
    old: str
    new: str
    killer: str
    fate: str = "killed"

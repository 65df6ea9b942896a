"""Raises exceptions at every line of every public call, and judges the state that is left.

To run everything: python -m tests.proof.injection.

scene      a manager in the middle of its work, and the public calls that can come next
keyed      the same as `scene` for an engine that keeps its KV itself: a manager, and the calls that take keys
points     counts the lines of a call, and raises an exception at one of them
verdict    judges the state: the call is done, or undone, or `Broken` is raised and recover() repairs it
"""

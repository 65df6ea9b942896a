"""Raises exceptions at every line of every public call, and judges the state that is left.

To run everything: python -m tests.proof.injection.

scene      builds a manager in the middle of its work, and lists the public calls that can come next
points     counts the lines of a call, and raises an exception at one of them
verdict    judges the state: the call is done, or undone, or `Broken` is raised and recover() repairs it
"""

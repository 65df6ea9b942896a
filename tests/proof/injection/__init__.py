"""Exceptions at every line of every public call, and what is left then.

Run all of it: python -m tests.proof.injection.

scene      a manager in the middle of its work, and the public calls that can come next
points     the lines of a call at which an exception can come, and an exception at one of them
verdict    what must hold after it: done, undone, or noticed and put right by recover()
"""

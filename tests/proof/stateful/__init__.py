"""Runs random programs of a manager's operations beside a plain model of the rules.

For long runs: python -m tests.proof.stateful.

settings   the settings of a manager, drawn from small numbers
ledger     slots, registers, rows and pages, the packets of recorded changes, and the text of each slot's state
cache      the prefix cache as one list, and sessions
model      the rules of tracking and of marks: admit, plan, settle, accept, end
below      what goes to host memory and storage, and comes back; prefetches: tests/support/model_prefetch.py
memory     the bytes of both sides, a forward pass over them, and the comparison of every byte
machine    a manager beside its model: draws arguments, names the errors of a call, compares both sides
operations the operations of a manager, valid and invalid
program    settings and operations as plain numbers: drawn at random, run, shrunk, printed

No module here asks memstate what memstate should do.
"""

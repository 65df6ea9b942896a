"""Runs random programs of a manager's operations beside a plain model of the rules.

For long runs: python -m tests.proof.stateful.

settings   draws the settings of a manager from small numbers
ledger     slots, registers, rows and pages, the packets of recorded changes, and the text of each slot's state
cache      the prefix cache as one list, and sessions
model      the rules of tracking and of marks: admit, plan, settle, accept, end
below      the tiers: what goes to host memory and storage, and comes back (prefetches: tests/support/model_prefetch.py)
memory     the bytes of both sides, a forward pass over them, and the comparison of every byte
machine    a manager beside its model: draws arguments, names the errors of a call, compares both sides
operations the operations of a manager, valid and invalid
program    draws programs (settings and operations as plain numbers), runs them, shrinks and prints failing ones

No module here calls memstate to learn what memstate should do.
"""

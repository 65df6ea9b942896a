"""Random programs of a manager's operations beside a plain model of the rules.

Run long: python -m tests.proof.stateful.

settings   what a manager can be built with, drawn from small numbers
ledger     slots, registers, rows and pages, the packets of recorded changes, and of which tokens a slot has the state
cache      the prefix cache as one list, and sessions
model      the rules of tracking and of marks: admit, plan, settle, accept, end
below      what goes to host memory and storage, and what comes up again; prefetches: tests/support/model_prefetch.py
memory     the bytes of both sides, a forward pass over them, and the comparison of every byte
machine    a manager beside its model: what is drawn, what may be raised, and everything compared after a call
operations every operation, valid and not, chosen by the digits of one number
program    settings and operations as plain tuples: made at random, run, shrunk, printed

Nothing here calls the library to find out what the library should do.
"""

"""Random programs of a manager's operations beside a plain model of the rules.

Run long: python -m tests.proof.stateful.

history    what the bytes of a slot say: a number for every element, made of the tokens folded in
memory     the planes between canaries, a forward pass over them, and the comparison of every byte
ledger     registers, slots, columns and the packet of recorded changes, as dictionaries
rows       requests, snapshots and pages on that ledger
cache      the prefix cache as one list: what can be asked about it
keeping    what comes into it and what goes
talking    sessions
starting   admissions, forks and endings
model      the rules of tracking: plan, settle, accept
hosting    what goes to host memory and storage, and what comes up again; prefetches: tests/support/model_prefetch.py
below      what a caller does with it
kv         the KV pages of an engine
lower      host memory, storage and threads as they are, beside the model
settings   what a manager can be built with, drawn from small numbers
machine    a manager beside its model: what an operation may raise, and everything compared after it
planning   settling   prompting   admitting   asking   remembering   tiering   operations
           every operation, valid and not, chosen by the digits of one number
program    settings and operations as plain tuples: made at random, run, shrunk, printed

Nothing here calls the library to find out what the library should do.
"""

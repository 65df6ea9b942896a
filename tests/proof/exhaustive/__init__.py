"""Tries every schedule of calls on a small manager, and compares manager and model after each call.

    world       a manager of 3 rows, 2 lanes and 5 slots beside its model: lists the allowed calls, and makes them
    state       gives a state a name that does not depend on the numbers of rows, holders and slots
    checkpoint  keeps everything that manager and model know, and restores it
    search      searches the distinct states breadth-first

The search runs the library itself: `StateManager` and the reference kernels. Model and comparison are those of
`tests/proof/stateful`. Run it: python -m tests.proof.exhaustive.
"""

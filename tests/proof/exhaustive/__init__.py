"""Tries every schedule of calls on a small manager, and compares manager and model after each call.

    world       a manager of 3 rows, 2 lanes and 5 slots beside its model: lists the calls that are allowed, makes them
    state       names a state without the numbers of rows, holders and slots
    checkpoint  keeps everything that manager and model know, and puts it back
    search      breadth-first search over distinct states

The search runs the library itself: `StateManager` and the reference kernels. Model and comparison are those of
`tests/proof/stateful`. Run it: python -m tests.proof.exhaustive.
"""

"""Tries every schedule of calls on a small manager, and checks every state that it comes to.

    world       a manager of 3 rows, 2 lanes and 5 slots with its caller: what may be called next, and what a call does
    ownership   states the allowed changes of owner once more, and watches each launch
    state       what must hold in every state, and a name for a state without the numbers of rows, holders and slots
    checkpoint  takes everything that a manager knows, and puts it back
    search      breadth-first search over distinct states

The search runs the library itself: `StateManager` and the reference kernels. Run it: python -m tests.proof.exhaustive.
"""

"""Runs compiled kernels on a CPU: executes the PTX that Triton made, on torch's own memory.

    MEMSTATE_COMPILED=together python -m pytest tests/kernels

* `reading` splits the text into basic blocks of instructions.
* `steps` says what an instruction does to a machine, and `values` what it computes.
* `memory` has loads, stores and atomics, and checks each address; `races` finds accesses that no barrier orders.
* `program` runs the threads, and `device` is the GPU that Triton believes in.

docs/proven.md says what a run of this kind shows, and what only a GPU can show.
"""

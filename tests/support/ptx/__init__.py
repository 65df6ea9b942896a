"""Runs compiled kernels on a CPU: executes the PTX that Triton made, on torch's own memory.

    MEMSTATE_COMPILED=together python -m pytest tests/kernels

A program of your own calls `install` before it defines kernels, then launches them as on a GPU, on tensors of the CPU:

    from tests.support.ptx.device import install

    install("together")  # or another order of warps
    my_kernel[grid](x, y, BLOCK=256)  # a Fault says what the kernel must not do, and where

Only the instructions are known that memstate's kernels have: no `tl.dot`, no local memory, few atomics.

* `reading` splits the text into basic blocks of instructions.
* `steps` says what an instruction does to a machine, and `values` what it computes.
* `memory` has loads, stores and atomics, and checks each address; `races` finds accesses that no barrier orders.
* `program` runs the threads, and `device` is the GPU that Triton believes in.

docs/proven.md says what a run of this kind shows, and what only a GPU can show.
"""

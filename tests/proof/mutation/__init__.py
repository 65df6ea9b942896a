"""Broken copies of the library: each has one text replaced, and a test must fail for it.

    catalogue   what a mutant is; the mutants of mutants/*.txt
    runner      a tree of files with one mutant in it, and the tests that are run there
    interleaved kernels of interleaved.txt, whose faults only a schedule of programs shows

`tests.proof.test_mutants` runs the test that each mutant names. `python -m tests.proof.mutation` writes results.tsv:
what else of that test's file fails. `make mutate` lets a generator change the tracking rules and the reference kernels.
"""

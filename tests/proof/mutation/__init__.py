"""Breaks copies of memstate, one text in each, and runs a test that must fail for it.

    catalogue   the mutants of mutants/*.txt
    runner      runs tests in a copy of the project with one mutant in it
    interleaved the kernels of interleaved.txt, whose faults show only in a schedule of programs

`tests.proof.test_mutants` runs the test that each mutant names. `python -m tests.proof.mutation` also counts the other
tests of the same file that fail, and writes results.tsv. `make mutate` lets a generator change the tracking rules and
the reference kernels.
"""

"""Breaks copies of memstate, one text in each, and runs a test that must fail because of it.

    catalogue   reads the mutants of mutants/*.txt
    runner      runs tests in a copy of the project with one mutant in it
    interleaved makes the kernels of interleaved.txt, whose faults show only if programs take turns

`tests.proof.test_mutants` runs the test that each mutant names. `python -m tests.proof.mutation` also counts the other
tests of the same file that fail, and writes results.tsv. In `make mutate`, a generator changes the tracking rules and
the reference kernels.
"""

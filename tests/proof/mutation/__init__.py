"""Broken copies of the library: each has one text replaced, and a test must fail for it.

    catalogue   reads the mutants from mutants/*.txt; interleaved reads those that only schedules of programs show
    runner      a tree of files with one mutant in it, and the tests that are run there
    warm        the process that runs them
    table       docs/mutants.md: who kills whom

`tests.proof.test_mutants` runs every mutant against one test; `python -m tests.proof.mutation` against all near it.
"""

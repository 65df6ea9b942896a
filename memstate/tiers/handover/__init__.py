"""Hands the records of a prompt over to ranks of another tensor-parallel split."""

"""Makes records of one tensor-parallel split out of those of another."""

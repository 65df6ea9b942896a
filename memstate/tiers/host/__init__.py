"""Records in host memory: which are there, and their way to and from the slots."""

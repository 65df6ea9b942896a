"""Holds records in host memory by key, and moves them to and from slots."""

"""Rows of requests: their pages, steps, published snapshots and tracking strategies."""

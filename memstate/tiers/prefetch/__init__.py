"""Prefetches: records of a prompt come from storage to host memory while the request waits."""

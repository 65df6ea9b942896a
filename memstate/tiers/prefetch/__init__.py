"""Prefetches records from a store into host memory while a request waits; ranks agree on the result.

prefetcher    drives all prefetches from `poll`
fetch         is one prefetch with its phases
settings      say which prefetches are worth their cost, and when they stop
reservation   holds the host memory of a prefetch
reading       calls the store, in threads
votes         collects from all ranks which page ends each of them could use
agreement     exchanges the words of these votes between ranks
"""

"""Prefetches records from a store into host memory while a request waits; ranks agree on the result.

prefetcher    drives all prefetches from `poll`
fetch         is one prefetch with its phases
settings      say which prefetches are worth their cost, and when they stop
reservation   holds the host memory of a prefetch
reading       calls the store, in threads
votes         exchanges what each rank could use (by means of agreement, the exchange itself)
"""

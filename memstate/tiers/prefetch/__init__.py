"""Prefetch: from a store into host memory while a request waits, agreed on between ranks.

prefetcher    drives all of it from `poll`
fetch         one prefetch and its phases; settings: when it pays and when it stops
reservation   the host memory that a fetch holds; reading: the calls of the store, in threads
votes         what ranks tell each other; agreement: the exchange
"""

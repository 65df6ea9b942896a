"""Prefetch: from a store into host memory while a request waits, agreed on between ranks.

prefetcher    drives all of it from `poll`
fetch         one prefetch and its phases; settings: when it pays and when it stops
candidates    the lengths that this rank could have; reservation: the host memory that a fetch holds
background    what threads do; reading: the calls of the store
votes         what ranks tell each other; agreement: the exchange; agreed: the results, kept until requests come
"""

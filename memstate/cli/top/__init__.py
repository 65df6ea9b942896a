"""What `memstate top` shows: the figures that a process exports, fetched over HTTP. It imports no core module.

scrape   HTTP -> samples by manager         summary   two scrapes -> plain data
advice   plain data -> what to look at      view      plain data -> the terminal
"""

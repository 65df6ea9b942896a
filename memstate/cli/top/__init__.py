"""What `memstate top` shows: figures that a process exports, scraped over HTTP. Imports nothing of the library's core.

scrape   HTTP -> samples by manager         summary   two scrapes -> plain data
advice   plain data -> what to look at      view      plain data -> the terminal
"""

"""Keeps what requests have: rows, pages, steps, published snapshots and tracking strategies. It knows no plane.

handles      requests and the handles that callers get
table        rows, their generations and their progress
pages        KV pages as integers on the host; page_table: the pages of each row
steps        planned steps that are not settled yet
holdings     who has each holder, and the first steps that still read its state
marks        states of prompts: where they are kept, and who holds them until they are published
tracking/    the four strategies, and the host's mirror of them
"""

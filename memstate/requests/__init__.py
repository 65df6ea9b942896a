"""Keeps what requests have: rows, pages, steps, published snapshots and tracking strategies. It knows no plane.

handles      requests and the handles that callers get
table        rows, their generations and their progress
pages        KV pages as integers on the host; page_table: the pages of each row
steps        planned steps that are not settled yet
snapshots    published snapshots, their registers and pins
boundaries   lengths besides the multiples of `every` at which a snapshot is due
tracking/    the four strategies, and the host's mirror of them
"""

"""Rows of requests: their pages, steps, published snapshots and tracking strategies. Knows no plane.

table        rows, their generations and their progress
pages        KV pages by host integers; page_table: the pages of each row
steps        planned steps that are not settled yet
snapshots    published snapshots; publisher: moves them from rows to holders
boundaries   lengths besides the multiples of `every` at which a snapshot is due
tracking/    the four strategies, and the host's mirror of them
"""

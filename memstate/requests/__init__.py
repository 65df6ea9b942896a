"""Keeps what requests have: rows, pages, steps, published snapshots and tracking strategies. No file knows planes.

handles      requests, and the handles that callers get
table        rows, their generations and their progress
pages        ids of KV pages, with their number of holders
page_table   the KV pages of each row
steps        planned steps that are not settled yet
holdings     the owner of each holder, and the rows whose first step still reads the state
marks        lengths of prompts at which states are kept, and these states until they are published
tracking/    the four strategies, and the host's copy of what a plan decides
"""

"""Offers the calls of a decode loop: the manager, and the parts that it joins.

manager     StateManager, the public interface
admission   new rows for requests and forks; states that arrive from elsewhere
stepping    plan, settle, accept, cancel
ending      publish, release, retract: the states that rows leave behind
capacity    plans memory: requests, cached states and KV pages that fit, as text, table or JSON
planner     the arithmetic of these plans, by the functions that allocate
ages        how long rows have run and stood still
report      stats, inspect, audit: figures, and the owner of every slot
chaos       faults injected on purpose: the parts of a manager, with claims, stores and polls that fail
parts       the attributes of a manager, and the checks at the start of its calls
pool        slots and their bytes, for callers that hold slot ids
settings    Pages, Forward, and checks of the manager's arguments
warmup      compiles the manager's kernels for steps and ownership changes
"""

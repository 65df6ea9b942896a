"""Offers the calls of a decode loop: the manager, and the parts that it joins.

manager     StateManager, the public interface: calls with their descriptions
device      `mem.device`: tensors at fixed addresses, slot ids, memory that sleeps, the stream
conversations  `mem.sessions`: opens and closes sessions
world       builds what a manager is made of: tables, planes, cache
verbs       the calls of a manager over its world
door        lets calls in, or says why not
admission   new rows for requests and forks; states that arrive from elsewhere
stepping    plan, settle, accept, cancel
ending      end, publish, cancel, drop: what becomes of the states of rows
forking     fork and reorder
capacity    plans memory: requests, cached states and KV pages that fit, as text, table or JSON
planner     the arithmetic of these plans, by the functions that allocate
ages        how long rows have run and stood still
report      stats, info, inspect, audit: figures, and the owner of every slot
recount     asks the owners themselves, and compares
recovery    starts a manager over, with what is certain
canary      finds forwards that forget a store, in debug mode
pool        slots and their bytes, for callers that hold slot ids
settings    Pages, Forward, and checks of the manager's arguments
warmup      compiles the manager's kernels for steps and ownership changes
"""

"""Offers the calls of a decode loop: the manager, and the parts that do the work of its calls.

manager        StateManager, the public interface: calls with their descriptions
device         `mem.device`: tensors at fixed addresses, slot ids, `sleep` and `wake`, the stream
conversations  `mem.sessions`: opens and closes sessions
world          builds the tables of a manager: planes, registers, rows, cache
verbs          builds the parts that change these tables
door           refuses calls from a wrong thread or stream, or at a wrong time
admission      starts rows for requests; notes states that arrive from elsewhere
stepping       plan, settle, accept, cancel
ending         end, publish, cancel: the states of rows that end
forking        fork and reorder
capacity       plans memory: the requests, cached states and KV pages that fit
planner        computes these plans, with the functions that a manager uses to allocate
figures        the result of such a plan, as text, table or JSON
sizing         refuses sizes that cannot be allocated
ages           the age of each row, and how long its length has not changed
report         stats, info, inspect, audit: figures, and the owner of every slot
recount        compares the host's counts with what the owners hold
recovery       empties a manager, or keeps only what is certain
canary         finds forwards that forget a store, in debug mode
pool           slots and their bytes, for callers that hold slot ids
settings       Pages, Forward, and checks of the manager's arguments
warmup         compiles the manager's kernels for steps and ownership changes
"""

"""Offers the calls of a decode loop: the manager, and the parts that it joins.

manager     StateManager, the public interface
admission   new rows: requests, forks, states that arrive from elsewhere
stepping    plan, settle, accept, cancel
ending      publish, release, retract: what rows leave
report      figures, owners and plain data of a manager
pool        slots and their bytes, for callers that hold slot ids
settings    Pages, Forward, and checks of the manager's arguments
warmup      compiles everything that serving will launch
"""

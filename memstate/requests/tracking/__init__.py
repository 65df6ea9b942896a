"""Decides in decode when a snapshot is due, and which slots a step reads, writes and keeps.

| strategy | slots at admission | steady | at most | snapshot costs |
| --- | --- | --- | --- | --- |
| NoTracking | 1 | 1 | 1 | nothing; only a finished state can be published |
| PingPong | 3 (2 without overlap) | 3 | 3 | one extra write in the same pass |
| LazyPingPong | 2 | 2 | 3, from a boundary to the next settle | one extra write in the same pass |
| Redirect | 1 | 1, or 2 while a snapshot is unpublished | 2 | nothing: the old slot is the snapshot |
"""

from memstate.requests.tracking.strategies import LazyPingPong, NoTracking, PingPong, Redirect, Tracking

__all__ = ["LazyPingPong", "NoTracking", "PingPong", "Redirect", "Tracking"]

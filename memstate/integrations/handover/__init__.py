"""Turns the records of one tensor-parallel split into records of another split, from store to store.

handover   hands over a prompt's records to one rank of the new split
resplit    builds the body of one record
"""

from memstate.integrations.handover.handover import Handed, HandOver
from memstate.integrations.handover.resplit import Resplit

__all__ = ["HandOver", "Handed", "Resplit"]

"""Makes records of one tensor-parallel split out of those of another, between stores.

handover   a prompt's records, for one rank of the new split; resplit: the body of one record
"""

from memstate.integrations.handover.handover import Handed, HandOver
from memstate.integrations.handover.resplit import Resplit

__all__ = ["HandOver", "Handed", "Resplit"]

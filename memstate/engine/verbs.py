"""Joins the tables of a manager with the groups of calls that change them."""

from functools import cached_property

from memstate.engine.admission import Admission
from memstate.engine.ending import Ending
from memstate.engine.forking import Forking
from memstate.engine.parking import Parking
from memstate.engine.stepping import Stepping
from memstate.engine.world import World


class Parts(World):
    """The tables of a manager, and the groups of calls that change them. Each group is built at its first use.

    Attributes:
        admission: starts rows.
        stepping: plans and settles steps.
        ending: publishes states, and ends rows.
        forking: forks and reorders rows.
        parking: parks rows and idle sessions.
    """

    admission = cached_property(Admission)
    stepping = cached_property(Stepping)
    ending = cached_property[Ending](lambda parts: Ending(parts, parts.stepping))
    parking = cached_property[Parking](lambda parts: Parking(parts, parts.stepping, parts.ending))
    forking = cached_property[Forking](lambda parts: Forking(parts, parts.admission, parts.ending))

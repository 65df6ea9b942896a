"""Joins the tables of a manager with the groups of calls that change them."""

from functools import cached_property

from memstate.engine.admission import Admission
from memstate.engine.ending import Ending
from memstate.engine.forking import Forking
from memstate.engine.stepping import Stepping
from memstate.engine.world import World


class Parts(World):
    """The tables of a manager, and the groups of calls that change them. Each group is built at its first use.

    Attributes:
        admission: starts rows.
        stepping: plans and settles steps.
        ending: publishes states, ends rows, and parks them.
        forking: forks and reorders rows.
    """

    admission = cached_property(Admission)
    stepping = cached_property(Stepping)
    ending = cached_property[Ending](lambda parts: Ending(parts, parts.stepping))
    forking = cached_property[Forking](lambda parts: Forking(parts, parts.admission, parts.ending))

"""Puts the calls of a manager over its world."""

from functools import cached_property

from memstate.engine.admission import Admission
from memstate.engine.ending import Ending
from memstate.engine.forking import Forking
from memstate.engine.stepping import Stepping
from memstate.engine.world import World


class Parts(World):
    """A world, and the groups of calls that change it. Each is there from its first use on.

    Attributes:
        admission: starts rows.
        stepping: plans and settles steps.
        ending: publishes states, and ends rows.
        forking: lets rows go on in several ways.
    """

    admission = cached_property(Admission)
    stepping = cached_property(Stepping)
    ending = cached_property[Ending](lambda parts: Ending(parts, parts.stepping))
    forking = cached_property[Forking](lambda parts: Forking(parts, parts.admission, parts.ending))

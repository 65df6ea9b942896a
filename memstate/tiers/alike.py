"""Compares the settings of ranks when managers are built: ranks with different settings would decide differently.

Settings are compared as texts. Settings that may differ between ranks, such as a rank's part of the layout, are left
out.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping

from memstate.errors import AgreementLost, ConfigurationError
from memstate.tiers.prefetch.agreement import Ranks

BY_NATURE = re.compile(r" at 0x[0-9a-fA-F]+|\b__(?:mp_)?main__\.")  # parts of a `repr` that differ between processes
NUMPY = re.compile(r"\bnp\.u?int\d+\((-?\d+)\)")  # a numpy integer becomes the plain number
SHOWN = 300  # limit of the characters of a value in an error's text


def said(value: object) -> str:
    """Returns a setting as a text that is equal in all processes. An object without its own `repr` gives its class.

    Example:
        >>> said(object())
        '<object object>'
    """
    return NUMPY.sub(r"\1", BY_NATURE.sub("", repr(value)))


def compare(ranks: Ranks, rank: int, settings: Mapping[str, object], limit: float | None) -> int | None:
    """Sends the settings of this rank to all ranks, and requires that all have the same.

    Args:
        ranks: The ranks.
        rank: The number of this rank, as its settings give it.
        settings: Settings that must be the same on all ranks, by name. The text of an error uses the name.
        limit: Tokens that all prefetches of this rank together may fetch, None for any number. It depends on the size
            of host memory, which may differ between ranks.

    Returns:
        The smallest limit of all ranks.

    Raises:
        ConfigurationError: A setting differs; the number of a rank is missing or is used twice; or a rank does not
            answer. All ranks raise it.

    Syncs: waits for the slowest rank.
    """
    own = {"rank": int(rank), "limit": None if limit is None else int(limit)}
    text = json.dumps(own | {"settings": {name: said(value) for name, value in settings.items()}})
    try:
        told = [json.loads(each) for each in ranks.gather(text)]
    except AgreementLost as error:
        raise ConfigurationError(
            f"the ranks of the group could not compare their settings: {error.why}; build the managers of all ranks "
            "together, with one memstate"
        ) from error
    places = [each["rank"] for each in told]
    if sorted(places) != list(range(len(told))):
        raise ConfigurationError(
            f"the {len(told)} ranks of the group have Tiers(rank=) {places}: each needs a number of its own from 0 on, "
            "or one reads the states of another"
        )
    told.sort(key=lambda each: each["rank"])
    names = dict.fromkeys(name for each in told for name in each["settings"])
    if wrong := [text for name in names if (text := _differs(name, [each["settings"].get(name) for each in told]))]:
        raise ConfigurationError(
            f"ranks of a group decide alike only with the same settings, and these differ: {'; '.join(wrong)}"
        )
    return min((each["limit"] for each in told if each["limit"] is not None), default=None)


def _differs(name: str, values: list[str | None]) -> str:
    """Returns a text with the values of a setting and their ranks; empty if all ranks have the same value."""
    of = defaultdict[str, list[str]](list)
    for rank, value in enumerate(values):
        of[value or "nothing"].append(str(rank))
    each = [f"{value[:SHOWN]} on rank {', '.join(whose)}" for value, whose in of.items()]
    return f"{name}: {', '.join(each)}" if len(of) > 1 else ""

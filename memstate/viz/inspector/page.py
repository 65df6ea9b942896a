"""Assembles the inspector's page from a template, a style, scripts, and data as JSON."""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from memstate.checks import shown
from memstate.errors import InvalidArgument
from memstate.slots.inspect import UNDRAWN, Inspection
from memstate.viz.inspector import facts
from memstate.viz.inspector.texts import embedded, text
from memstate.viz.kinds import KINDS

HERE: Final = Path(__file__).parent
# One function has the text of all of them, in this order: a script can use the names of earlier ones.
SCRIPTS: Final = ("data", "dom", "map", "lists", "timeline", "tree", "search", "main")


def page(inspection: Inspection, title: str = "") -> str:
    """Returns an HTML page that shows an inspection: owners of slots, requests, sessions, prefix cache, figures.

    The page needs no other file. By its Content-Security-Policy, the browser refuses all requests, and all scripts
    except the page's own. Long names are shortened, and invisible characters in them are shown as escapes.

    Args:
        inspection: A result of `StateManager.inspect` or `Inspection.load`.
        title: Where the inspection comes from, such as the name of a file.

    Raises:
        InvalidArgument: `inspection` is not an inspection, or has values that the page cannot show.

    Example:
        >>> import torch
        >>> import memstate as ms
        >>> layout = ms.StateLayout((ms.Plane("ssm", (2,), torch.float32),), layers=1)
        >>> mem = ms.StateManager(layout, slots=4, max_requests=2, backend="reference")
        >>> page(mem.inspect())[:15]
        '<!doctype html>'

    Syncs: no.
    """
    if not isinstance(inspection, Inspection):
        raise InvalidArgument(f"page: {shown(inspection)}, expected what `StateManager.inspect` returns")
    try:
        return _drawn(inspection, title)
    except (*UNDRAWN, TemplateError) as error:
        raise InvalidArgument(f"{text(title) or 'page'}: the inspection cannot be drawn: {shown(error)}") from error


def _drawn(inspection: Inspection, title: str) -> str:
    environment, style, script = _parts()
    tiers = inspection.stats.get("tiers") or {}
    return environment.get_template("page.html").render(
        title=text(title),
        policy=_policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=embedded(facts.columns(inspection, list(KINDS))),
        head=facts.head(inspection),
        faults=len(inspection.faults),
        tree=facts.tree_totals(inspection),
        tiers=facts.figures(tiers),
        figures=facts.figures(inspection.stats, skip=("tiers",)),
        layout=inspection.layout,
        order=text(inspection.layout.get("order", "")),
        planes=facts.planes(inspection),
    )


@cache
def _parts() -> tuple[Environment, str, str]:
    """Returns what is equal for all inspections: the environment of the template, the style and the script."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = environment.get_template("page.css").render(kinds=list(KINDS.values())).strip()
    parts = "".join((HERE / "script" / f"{name}.js").read_text("utf-8") for name in SCRIPTS)
    return environment, style, f'"use strict";(() => {{\n{parts}}})();'


def _policy(style: str, script: str) -> str:
    """Returns the Content-Security-Policy: it allows this style and this script, and no request."""
    hashes = [b64encode(sha256(part.encode()).digest()).decode() for part in (style, script)]
    return (
        f"default-src 'none'; style-src 'sha256-{hashes[0]}'; script-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )

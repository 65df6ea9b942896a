"""How an object shows itself in a notebook and in a terminal. The only module that knows `memstate.viz` from above.

The imports are inside the methods, so nothing is loaded until an object is shown.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Group


class Shown:
    """An object that shows what it holds: as HTML in a notebook, as text with `rich.print`.

    `memstate.viz.sheets` describes it. Showing launches nothing and does not wait for the device.
    """

    def _repr_html_(self) -> str:
        from memstate.viz import html, sheets

        return html.render(sheets.of(self))

    def __rich__(self) -> "Group":
        from memstate.viz import sheets, text

        return text.render(sheets.of(self))

"""Renders the sheet of an object as HTML for a notebook: foldable sections, no script, all texts escaped."""

from html import escape

from memstate.sheet import Bar, Sheet, SheetSection
from memstate.viz import kinds
from memstate.viz.kinds import Kind

# Colours follow the theme of the notebook or, if it has none, the reader's setting for light or dark pages.
_STYLE = """<style>
.memstate{--ms-ink:var(--jp-content-font-color1,#1f2328);--ms-pale:var(--jp-content-font-color2,#59636e);
--ms-page:var(--jp-layout-color0,#fff);--ms-line:var(--jp-border-color2,#d0d7de);--ms-bad:#c00d0d;--ms-free:#e6e6e6;
color:var(--ms-ink);background:var(--ms-page);font:13px/1.45 var(--jp-content-font-family,system-ui,sans-serif);
padding:6px 8px;max-width:860px;overflow-wrap:anywhere}
@media (prefers-color-scheme:dark){.memstate{--ms-ink:var(--jp-content-font-color1,#e6edf3);
--ms-pale:var(--jp-content-font-color2,#9aa4af);--ms-page:var(--jp-layout-color0,#161616);
--ms-line:var(--jp-border-color2,#3d444d);--ms-bad:#ff7b72;--ms-free:#3a3a3a}}
[data-jp-theme-light=true] .memstate{--ms-bad:#c00d0d;--ms-free:#e6e6e6}
[data-jp-theme-light=false] .memstate{--ms-bad:#ff7b72;--ms-free:#3a3a3a}
.memstate .ms-bar{display:flex;height:16px;margin:3px 0;border:1px solid var(--ms-line)}
.memstate .ms-bar i{min-width:2px;flex-basis:0}
.memstate .ms-key{display:flex;flex-wrap:wrap;gap:1px 14px;margin:0 0 8px;padding:0;list-style:none}
.memstate .ms-key li{margin:0}
.memstate .ms-key i{display:inline-block;width:11px;height:11px;margin-right:5px;border:1px solid var(--ms-line);
vertical-align:-1px}
.memstate .ms-pale{color:var(--ms-pale)}
.memstate .ms-bad{color:var(--ms-bad);margin:4px 0;padding-left:18px}
.memstate .ms-wide{overflow-x:auto;margin:3px 0 8px}
.memstate table{border-collapse:collapse;margin:0;font-size:12px;color:inherit;background:none;overflow-wrap:normal}
.memstate th,.memstate td{padding:1px 10px 1px 0;text-align:left;border:0;color:inherit;background:none;
border-bottom:1px solid var(--ms-line);vertical-align:bottom;font-variant-numeric:tabular-nums}
.memstate td{white-space:nowrap}
.memstate summary{cursor:pointer}
</style>"""
_HATCH = "repeating-linear-gradient(45deg,{0} 0 2px,{1} 2px 5px)"


def render(sheet: Sheet) -> str:
    """Returns a sheet as HTML.

    Args:
        sheet: The sheet to show.

    Example:
        >>> render(Sheet("a <title>"))[-49:]
        '<div><strong>a &lt;title&gt;</strong></div></div>'
    """
    faults = "".join(f"<li>{escape(fault)}</li>" for fault in sheet.faults)
    parts = [
        f"<div><strong>{escape(sheet.title)}</strong></div>",
        f'<ul class="ms-bad">{faults}</ul>' if faults else "",
        *map(_bar, sheet.bars),
        *(f'<div class="ms-pale">{escape(note)}</div>' for note in sheet.notes),
        *map(_section, sheet.sections),
    ]
    return f'<div class="memstate">{_STYLE}{"".join(parts)}</div>'


def _bar(bar: Bar) -> str:
    whole = sum(part.size for part in bar.parts)
    pieces, key = "", ""
    for part in bar.parts:
        kind = kinds.kind(part.kind)
        share = part.size / whole
        name, size = escape(part.name), escape(part.text)
        pieces += f'<i style="flex-grow:{share:.5f};{_fill(kind)}" title="{name}: {size}, {share:.1%}"></i>'
        key += f'<li><i style="{_fill(kind)}"></i>{name} <span class="ms-pale">{size}</span></li>'
    title = f'<div class="ms-pale">{escape(bar.title)}</div>'
    return f'{title}<div class="ms-bar">{pieces}</div><ul class="ms-key">{key}</ul>'


def _fill(kind: Kind) -> str:
    colour = "var(--ms-free)" if kind.dark else kind.colour
    other = "#fff" if kind.faulty else "var(--ms-page)"
    return f"background:{_HATCH.format(colour, other) if kind.faulty or kind.hatched else colour}"


def _section(section: SheetSection) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in section.heads)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in section.rows)
    more = f'<div class="ms-pale">... and {section.more:,} more</div>' if section.more else ""
    count = f' <span class="ms-pale">{len(section.rows) + section.more:,}</span>' if section.counted else ""
    table = f'<div class="ms-wide"><table>{f"<tr>{heads}</tr>" if heads else ""}{rows}</table></div>'
    if not section.title:
        return table + more
    return f"<details><summary>{escape(section.title)}{count}</summary>{table}{more}</details>"

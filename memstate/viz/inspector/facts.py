"""Computes the data of the page from an inspection: columns for the script, rows of texts for the template."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.sizes import format_bytes
from memstate.slots.inspect import Inspection
from memstate.viz.inspector.texts import number, packed, runs, steps, text
from memstate.viz.kinds import kind
from memstate.viz.owners import holdings, holdings_over

NAMED: Final = 200  # limit of the slots at which their names fit on the map
FAULTS: Final = 1000  # limit of the faults that a page lists
SPANS: Final = 4000  # limit of the spans in the timeline
OF_ROW = re.compile(r"row (\d{1,9}) ", re.ASCII)  # the beginning of the name of a mark's owner


def columns(inspection: Inspection, kinds: Sequence[str]) -> dict[str, Any]:
    """Returns the columns that the script of the page draws and searches.

    Args:
        inspection: The inspection.
        kinds: Kinds of owners, in the order of the legend.
    """
    held = sorted(inspection.names)
    place = {register: at for at, register in enumerate(held)}
    owned = holdings(inspection)
    slots, labels = ([column[register] for register in held] for column in (inspection.slots, inspection.labels))
    kind_of = {each: at for at, each in enumerate(kinds)}
    known = zip(held, labels, (register // REGISTERS_PER_ROW for register in held), strict=True)
    return {
        "capacity": inspection.capacity,
        "kinds": list(kinds),
        "map": runs(kind_of[kind(each).name] for each, _ in owned),
        "short": [text(name) for _, name in owned] if inspection.capacity <= NAMED else [],
        "registers": steps(held),
        "slots": slots,
        "labels": labels,
        "owners": runs(kind_of[kind(inspection.kinds[register]).name] for register in held),
        "names": packed((text(inspection.names[register]) for register in held), known),
        "byId": inspection.by_id,
        "faults": [text(fault) for fault in inspection.faults[:FAULTS]],
        "requests": _requests(inspection, held, place),
        "sessions": [
            [
                text(session["id"]), session["row"], session["tokens"], session["pages"],
                [[place.get(register, -1), length] for register, length in session["states"]],
                session.get("age"), session.get("idle"),
            ]
            for session in inspection.sessions
        ],
        "origins": [[place[register], origin] for register, origin in _origins(inspection) if register in place],
        "timeline": _timeline(inspection, kind_of),
        "prefix": _prefix(inspection, place),
        "page": inspection.layout.get("page_size", 1),
        "bytes": number(inspection.layout.get("bytes_per_slot", 0)),
    }  # fmt: skip


def _requests(inspection: Inspection, held: Sequence[int], place: Mapping[int, int]) -> list[list[Any]]:
    """Returns for each request: row, id, lengths, indices of its owners (live, lanes, marks), age and idle time."""
    marks: dict[int, list[int]] = {}
    for register in held:
        if inspection.kinds[register] == "mark" and (match := OF_ROW.match(inspection.names[register])):
            marks.setdefault(int(match[1]), []).append(place[register])
    return [
        [
            row["row"], text(row["id"]), row["length"], row["confirmed"], row["finished"], row["unsettled"],
            [place.get(row["row"] * REGISTERS_PER_ROW + part, -1) for part in range(REGISTERS_PER_ROW)],
            marks.get(row["row"], []), row.get("age"), row.get("idle"),
        ]
        for row in inspection.rows
    ]  # fmt: skip


def _origins(inspection: Inspection) -> Iterator[tuple[int, str]]:
    """Yields, from the journal: (register of a published snapshot, name of the owner that had its state before)."""
    last = {change["register"]: change for change in inspection.changes if change["what"] != "release"}
    for register, change in last.items():
        if inspection.kinds.get(register) == "snapshot" and change["source_owner"]:
            yield register, text(change["source_owner"])


def _timeline(inspection: Inspection, kind_of: Mapping[str, int]) -> dict[str, Any]:
    """Returns columns of the journal's spans: group, register, kind, owner, length, packets, how they begin and end."""
    changed = {change[side] for change in inspection.changes for side in ("register", "source")}
    names = {register: name for register, name in inspection.names.items() if register in changed}
    known = [span for span in holdings_over(replace(inspection, names=names)) if span.serials[1]]
    shown = known[-SPANS:]
    groups: dict[str, int] = {}
    packets = [packet for span in shown for packet in (span.begin, span.end) if packet is not None]
    return {
        "spans": [
            [
                groups.setdefault(text(span.group), len(groups)), span.register, kind_of[kind(span.kind).name],
                text(span.owner), span.label, span.begin, span.end, span.filled, span.emptied,
            ]
            for span in shown
        ],
        "groups": list(groups),
        # a span without an end is drawn to the end of the timeline, which is now
        "packets": [min(packets, default=0), max(packets, default=0) + 1],
        "left": len(known) - len(shown),
    }  # fmt: skip


def _prefix(inspection: Inspection, place: Mapping[int, int]) -> dict[str, Any]:
    nodes = inspection.prefix
    salts: dict[str | None, list[int]] = {}
    for at, node in enumerate(nodes):
        if node["parent"] < 0:
            salts.setdefault(node["salt"], []).append(at)
    return {
        "up": [at - node["parent"] for at, node in enumerate(nodes)],
        "pages": [node["end"] - node["start"] for node in nodes],
        "owner": [place.get(node["register"], -1) if node["register"] else -1 for node in nodes],
        "flags": runs(node["evicted"] + 2 * node["ghost"] for node in nodes),
        "uses": runs(number(node["uses"]) for node in nodes),
        "leases": runs(node["leases"] for node in nodes),
        "salts": [[None if salt is None else text(salt), roots] for salt, roots in salts.items()],
    }


def head(inspection: Inspection) -> list[tuple[str, str]]:
    """Returns pairs (name, value): the figures at the top of the page."""
    size = inspection.layout.get("bytes_per_slot", 0)
    free = sum(inspection.free[1 : inspection.capacity + 1])
    return [
        ("slots", f"{inspection.capacity:,}"),
        ("free", f"{free:,}"),
        ("bytes of a slot", format_bytes(size)),
        ("bytes of all slots", format_bytes(size * inspection.capacity)),
        ("requests", f"{len(inspection.rows):,}"),
        ("sessions", f"{len(inspection.sessions):,}"),
        ("faults", f"{len(inspection.faults):,}"),
    ]


def tree_totals(inspection: Inspection) -> list[tuple[str, str]]:
    """Returns pairs (name, value): the figures of the whole prefix cache."""
    nodes = inspection.prefix
    states = sum(bool(node["register"]) for node in nodes)
    flags = Counter("ghost" if node["ghost"] else "evicted" if node["evicted"] else "" for node in nodes)
    pages = sum(node["end"] - node["start"] for node in nodes if not node["ghost"])
    return [
        ("nodes", f"{len(nodes):,}"),
        ("states", f"{states:,}"),
        ("bytes of states", format_bytes(states * inspection.layout.get("bytes_per_slot", 0))),
        ("KV pages", f"{pages:,}"),
        ("hits", f"{sum(node['uses'] for node in nodes):,}"),
        ("leases", f"{sum(node['leases'] for node in nodes):,}"),
        ("states evicted", f"{flags['evicted']:,}"),
        ("ghosts", f"{flags['ghost']:,}"),
    ]


def figures(stats: Mapping[str, Any], skip: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Returns pairs of texts (name, value), one for each figure. A figure inside another one gets the names of both.

    Args:
        stats: Figures by name, in the form of `Inspection.stats`.
        skip: Names to leave out.
    """
    rows: list[tuple[str, str]] = []
    for name, value in stats.items():
        if name in skip:
            continue
        if isinstance(value, Mapping):
            rows += [(f"{text(name)}: {inner}", each) for inner, each in figures(value)]
        else:
            shown = "none" if value is None else f"{value:,}"
            human = value is not None and value >= 1024 and str(name).endswith("bytes")
            rows.append((text(name).replace("_", " "), f"{shown} ({format_bytes(value)})" if human else shown))
    return rows


def planes(inspection: Inspection) -> list[dict[str, Any]]:
    """Returns for each plane: shape, bytes of one layer and of all layers, and widths of its bars in per cent."""
    layout = inspection.layout
    most = max((plane["payload"] + plane["padding"] for plane in layout.get("planes", ())), default=0) or 1
    return [
        {
            "name": text(plane["name"]),
            "shape": " x ".join(map(str, plane["shape"])),
            "dtype": text(plane["dtype"]),
            "payload": f"{plane['payload']:,}",
            "padding": f"{plane['padding']:,}",
            "total": format_bytes((plane["payload"] + plane["padding"]) * plane.get("layers", layout["layers"])),
            "width": 100 * plane["payload"] / most,
            "padded": 100 * plane["padding"] / most,
        }
        for plane in layout.get("planes", ())
    ]

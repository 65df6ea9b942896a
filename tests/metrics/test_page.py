"""The dashboard and docs/metrics.md name only figures and labels that exist, and leave no figure out."""

import json
import re
from collections.abc import Iterator

from memstate.metrics.dashboard import DASHBOARD
from memstate.metrics.table import COMMON, FIGURES, Figure
from tests.support.sources import ROOT

TARGETS = [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", ())]
QUERIES = [target["expr"] for target in TARGETS]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(memstate_\w+)` \| (\w+) \| ([^|]*)\| ", re.MULTILINE)


def exposed(figure: Figure) -> list[str]:
    """Returns the names by which queries use a figure."""
    endings = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
    return [f"{figure.name}{ending}" for ending in endings[figure.kind]]


EXPOSED = {
    name: {*COMMON, "instance", *figure.labels, *(["le"] if name.endswith("_bucket") else [])}
    for figure in FIGURES
    for name in exposed(figure)
}
WORDS = {
    "sum", "max", "by", "rate", "topk", "histogram_quantile", "ignoring", "group_left", "label_values",
}  # fmt: skip


def problems(query: str) -> Iterator[str]:
    """Yields the metrics, labels and functions in a PromQL query that do not exist, and brackets without a pair."""
    bare = re.sub(r'"[^"]*"', '""', query)  # drops values of labels
    bare = re.sub(r"\[[^\]]*\]", "", bare)  # drops durations
    if any(bare.count(a) != bare.count(b) for a, b in ("()", "{}")):
        yield "brackets"
    names = set(re.findall(r"\b[a-zA-Z_]\w*\b", re.sub(r"\{[^}]*\}|\b(?:by|ignoring) \([^)]*\)", "", bare)))
    yield from sorted(names - WORDS - EXPOSED.keys())
    metrics = names & EXPOSED.keys()
    grouped = re.findall(r"\b(?:by|ignoring) \(([^)]*)\)", bare)
    labels = {label.strip() for group in grouped for label in group.split(",")}
    for name, chosen in re.findall(r"(\w+)\{([^}]*)\}", bare):
        matched = {re.split(r"[=!]", each)[0].strip() for each in chosen.split(",") if each.strip()}
        yield from sorted(f"{name} has no {label}" for label in matched - EXPOSED.get(name, set()))
    for label in labels:
        if not any(label in EXPOSED[name] for name in metrics):
            yield f"no label {label}"
    if not metrics:
        yield "no metric"


def test_queries_of_the_dashboard_name_figures_that_exist() -> None:
    assert len(QUERIES) > 40 and {query: list(problems(query)) for query in QUERIES if list(problems(query))} == {}


def test_the_dashboard_of_the_documents_is_that_of_the_library() -> None:
    assert (ROOT / "docs" / "grafana.json").read_text() == DASHBOARD.read_text(), "make docs"


def test_O4_the_page_has_a_line_for_every_figure() -> None:
    lines = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in ROW.findall(PAGE)}
    assert lines == {
        figure.name if figure.kind == "histogram" else exposed(figure)[0]: (figure.kind, figure.labels)
        for figure in FIGURES
    }
    assert len(ROW.findall(PAGE)) == len(FIGURES)


def test_queries_of_the_page_name_figures_that_exist() -> None:
    blocks = re.findall(r"^ *```promql\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    queries = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    alerts = [re.sub(r" > \d+$", "", query) for query in queries]
    assert len(alerts) >= 10 and {query: list(problems(query)) for query in alerts if list(problems(query))} == {}
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    inline = set(re.findall(r"`(memstate_\w+)", prose))
    assert inline - EXPOSED.keys() <= {"memstate_step_host_seconds"}

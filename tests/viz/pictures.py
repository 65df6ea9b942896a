"""Writes the pictures of the guide, of docs/inspector.md and of docs/capacity.md: `python -m tests.viz.pictures`.

It needs Chromium. The pictures are SVG and follow the reader's light or dark scheme; each has a screenshot for both.
"""

import json
import shutil
from base64 import b64encode
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import memstate as ms
from memstate import viz
from memstate.slots.inspect import Inspection
from memstate.viz.inspector import page
from tests.support.inspected import leaking, served
from tests.support.scene import PROMPT, busy, faulty, serve

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
SCHEMES = ("light", "dark")
STYLE = ".dark{display:none}@media(prefers-color-scheme:dark){.light{display:none}.dark{display:inline}}"


def guide(tab: Any, folder: Path) -> None:
    """Writes three pictures of a small manager: its page, its timeline and its slots."""
    mem, kept = busy()
    shown = mem._repr_html_().replace("<details>", "<details open>", 2)
    tab.set_viewport_size({"width": 880, "height": 560})
    tab.set_content(f"<!doctype html><meta name=color-scheme content='light dark'><body style='margin:8px'>{shown}")
    wrap(folder / "manager.svg", tab, lambda: tab.screenshot())
    (folder / "timeline.svg").write_text(viz.timeline(mem.inspect())._repr_svg_())
    moments = [mem.inspect()]
    mem.drop(kept[:1])
    serve(mem, ms.Request("next", tokens=PROMPT[:14]), 3, end=False)
    moments.append(mem.inspect())
    with faulty(mem):
        moments.append(mem.inspect())
    drawn = viz.occupancy(moments, ["three requests", "the next one", "with faults"])
    (folder / "occupancy.svg").write_text(drawn._repr_svg_())


def inspector(tab: Any, path: Path, seen: Inspection, width: int, first: str, last: str, query: str = "") -> None:
    """Writes a picture of an inspection's page, from the top of element `first` to the end of element `last`."""
    tab.set_viewport_size({"width": width, "height": 800})
    tab.set_content(page(seen, "owners.json"))
    if query:
        tab.fill("#query", query)
        tab.press("#query", "Enter")

    def shot() -> bytes:
        tab.wait_for_timeout(200)
        top, end = tab.locator(first).bounding_box(), tab.locator(last).bounding_box()
        clip = {"x": 0, "y": max(0, top["y"] - 12), "width": width, "height": end["y"] + end["height"] - top["y"] + 24}
        return tab.screenshot(full_page=True, clip=clip)

    wrap(path, tab, shot)


def wrap(path: Path, tab: Any, shot: Callable[[], bytes]) -> None:
    """Writes an SVG with a screenshot in the light and one in the dark scheme."""
    from PIL import Image

    images = []
    for scheme in SCHEMES:
        tab.emulate_media(color_scheme=scheme)
        drawn, packed = Image.open(BytesIO(shot())).convert("RGB"), BytesIO()
        size = "width='{}' height='{}'".format(*drawn.size)
        drawn = drawn.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).convert("RGB")
        drawn.save(packed, "webp", lossless=True, quality=100, method=6)
        data = b64encode(packed.getvalue()).decode()
        images.append(f"<image class='{scheme}' {size} href='data:image/webp;base64,{data}'/>\n")
    path.write_text(
        f"<svg xmlns='http://www.w3.org/2000/svg' {size}>\n<style>{STYLE}</style>\n{''.join(images)}</svg>\n"
    )


def drawn_in(notebook: str) -> Iterator[str]:
    """Yields the pictures that a notebook has stored."""
    for cell in json.loads((ROOT / "notebooks" / notebook).read_text())["cells"]:
        for output in cell.get("outputs", ()):
            if "image/svg+xml" in output.get("data", {}):
                yield "".join(output["data"]["image/svg+xml"])


def write(folder: Path) -> None:
    """Writes all pictures to a folder."""
    from playwright.sync_api import sync_playwright

    (border,) = (svg for svg in drawn_in("06_sizing_a_deployment.ipynb") if ", best" in svg)
    (folder / "06_border.svg").write_text(border)
    with sync_playwright() as driver:
        tab = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        guide(tab, folder)
        inspector(tab, folder / "inspector.svg", served(), 1200, "header", "#requests")
        inspector(tab, folder / "inspector-search.svg", served(), 1200, "header", "#requests", query="req-7")
        inspector(tab, folder / "inspector-leak.svg", leaking(), 1200, "header", "#slots", query="leaked")
        inspector(tab, folder / "inspector-sessions.svg", served(), 1440, "#sessions", "#tiers")
        inspector(tab, folder / "inspector-narrow.svg", leaking(), 400, "header", "#timeline")


if __name__ == "__main__":
    write(IMAGES)

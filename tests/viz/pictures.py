"""Writes the pictures of the guide and of docs/inspector.md: `python -m tests.viz.pictures`. It needs Chromium."""

import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import memstate as ms
from memstate import viz
from memstate.slots.inspect import Inspection
from memstate.viz.inspector import page
from tests.support.inspected import leaking, served
from tests.support.scene import PROMPT, busy, faulty, serve

IMAGES = Path(__file__).parents[2] / "docs" / "images"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")


def guide(tab: Any, folder: Path) -> None:
    """Draws a small manager in three ways."""
    mem, kept = busy()
    shown = mem._repr_html_().replace("<details>", "<details open>", 2)
    tab.set_viewport_size({"width": 880, "height": 560})
    tab.set_content(f'<!doctype html><body style="margin:8px;background:#fff">{shown}')
    tab.screenshot(path=folder / "manager.png")
    viz.timeline(mem.inspect()).savefig(folder / "timeline.png", dpi=90)
    moments = [mem.inspect()]
    mem.drop(kept[:1])
    serve(mem, ms.Request("next", tokens=PROMPT[:14]), 3, end=False)
    moments.append(mem.inspect())
    with faulty(mem):
        moments.append(mem.inspect())
    viz.occupancy(moments, ["three requests", "the next one", "with faults"]).savefig(folder / "occupancy.png", dpi=90)


def inspector(
    tab: Any, path: Path, seen: Inspection, width: int, first: str, last: str, scheme: str = "light", query: str = ""
) -> None:
    """Draws an inspection, from the top of one part of the page to the end of another."""
    from PIL import Image

    tab.set_viewport_size({"width": width, "height": 800})
    tab.emulate_media(color_scheme=scheme)
    tab.set_content(page(seen, "owners.json"))
    if query:
        tab.fill("#query", query)
        tab.press("#query", "Enter")
    tab.wait_for_timeout(200)
    top, end = tab.locator(first).bounding_box(), tab.locator(last).bounding_box()
    clip = {"x": 0, "y": max(0, top["y"] - 12), "width": width, "height": end["y"] + end["height"] - top["y"] + 24}
    drawn = Image.open(BytesIO(tab.screenshot(full_page=True, clip=clip))).convert("RGB")
    drawn.quantize(192, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)


def write(folder: Path) -> None:
    """Draws everything."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        tab = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]).new_page()
        guide(tab, folder)
        inspector(tab, folder / "inspector-light.png", served(), 1200, "header", "#requests")
        inspector(tab, folder / "inspector-dark.png", served(), 1200, "header", "#requests", "dark", "req-7")
        inspector(tab, folder / "inspector-leak.png", leaking(), 1200, "header", "#slots", query="leaked")
        inspector(tab, folder / "inspector-sessions.png", served(), 1200, "#sessions", "#tiers")
        inspector(tab, folder / "inspector-narrow.png", leaking(), 400, "header", "#timeline")


if __name__ == "__main__":
    write(IMAGES)

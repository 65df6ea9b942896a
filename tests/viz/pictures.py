"""Writes the pictures of the guide: `python -m tests.viz.pictures`. The manager's page needs Chromium."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import memstate as ms
from memstate import viz
from tests.support.scene import PROMPT, busy, faulty, serve

IMAGES = Path(__file__).parents[2] / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def write() -> None:
    """Draws a small manager in three ways."""
    mem, kept = busy()
    page = mem._repr_html_().replace("<details>", "<details open>", 2)
    shoot(f'<body style="margin:8px;background:#fff">{page}', IMAGES / "manager.png", 880, 560)
    drawn = viz.timeline(mem.inspect())
    drawn.savefig(IMAGES / "timeline.png", dpi=90)
    moments = [mem.inspect()]
    mem.drop(kept[:1])
    serve(mem, ms.Request("next", tokens=PROMPT[:14]), 3, end=False)
    moments.append(mem.inspect())
    with faulty(mem):
        moments.append(mem.inspect())
    viz.occupancy(moments, ["three requests", "the next one", "with faults"]).savefig(IMAGES / "occupancy.png", dpi=90)


def shoot(page: str, path: Path, width: int, height: int) -> None:
    """Writes a page as a picture."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "page.html").write_text(f'<!doctype html><meta charset="utf-8">{page}')
        options = ("--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}")
        subprocess.run([browser, *options, f"--screenshot={path}", file.as_uri()], check=True, timeout=60)


if __name__ == "__main__":
    write()

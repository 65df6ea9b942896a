"""A tab of a headless browser, for tests of pages."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.viz.pictures import CHROMIUM


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    """A tab of one headless browser, for all tests of a file."""
    if not CHROMIUM:
        pytest.skip("no chromium, chromium-browser or google-chrome on the path: the page is not tried in a browser")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened.new_page()
        opened.close()

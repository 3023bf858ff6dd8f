"""A headless browser for the tests of pages; they are skipped where there is none."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def launched() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        if found is None and not Path(own).exists():
            missing = f"no browser: none of {', '.join(NAMES)} is installed"
            assert "FAIRWIND_NEEDS_BROWSER" not in os.environ, missing
            pytest.skip(missing)
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found or own, args=flags)
        yield browser
        browser.close()

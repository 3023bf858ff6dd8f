"""Pictures of a report page, for docs/report.md: needs Playwright (the dev extra) and Chromium.

fairwind compare synthetic --rounds 60 --out runs/screenshots
python docs/screenshots.py runs/screenshots
"""

import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FIGURES = Path(__file__).parent / "figures"
WIDTH = 1040
PARTS = {  # by the heading of a section
    "summary": "Summary",
    "rounds": "Over the rounds",
    "targets": "Rounds and costs to a target",
    "spread": "How clients are spread",
    "sizes": "Against client size",
    "clients": "Client by client",
}


def shoot(page: Page, name: str, selector: str, tallest: int = 700) -> None:
    """A picture of an element, cut where it is too tall, as report-NAME.png."""
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    clip = {"x": 0.0, "y": box["y"] - 12, "width": float(WIDTH), "height": min(box["height"] + 24, tallest)}
    page.screenshot(path=FIGURES / f"report-{name}.png", clip=clip, full_page=True)  # type: ignore[arg-type]


def main(directory: Path) -> None:
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto((directory / "report.html").absolute().as_uri())
        page.evaluate("drawn")
        page.add_style_tag(content=".legend { position: static !important; }")
        shoot(page, "head", "main", tallest=440)
        for name, heading in PARTS.items():
            shoot(page, name, f"section:has(h2:text-is('{heading}'))")
        page.locator("button.name").nth(8).click()
        page.wait_for_function("document.querySelector('#client-chart svg') !== null")
        page.wait_for_timeout(300)
        page.locator("#client").screenshot(path=FIGURES / "report-client.png")
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

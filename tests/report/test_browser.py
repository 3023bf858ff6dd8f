"""The report in a real browser: what a click, a key and a screen reader find; skipped where there is none."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browsers import launched
from fairwind.report import write_report
from made_up import write_run

LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
Page = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    algorithms = ["fedavg", "adafedadam", "fedavg:lr=0.5"]
    write_run(directory, algorithms, clients=40, level={"adafedadam": 88.0, "fedavg:lr=0.5": 70.0})
    write_report(directory)
    return directory / "report.html"


def opened(browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> Page:
    """The page with its charts drawn; an error in its scripts fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.failures = []
    page.on("pageerror", lambda error: page.failures.append(str(error)))
    page.on("console", lambda said: page.failures.append(said.text) if said.type == "error" else None)
    page.goto(path.as_uri())
    page.evaluate("drawn")
    assert page.failures == []
    return page


def lines(page: Page, chart: str) -> int:
    """How many lines a chart draws."""
    found: int = page.locator(f"#{chart} g.mark-line path").count()
    return found


def key(page: Page, name: str) -> Any:
    return page.locator(".legend").get_by_role("button", name=name, exact=True)


def test_a_click_on_the_legend_hides_an_algorithm_in_every_chart(browser: Any, report: Path) -> None:
    page = opened(browser, report)
    charts = ("average", "worst30", "distribution", "sizes")
    assert [lines(page, chart) for chart in charts] == [3, 3, 3, 3]
    key(page, "FedAvg").click()
    page.wait_for_function("document.querySelectorAll('#average g.mark-line path').length === 2")
    assert [lines(page, chart) for chart in charts] == [2, 2, 2, 2]
    assert key(page, "FedAvg").get_attribute("aria-pressed") == "false"
    assert not page.locator('#clients-table th[data-column="a0"]').is_visible()
    assert page.locator('#clients-table th[data-column="a1"]').is_visible()
    page.get_by_role("button", name="All", exact=True).click()
    page.wait_for_function("document.querySelectorAll('#average g.mark-line path').length === 3")
    assert page.failures == []


def column(page: Page, number: int) -> list[str]:
    found: list[str] = page.locator(f"#clients-table tbody tr > :nth-child({number})").all_text_contents()
    return found


def test_clients_are_sorted_and_searched(browser: Any, report: Path) -> None:
    page = opened(browser, report)
    head = page.get_by_role("button", name="test samples", exact=True)
    head.click()
    sizes = [int(text) for text in column(page, 3)]
    assert sizes == list(range(20))
    head.click()
    assert [int(text) for text in column(page, 3)] == list(range(39, 19, -1))
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="AdaFedAdam", exact=True).last.click()
    scores = [float(text) for text in column(page, 5)]
    assert scores == sorted(scores)
    page.get_by_label("Search").fill("17")
    assert column(page, 1) == ["17"]
    assert page.locator("#clients-status").text_content() == "1 of 1 clients"


def test_a_client_opens_with_its_curve_under_every_algorithm(browser: Any, report: Path) -> None:
    page = opened(browser, report)
    page.get_by_label("Search").fill("17")
    page.get_by_role("button", name="17", exact=True).click()
    dialog = page.get_by_role("dialog", name="Client 17")
    assert dialog.is_visible()
    page.wait_for_function("document.querySelectorAll('#client-chart g.mark-line path').length === 3")
    assert "180 training samples, 17 test samples. One test sample is 5.88 points." in dialog.inner_text()
    assert dialog.locator("tbody tr").count() == 3
    dialog.get_by_role("button", name="Close").click()
    assert not dialog.is_visible()
    page.locator("#clients").scroll_into_view_if_needed()
    page.locator("#clients g.mark-rect path").first.click(force=True)  # of the chart of all clients
    page.wait_for_function("document.querySelector('#client').open")
    assert page.failures == []


def test_everything_is_reached_by_keyboard(browser: Any, report: Path) -> None:
    page = opened(browser, report)
    key(page, "FedAvg").focus()
    page.keyboard.press("Space")
    assert key(page, "FedAvg").get_attribute("aria-pressed") == "false"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.name") == "AdaFedAdam"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.get_by_label("Search").fill("17")
    page.keyboard.press("Tab")  # over the table's own stop, to its first heading
    while page.evaluate("document.activeElement.textContent") != "17":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.get_by_role("dialog").is_visible()
    assert page.evaluate("document.activeElement.textContent") == "17"


def test_a_target_is_tried_out(browser: Any, report: Path) -> None:
    page = opened(browser, report)
    rows = page.locator("#targets-table tbody tr")
    page.get_by_role("spinbutton", name="Target").fill("20")
    first = rows.nth(0).locator("td").all_text_contents()
    assert first[1] == f"{2 * int(first[0])}"  # two seconds a round
    page.get_by_role("spinbutton", name="Target").fill("99")
    assert rows.nth(0).locator("td").all_text_contents() == ["–", "–"]
    assert page.locator("#target-status").text_content() == "0 of 3 reach it"


def saved(page: Page, menu: str, kind: str) -> Path:
    page.get_by_label(menu).click()
    with page.expect_download() as download:
        page.locator("details.save[open]").get_by_role("button", name=kind, exact=True).click()
    page.get_by_label(menu).click()
    return Path(download.value.path())


def test_tables_and_figures_are_saved(browser: Any, report: Path) -> None:
    page = opened(browser, report, scheme="dark")
    rows = list(csv.reader(saved(page, "Save the table Clients", "CSV").read_text().splitlines()))
    assert rows[0] == [
        "client",
        "training samples",
        "test samples",
        "FedAvg",
        "AdaFedAdam",
        "FedAvg (lr=0.5)",
    ]
    assert len(rows) == 41
    summary = list(csv.reader(saved(page, "Save the table Summary", "CSV").read_text().splitlines()))
    assert [row[0] for row in summary] == ["", "FedAvg", "AdaFedAdam", "FedAvg (lr=0.5)"]
    curves = list(
        csv.reader(saved(page, "Save the chart Average over clients", "CSV").read_text().splitlines())
    )
    assert curves[0] == ["algorithm", "round", "mean", "low", "high"]
    assert saved(page, "Save the chart Average over clients", "PNG").read_bytes().startswith(b"\x89PNG")
    drawn = saved(page, "Save the chart Average over clients", "SVG").read_text()
    assert drawn.startswith("<svg")
    assert "FedAvg (lr=0.5)" in drawn  # with its own legend
    assert page.failures == []


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_nothing_is_wider_than_the_screen(browser: Any, report: Path, width: int, scheme: str) -> None:
    page = opened(browser, report, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_table_that_goes_on_beyond_the_edge_shows_it(
    browser: Any, report: Path, width: int, scheme: str
) -> None:
    page = opened(browser, report, width, scheme)
    table = page.get_by_role("region", name="Summary", exact=True)
    table.scroll_into_view_if_needed()

    def is_shaded() -> bool:
        """Whether the upper right corner, where no text is, looks other than the upper left one."""
        box = table.bounding_box()
        left, right = (
            page.screenshot(clip={"x": x, "y": box["y"] + 1, "width": 4, "height": 4})
            for x in (box["x"], box["x"] + box["width"] - 4)
        )
        return bool(left != right)

    assert is_shaded() == (width == 390)
    table.evaluate("(region) => { region.scrollLeft = 100; }")
    assert is_shaded() == (width == 390)
    table.evaluate("(region) => { region.scrollLeft = 10000; }")
    assert not is_shaded()


def test_what_is_clicked_is_not_printed(browser: Any, report: Path) -> None:
    page = opened(browser, report)
    page.emulate_media(media="print")
    assert not page.locator(".save").first.is_visible()
    assert not page.locator(".controls").first.is_visible()


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_axe_finds_nothing_serious(browser: Any, report: Path, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    page = opened(browser, report, width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    key(page, "FedAvg").click()  # one key that is not pressed
    assert_accessible(axe, page)
    page.locator("button.name").first.click()
    page.wait_for_function("document.querySelectorAll('#client-chart g.mark-line path').length === 2")
    assert_accessible(axe, page)


def assert_accessible(axe: Any, page: Page) -> None:
    found = axe.Axe().run(page).response["violations"]
    serious = [
        f"{each['id']}: {each['help']}: {node['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]
    assert serious == []
